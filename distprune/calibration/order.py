"""In which order a block runs its linear layers, and which of their outputs it adds to its hidden states.

Both are found by running it once. What it adds is told by values alone: a block puts out what it was given plus some
outputs of its layers, as they are, however it adds them, be it in a fused kernel. Where it adds what a mixture of
experts puts out, that is the output of a module that holds layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.calibration.listening import first_layers, listening
from distprune.calibration.walk import Walk
from distprune.collectives.agree import told_by_all
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer
from distprune.shards.device import fetched

_NUM_TOKENS = 64  # whose sums are looked at
_NUM_ROUNDINGS = 4  # of the sums that a block makes; each is at most eps / 2 of what it adds


@dataclass(frozen=True)
class BlockOrder:
    """The same on every rank.

    ``stages`` are layers that can be pruned at once: those of a stage are not given what others of it put out, but
    where they are the experts of one layer. The outputs of those in ``adding`` are added to hidden states as they are
    (see :mod:`distprune.calibration.listening`). ``shifted`` have a target for their inputs' shift: all not in
    ``adding``, and those that share an input with one.
    ``called_once`` are those whose modules run once, on whatever sample.
    """

    stages: tuple[tuple[str, ...], ...]
    adding: frozenset[str]
    shifted: frozenset[str]
    called_once: frozenset[str]

    def of(self, linears: Collection[str]) -> BlockOrder:
        """Return the order of ``linears`` alone; all that add to hidden states are still named."""
        stages = (tuple(name for name in stage if name in linears) for stage in self.stages)
        return dataclasses.replace(
            self, stages=tuple(stage for stage in stages if stage), shifted=self.shifted.intersection(linears)
        )

    def at_once(self) -> BlockOrder:
        """Return the order with all layers in one stage."""
        return dataclasses.replace(self, stages=(tuple(name for stage in self.stages for name in stage),))


def learn_order(comm: Communicator, walk: Walk, index: int, linears: Mapping[str, LinearLayer]) -> BlockOrder:
    """Run block ``index`` on this rank's first batch and return in which order it runs ``linears``.

    Experts of one layer, which are numbered, are of one stage whether these samples reached them or not; other layers
    that no rank's samples reached come last. Every rank must call it: the rounds of :func:`told_by_all`, of which one
    of 64 bytes is enough where all ranks' runs tell the same.
    """
    num_calls, adding, sharing = Counter[str](), set[str](), list[list[str]]()
    for _, told in told_by_all(comm, lambda: _run(walk, index, linears)):
        num_calls |= Counter(told["calls"])
        adding.update(told["adding"])
        sharing += told["sharing"]
    firsts = {module: name for name, module in first_layers(linears).items()}
    called_once = frozenset(name for name, linear in linears.items() if num_calls[firsts[linear.module]] == 1)
    adding &= called_once
    shifted = linears.keys() - adding
    for kinds in sharing:
        if not adding.issuperset(kinds):
            shifted |= adding.intersection(kinds)
    return BlockOrder(_stages(list(linears), sharing), frozenset(adding), frozenset(shifted), called_once)


def _run(walk: Walk, index: int, linears: Mapping[str, LinearLayer]) -> dict[str, Any]:
    """Return what one run of block ``index`` tells: alike on all ranks, in nearly all models.

    ``calls``: how often each module is called, by its first layer, but for numbered ones: which of these, the router
    may decide. ``adding``: the layers whose outputs are found to be addends. ``sharing``: the kinds of layers that
    share an input, in the order in which they are first given one.
    """
    heard, block, width = _Heard(), walk.blocks[index][1], walk.hidden[0].shape[-1]
    modules = {
        name: linear.module for name, linear in linears.items() if linear.expert is None and linear.num_out == width
    }
    routed = {linear.module for linear in linears.values() if linear.expert is not None}
    experts = [name for name, module in block.named_modules() if module in routed]
    around = {*experts, *(name.partition(".")[0] for name in experts)}
    modules |= {name: block.get_submodule(name) for name in around}
    with listening(walk, linears, heard, {}), keeping_outputs(modules) as outputs, walk.block(index) as run:
        output = run(0)
    addends = find_addends(walk.hidden[0].to(output.device), output, outputs, experts)
    numbered = {name for name, linear in linears.items() if linear.expert is None and kind_of(name) != name}
    calls = {name: num for name, num in heard.num_calls.items() if name not in numbered}
    sharing = dict.fromkeys(tuple(sorted({kind_of(name) for name in names})) for names in heard.inputs.values())
    return {"calls": calls, "adding": sorted(addends & linears.keys()), "sharing": [list(kinds) for kinds in sharing]}


@dataclass
class _Heard:
    """What one run tells: the layers that share an input, by the first of them, and the calls of each module."""

    inputs: dict[str, list[str]] = field(default_factory=dict)
    num_calls: Counter[str] = field(default_factory=Counter)

    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:  # noqa: ARG002
        self.inputs.setdefault(first, []).append(name)

    def passed(self, name: str) -> None:
        self.num_calls[name] += 1

    def added(self, name: str, total: torch.Tensor) -> None: ...


def _stages(names: Sequence[str], sharing: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the stages of layers ``names``, of kinds ``sharing`` an input on some rank; the first rank's go first."""
    stages: list[set[str]] = []
    for kinds in map(set, sharing):
        known = next((stage for stage in stages if stage & kinds), None)
        if known is None:
            stages.append(kinds)
        else:
            known |= kinds
    reached = set[str]().union(*stages)
    stages.append({kind for kind in map(kind_of, names) if kind not in reached})
    of_stages = (tuple(name for name in names if kind_of(name) in stage) for stage in stages)
    return tuple(stage for stage in of_stages if stage)


