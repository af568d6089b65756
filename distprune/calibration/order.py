"""In which order a block runs its linear layers, found by running it once."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distprune.calibration.addends import find_addends, keeping_outputs
from distprune.calibration.listening import first_layers, listening
from distprune.calibration.walk import Walk
from distprune.collectives.agree import max_together, told_by_all
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer


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


@dataclass
class _Heard:
    """What one run tells."""

    inputs: dict[str, list[str]] = field(default_factory=dict)  # the layers that share one, by the first
    num_calls: Counter[str] = field(default_factory=Counter)

    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:  # noqa: ARG002
        self.inputs.setdefault(first, []).append(name)

    def passed(self, name: str) -> None:
        self.num_calls[name] += 1

    def added(self, name: str, total: torch.Tensor) -> None: ...

    def kinds(self) -> list[list[str]]:
        """Return the kinds of layers that share an input, in the order in which they are first given one."""
        found = (tuple(sorted({kind_of(name) for name in names})) for names in self.inputs.values())
        return [list(kinds) for kinds in dict.fromkeys(found)]


def learn_order(comm: Communicator, walk: Walk, index: int, linears: Mapping[str, LinearLayer]) -> BlockOrder:
    """Run block ``index`` on this rank's first batch and return in which order it runs ``linears``.

    Experts of one layer, which are numbered, are of one stage whether these samples reached them or not; other layers
    that no rank's samples reached come last. Every rank must call it: two rounds, of 16 and 8 bytes a layer, and that
    of :func:`told_by_all`, of the kinds of layers.
    """
    heard, names, block = _Heard(), list(linears), walk.blocks[index][1]

    def run_block(words: torch.Tensor) -> None:
        """Write how often each layer's module was called, and 1 where its output is found to be an addend."""
        width = walk.hidden[0].shape[-1]
        modules = {name: of.module for name, of in linears.items() if of.expert is None and of.num_out == width}
        routed = {of.module for of in linears.values() if of.expert is not None}
        experts = [name for name, module in block.named_modules() if module in routed]
        around = {*experts, *(name.partition(".")[0] for name in experts)}
        modules |= {name: block.get_submodule(name) for name in around}
        with listening(linears, heard), keeping_outputs(modules) as outputs, walk.block(index) as run:
            output = run(0)
        adding = find_addends(walk.hidden[0].to(output.device), output, outputs, experts)
        told = [[heard.num_calls[name], int(name in adding)] for name in names]
        words.copy_(torch.tensor(told, dtype=torch.int64, device="cpu"))

    told = max_together(comm, (len(names), 2), run_block).tolist()  # of the rank that says most
    called_once = _called_once(linears, {name: calls for name, (calls, _) in zip(names, told, strict=True)})
    adding = called_once.intersection(name for name, (_, adds) in zip(names, told, strict=True) if adds)
    others = linears.keys() - adding

    def share(words: torch.Tensor) -> None:
        """Write 1 where a layer has the input of one that does not add to hidden states, or is one."""
        sharing = (of for of in heard.inputs.values() if not others.isdisjoint(of))
        shifted = others.union(*sharing)
        words.copy_(torch.tensor([int(name in shifted) for name in names], dtype=torch.int64, device="cpu"))

    is_shifted = max_together(comm, (len(names),), share).tolist()
    shifted = frozenset(name for name, shifts in zip(names, is_shifted, strict=True) if shifts)
    told_kinds = told_by_all(comm, heard.kinds)
    return BlockOrder(_stages(names, [kinds for _, kinds in told_kinds]), adding, shifted, called_once)


def _stages(names: Sequence[str], told: Sequence[Sequence[Sequence[str]]]) -> tuple[tuple[str, ...], ...]:
    """Return the stages of layers ``names`` that all ranks' runs tell, by kind; the first rank's goes first."""
    stages: list[set[str]] = []
    for inputs in told:
        for kinds in map(set, inputs):
            known = next((stage for stage in stages if stage & kinds), None)
            if known is None:
                stages.append(kinds)
            else:
                known |= kinds
    found = [tuple(name for name in names if kind_of(name) in stage) for stage in stages]
    unheard = tuple(name for name in names if not any(name in stage for stage in found))
    return tuple(found) + ((unheard,) if unheard else ())


def _called_once(linears: Mapping[str, LinearLayer], num_calls: Mapping[str, int]) -> frozenset[str]:
    """Return the layers whose modules each run calls once. Which numbered modules it calls the router may decide."""
    modules = {module: name for name, module in first_layers(linears).items()}
    firsts = {name: modules[of.module] for name, of in linears.items()}
    return frozenset(
        name
        for name, first in firsts.items()
        if num_calls[first] == 1 and (linears[name].expert is not None or kind_of(name) == name)
    )


def kind_of(name: str) -> str:
    """Return ``name`` without its numbers, which tell experts apart."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
