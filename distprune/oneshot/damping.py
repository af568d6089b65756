"""Factors of second moments that may be singular: their diagonal is raised until there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distprune.shards.device import are_finite

DAMPING = 0.3  # lambda, as a share of the diagonal, where weights are refitted: with less, few windows are overfitted
_MAX_RAISED = 8

Factorize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def damped_factor(
    products: torch.Tensor,
    damping: torch.Tensor | float,
    name: str,
    *,
    besides: float = 0.0,
    factorize: Factorize = torch.linalg.cholesky_ex,
) -> tuple[torch.Tensor, int]:
    """Return the factor of ``products`` (in, in) with ``damping`` added to its diagonal, and how often it was raised.

    ``damping`` is raised tenfold, at most 8 times, as long as there is no factor or it is not finite. ``products`` is
    overwritten; ``besides`` is added to its diagonal, too, and not raised; ``factorize`` returns a factor and, as
    ``cholesky_ex`` does, 0 if there is one. Local. One wait for a device.

    Raises:
        ValueError: no damping helps; ``name`` is that of a layer with these inputs.
    """
    diagonal = products.diagonal().clone()
    for num_raised in range(_MAX_RAISED + 1):
        products.diagonal().copy_(diagonal + (damping * 10**num_raised + besides))
        factor, info = factorize(products)
        if bool((info == 0) & are_finite(factor)):
            return factor, num_raised
    raise ValueError(
        f"the second moments of the {len(products)} inputs of {name!r} have no inverse, although the damping was "
        f"raised to 10^{_MAX_RAISED} times what was asked for"
    )
