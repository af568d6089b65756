"""In which order a block runs its linear layers, found by running it once."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distprune.calibration.addends import find_addends, keeping_outputs
from distprune.calibration.listening import first_layers, listening
from distprune.calibration.walk import Walk
from distprune.collectives import Communicator, together
from distprune.models import LinearLayer


@dataclass(frozen=True)
class BlockOrder:
    """The same on every rank.

    ``stages`` are layers that can be pruned at once: those of a stage are not given what others of it put out, but
    where they are the experts of one layer. The outputs of those in ``adding`` are added to hidden states as they are
    (see :mod:`distprune.calibration.listening`); of those in ``unseen`` only values tell so. ``shifted`` have a target
    for their inputs' shift: all not in ``adding``, and those that share an input with one.
    ``called_once`` are those whose modules run once, on whatever sample.
    """

    stages: tuple[tuple[str, ...], ...]
    adding: frozenset[str]
    shifted: frozenset[str]
    called_once: frozenset[str]
    unseen: frozenset[str] = frozenset()

    def of(self, linears: Collection[str]) -> BlockOrder:
        """Return the order of ``linears`` alone; all that add to hidden states are still named."""
        stages = (tuple(name for name in stage if name in linears) for stage in self.stages)
        return dataclasses.replace(
            self, stages=tuple(stage for stage in stages if stage), shifted=self.shifted.intersection(linears)
        )

    def at_once(self) -> BlockOrder:
        """Return the order with all layers in one stage."""
        return dataclasses.replace(self, stages=(tuple(name for stage in self.stages for name in stage),))


@dataclass
class _Heard:
    """What one run tells."""

    width: int  # of hidden states
    linears: Mapping[str, LinearLayer]
    inputs: dict[str, list[str]] = field(default_factory=dict)  # the layers that share one, by the first
    num_calls: Counter[str] = field(default_factory=Counter)
    adding: list[str] = field(default_factory=list)

    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:  # noqa: ARG002
        self.inputs.setdefault(first, []).append(name)

    def passed(self, name: str) -> None:
        self.num_calls[name] += 1

    def added(self, name: str, total: torch.Tensor) -> None:
        if total.shape[-1] == self.width:
            self.adding.append(name)

    def candidates(self) -> dict[str, LinearLayer]:
        return {name: of for name, of in self.linears.items() if of.expert is None and of.num_out == self.width}


def learn_order(comm: Communicator, walk: Walk, index: int, linears: Mapping[str, LinearLayer]) -> BlockOrder:
    """Run block ``index`` on this rank's first sample and return in which order it runs ``linears``.

    Experts of one layer, which are numbered, are of one stage whether this sample reached them or not; other layers
    that no rank's sample reached come last. Every rank must call it: three rounds, two of the layers' names.
    """
    heard, outputs = _Heard(walk.hidden[0].shape[-1], linears), dict[str, torch.Tensor]()
    with together(comm):
        candidates = heard.candidates()
        with listening(linears, heard, candidates), keeping_outputs(candidates, outputs), walk.block(index) as run:
            output = run(0)
        found = find_addends(walk.hidden[0].to(output.device), output, outputs, heard.adding)
    told = [list(heard.inputs.values()), heard.adding, heard.num_calls, sorted(found)]
    return _merged(linears, comm.gather(told))


def _merged(linears: Mapping[str, LinearLayer], told: Sequence[Any]) -> BlockOrder:
    """Return the order that all ranks' runs tell; the first rank's goes first."""
    stages: list[set[str]] = []  # of kinds
    sharing: list[set[str]] = []
    num_calls = Counter[str]()  # the most of any rank
    for inputs, _, calls, _ in told:
        for names in inputs:
            kinds = {_kind(name) for name in names}
            known = next((stage for stage in stages if stage & kinds), None)
            if known is None:
                stages.append(kinds)
            else:
                known |= kinds
            sharing.append(set(names))
        num_calls |= Counter(calls)
    called_once = _called_once(linears, num_calls)
    seen = called_once.intersection(*(added for _, added, _, _ in told))
    adding = called_once.intersection(*({*added, *found} for _, added, _, found in told))
    found = [tuple(name for name in linears if _kind(name) in stage) for stage in stages]
    unheard = tuple(name for name in linears if not any(name in stage for stage in found))
    others = linears.keys() - adding
    shifted = others.union(*(names for names in sharing if names & others))
    return BlockOrder(
        tuple(found) + ((unheard,) if unheard else ()),
        adding,
        frozenset(shifted & linears.keys()),
        called_once,
        adding - seen,
    )


def _called_once(linears: Mapping[str, LinearLayer], num_calls: Mapping[str, int]) -> frozenset[str]:
    """Return the layers whose modules each run calls once. Which numbered modules it calls the router may decide."""
    modules = {module: name for name, module in first_layers(linears).items()}
    firsts = {name: modules[of.module] for name, of in linears.items()}
    return frozenset(
        name
        for name, first in firsts.items()
        if num_calls[first] == 1 and (linears[name].expert is not None or _kind(name) == name)
    )


def _kind(name: str) -> str:
    """Return ``name`` without its numbers, which tell experts apart."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
