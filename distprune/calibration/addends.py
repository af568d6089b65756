"""Which outputs of layers a block adds to its hidden states, told by values alone.

A block puts out what it was given plus some outputs of its layers, as they are, however it adds them, be it in a fused
kernel. Where it adds what a mixture of experts puts out, that is the output of a module that holds layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.shards.device import fetched

_NUM_TOKENS = 64  # that are looked at
_NUM_ROUNDINGS = 4  # of the sums that a block makes; each is at most eps / 2 of what it adds


@contextmanager
def keeping_outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what will hold what each of ``modules`` puts out first while this lasts, of some tokens. Local."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        hidden = output[0] if isinstance(output, tuple) else output
        is_whole = isinstance(hidden, torch.Tensor) and not isinstance(hidden, DTensor)
        if is_whole and hidden.numel() and name not in outputs:
            outputs[name] = _some_tokens(hidden).clone()  # a block may add to it in place

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        yield outputs


def find_addends(
    given: torch.Tensor, output: torch.Tensor, outputs: Mapping[str, torch.Tensor], experts: Collection[str] = ()
) -> set[str]:
    """Return which of ``outputs`` the ``output`` of a block is the sum of, beside what it was ``given``. Local.

    Nothing, if it is no such sum, to within rounding. ``outputs`` are those of :func:`keeping_outputs`: of layers, of
    modules that hold ``experts``, and of children of the block that hold these. They are tried in turn: layers alone,
    with experts, and such children in place of all that is within.
    """
    given, output = _some_tokens(given), _some_tokens(output)
    alike = {name: of for name, of in outputs.items() if of.shape == given.shape}
    if output.shape != given.shape:
        return set()
    children = {name.partition(".")[0] for name in experts}
    with_experts = alike.keys() - children
    outer = {name for name in alike if name in children or name.partition(".")[0] not in children}
    tries = (with_experts - set(experts), with_experts, outer)
    found = (_addends(given, output, {name: alike[name] for name in sorted(names)}) for names in tries)
    return next(filter(None, found), set())


def _addends(given: torch.Tensor, output: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> set[str]:
    if not outputs:
        return set()
    change = (output.double() - given.double()).flatten()
    columns = torch.stack([of.double().flatten() for of in outputs.values()], dim=1)
    # The least squares fit is 1 of an addend and 0 of another output; what it is not sure of the check refuses.
    products, aims = fetched([columns.t() @ columns, columns.t() @ change])
    if not (products.isfinite().all() and aims.isfinite().all()):  # the walk says where
        return set()
    fitted = torch.linalg.lstsq(products, aims[:, None]).solution[:, 0].round()
    found = {name for name, share in zip(outputs, fitted.tolist(), strict=True) if share == 1}
    terms = [given.double(), *(outputs[name].double() for name in found)]
    size = torch.stack([term.abs() for term in terms]).sum(dim=0)
    eps = max(torch.finfo(of.dtype).eps for of in (given, output, *outputs.values()))
    is_sum = bool(((output.double() - sum(terms)).abs() <= _NUM_ROUNDINGS * eps * size).all())
    return found if is_sum else set()


def _some_tokens(values: torch.Tensor) -> torch.Tensor:
    return values.detach().reshape(-1, values.shape[-1])[:_NUM_TOKENS]
