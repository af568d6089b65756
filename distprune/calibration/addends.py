"""Which outputs of layers a block adds to its hidden states, told by values alone.

For blocks whose additions torch does not show: a fused kernel that adds and normalises. Such a block still puts out
what it was given plus some outputs of its layers, as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from distprune.models.linear_layers import LinearLayer
from distprune.shards.device import are_finite

_NUM_TOKENS = 64  # that are looked at
_NUM_ROUNDINGS = 4  # of the sums that a block makes; each is at most eps / 2 of what it adds


@contextmanager
def keeping_outputs(linears: Mapping[str, LinearLayer], outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Copy into ``outputs`` what the modules of ``linears`` put out first while this lasts, of some tokens. Local."""

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        if type(output) is torch.Tensor and output.numel() and name not in outputs:
            outputs[name] = _some_tokens(output).clone()  # a block may add to it in place

    with ExitStack() as stack:
        for name, linear in linears.items():
            stack.callback(linear.module.register_forward_hook(partial(keep, name)).remove)
        yield


def find_addends(
    given: torch.Tensor, output: torch.Tensor, outputs: Mapping[str, torch.Tensor], known: Collection[str]
) -> set[str]:
    """Return which of ``outputs`` the ``output`` of a block is the sum of, beside what it was ``given``. Local.

    Nothing, if it is no such sum, to within rounding, or one without all those that are ``known`` to be addends.
    ``outputs`` are those of :func:`keeping_outputs`.
    """
    given, output = _some_tokens(given), _some_tokens(output)
    alike = {name: of for name, of in outputs.items() if of.shape == given.shape}
    if output.shape != given.shape or not alike or not alike.keys() >= set(known):
        return set()
    change = output.double() - given.double()
    columns = torch.stack([of.double().flatten() for of in alike.values()], dim=1)
    # The least squares fit is 1 of an addend and 0 of another output; what it is not sure of the check refuses.
    products, aims = (columns.t() @ columns).cpu(), (columns.t() @ change.flatten()).cpu()
    if not (are_finite(products) and are_finite(aims)):  # the walk says where
        return set()
    fitted = torch.linalg.lstsq(products, aims[:, None]).solution[:, 0].round()
    found = {name for name, share in zip(alike, fitted.tolist(), strict=True) if share == 1}
    terms = [given.double(), *(alike[name].double() for name in found)]
    size = torch.stack([term.abs() for term in terms]).sum(dim=0)
    eps = max(torch.finfo(of.dtype).eps for of in (given, output, *alike.values()))
    is_sum = bool(((output.double() - sum(terms)).abs() <= _NUM_ROUNDINGS * eps * size).all())
    return found if is_sum and found >= set(known) else set()


def _some_tokens(values: torch.Tensor) -> torch.Tensor:
    return values.detach().reshape(-1, values.shape[-1])[:_NUM_TOKENS]