def kind_of(name: str) -> str:
    """Return ``name`` without its numbers, which tell experts apart."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


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
    given: torch.Tensor, output: torch.Tensor, outputs: Mapping[str, torch.Tensor], experts: Collection[str]
) -> set[str]:
    """Return which of ``outputs`` the ``output`` of a block is the sum of, beside what it was ``given``. Local.

    Nothing, if it is no such sum, to within rounding. ``outputs`` are those of :func:`keeping_outputs`: of layers, of
    modules that hold ``experts``, and of children of the block that hold these. They are tried in turn: layers alone,
    with experts, and such children in place of all that is within.
    """
    given, output = _some_tokens(given), _some_tokens(output)
    alike = {name: values for name, values in outputs.items() if values.shape == given.shape}
    if output.shape != given.shape:
        return set()
    children = {name.partition(".")[0] for name in experts}
    with_experts = alike.keys() - children
    outer = {name for name in alike if name in children or name.partition(".")[0] not in children}
    tries = (with_experts - set(experts), with_experts, outer)
    addends = (_addends(given, output, {name: alike[name] for name in sorted(names)}) for names in tries)
    return next(filter(None, addends), set())


def _addends(given: torch.Tensor, output: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> set[str]:
    if not outputs:
        return set()
    change = (output.double() - given.double()).flatten()
    columns = torch.stack([values.double().flatten() for values in outputs.values()], dim=1)
    # The least squares fit is 1 of an addend and 0 of another output; what it is not sure of the check refuses.
    products, aims = fetched([columns.t() @ columns, columns.t() @ change])
    if not (products.isfinite().all() and aims.isfinite().all()):  # the walk says where
        return set()
    fitted = torch.linalg.lstsq(products, aims[:, None]).solution[:, 0].round()
    addends = {name for name, share in zip(outputs, fitted.tolist(), strict=True) if share == 1}
    terms = [given.double(), *(outputs[name].double() for name in addends)]
    size = torch.stack([term.abs() for term in terms]).sum(dim=0)
    eps = max(torch.finfo(values.dtype).eps for values in (given, output, *outputs.values()))
    is_sum = bool(((output.double() - sum(terms)).abs() <= _NUM_ROUNDINGS * eps * size).all())
    return addends if is_sum else set()


def _some_tokens(values: torch.Tensor) -> torch.Tensor:
    return values.detach().reshape(-1, values.shape[-1])[:_NUM_TOKENS]
