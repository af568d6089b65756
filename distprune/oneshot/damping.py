"""Factors of second moments that may be singular: their diagonal is raised until there is one."""

from __future__ import annotations

import torch

from distprune.shards.device import are_finite

DAMPING = 0.3  # lambda, as a share of the diagonal, where weights are refitted: with less, few windows are overfitted
_MAX_RAISED = 8


def damped_factor(
    products: torch.Tensor, damping: torch.Tensor | float, name: str, *, besides: float = 0.0
) -> tuple[torch.Tensor, int]:
    """Return the lower factor of ``products`` (in, in), ``damping`` added to its diagonal, and how often it was raised.

    ``damping`` is raised tenfold, at most 8 times, as long as there is no factor or it is not finite. ``products`` is
    overwritten; ``besides`` is added to its diagonal, too, and not raised. Local. One wait for a device.

    Raises:
        ValueError: no damping helps; ``name`` is that of a layer with these inputs.
    """
    diagonal = products.diagonal().clone()
    for num_raised in range(_MAX_RAISED + 1):
        products.diagonal().copy_(diagonal + (damping * 10**num_raised + besides))
        factor, info = torch.linalg.cholesky_ex(products)
        if bool((info == 0) & are_finite(factor)):
            return factor, num_raised
    raise ValueError(
        f"the second moments of the {len(products)} inputs of {name!r} have no inverse, although the damping was "
        f"raised to 10^{_MAX_RAISED} times what was asked for"
    )
