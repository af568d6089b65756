"""Decoder blocks run one by one over calibration samples, with the activations of one block in memory.

Nouns: a *call* is what a block is called with beside its hidden states: position embeddings, masks,
whatever the model hands over. Blocks that are called alike, with the same values, are of one *kind*
(all of them in most models; models that alternate sliding and full attention have two).

Under FSDP2 a block can be called by itself once the root is known, and a forward that was stopped by an exception,
which is how the calls are caught, leaves it usable once it is reset. Every rank must take the same
steps, as many samples included, because each run gathers the block's weights inside torch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distprune.calibration.data import device_of
from distprune.calibration.sample_group import SampleGroup
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.shards.device import are_finite, fetched, sent
from distprune.shards.fsdp2_forward import kept_gathered


@dataclass(frozen=True)
class Call:
    """What comes after the hidden states. ``hidden_name`` is the keyword they go by, ``None``: they come first."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden_name: str | None = None

    @property
    def written(self) -> list[MutableMapping[Any, Any]]:
        """What a block may write into for later ones: in some models these read its keys and values there."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, MutableMapping)]

    def is_same(self, other: Call) -> bool:
        return self.hidden_name == other.hidden_name and _same((self.args, self.kwargs), (other.args, other.kwargs))

    def run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return what ``block`` puts out when called so with ``hidden``."""
        if self.hidden_name is not None:
            return hidden_of(block(**self.kwargs, **{self.hidden_name: hidden}))
        return hidden_of(block(hidden, *self.args, **self.kwargs))


@dataclass
class Batch:
    """Samples that run together.

    ``windows`` are their numbers among those of all ranks: without any it is padding, one sample that is run and not
    counted. ``inputs`` are the arguments of the model's forward, and ``calls[b]`` is how block b is called for it, one
    object for all blocks of a kind; ``dense_calls``: in the dense stream. ``of_all``: of a step of a fit, the numbers
    of all ranks' samples in it.
    """

    windows: range
    inputs: Mapping[str, Any]
    calls: list[Call] = field(default_factory=list)
    dense_calls: list[Call] = field(default_factory=list)
    of_all: range = range(0)


@dataclass
class Walk:
    """The samples of this rank on their way through the blocks, in batches.

    ``hidden[i]`` is what the next block is given for ``batches[i]``, (samples, length, features). ``dense`` are hidden
    states that go by themselves: those of the model before anything was pruned, where they are wanted (see
    :mod:`distprune.calibration.targets`). ``steps`` are the same samples, as few as a step of a fit takes. ``output``
    is what a block puts out, but for its hidden states.
    """

    model: nn.Module
    blocks: list[tuple[str, nn.Module]]
    hidden: list[torch.Tensor] = field(default_factory=list)
    dense: list[torch.Tensor] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    steps: list[Batch] = field(default_factory=list)
    sample_dim: int = 0  # of hidden states; their first one in most models
    output: Any = None
    in_place: bool = False  # blocks write into the hidden states that they are given
    offload: bool = False  # hidden states are on the CPU between blocks
    sample_group: SampleGroup = field(default_factory=SampleGroup)  # that runs these samples
    given: torch.Tensor | None = None  # the hidden states that are run now
    running: int = 0  # of which batch they are

    @property
    def num_batches(self) -> int:
        return len(self.hidden)

    @property
    def hands_on(self) -> bool:
        """Whether blocks may hand on more than hidden states. Local, and the same on every rank."""
        return any(call.written for call in self.batches[0].calls)

    def begin_dense(self) -> None:
        """Begin the dense stream where the walk is. Local."""
        self.dense = [hidden.clone() for hidden in self.hidden]
        for batch in self.batches:
            batch.dense_calls = _apart(batch.calls)

    def rows(self, step: Batch, *, dense: bool = False) -> torch.Tensor:
        """Return what the next block is given for the samples of ``step``. Local."""
        parts, first = [], 0
        begins = step.windows[0] // self.sample_group.num_groups if step.windows else 0
        ends = begins + len(step.inputs["input_ids"])
        for batch, hidden in zip(self.batches, self.dense if dense else self.hidden, strict=True):
            num = len(batch.inputs["input_ids"])
            start, stop = (min(max(bound - first, 0), num) for bound in (begins, ends))
            first += num
            if start < stop:
                size = hidden.shape[self.sample_dim] // num  # of a sample: its tokens, where these are flattened
                whole = stop - start == num
                parts.append(hidden if whole else hidden.narrow(self.sample_dim, start * size, (stop - start) * size))
        return parts[0] if len(parts) == 1 and not self.in_place else torch.cat(parts, self.sample_dim)

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``values`` where hidden states wait between blocks. Local."""
        return values.to("cpu" if self.offload else values.device, copy=True)

    @contextmanager
    def block(
        self, index: int, *, dense: bool = False, gradients: bool = False
    ) -> Iterator[Callable[[int], torch.Tensor]]:
        """Yield a function that runs block ``index`` on a batch and returns its output, (samples, length, features).

        The block's weights may have been changed before. Under FSDP2 they are gathered (inside torch) once for all
        runs, with all that ``fully_shard`` put into one group with them, and are shards again afterwards; outside of a
        forward it gathers on the stream that wrote into them, so nobody waits for a device. With ``gradients``
        the caller may run the block itself, and backward: gradients are of its parameters as they are meanwhile, and
        nothing is reduced over ranks.
        """
        name, block = self.blocks[index]
        device = device_of(block)
        stream = self.dense if dense else self.hidden

        def run(batch: int) -> torch.Tensor:
            self.given, self.running = stream[batch].to(device), batch
            with torch.no_grad(), self.sample_group.passing():
                calls = self.batches[batch].dense_calls if dense else self.batches[batch].calls
                return calls[index].run(block, self.given.clone() if self.in_place else self.given)

        outer = _outer(self.model, name)
        if outer is not None:
            outer.unshard()
        try:
            with kept_gathered(block, gradients=gradients):
                yield run
        finally:
            self.given = None
            # Weights that stay gathered would hide what is written into the shards.
            if outer is not None:
                outer.reshard()

    def advance(
        self,
        index: int,
        comm: Communicator,
        *,
        dense: bool = False,
        end: Callable[[int, torch.Tensor, torch.Tensor], None] = lambda *_: None,
        checks: bool = True,
    ) -> None:
        """Run block ``index`` on every batch and take its outputs for the inputs of the next one.

        ``end`` is called with the number of each batch, what the block was given and what it puts out. One round of 64
        bytes beyond the block's own.

        Raises:
            ValueError: on every rank, if it ``checks``: an output is NaN or infinite; it names the block, the stream
                and the samples of the first such batch.
        """
        finite: list[torch.Tensor] = []  # by batch
        stream = self.dense if dense else self.hidden
        with together(comm):
            with self.block(index, dense=dense) as run:
                if self.hands_on and not dense:
                    self._run_steps(index)
                for batch in range(self.num_batches):
                    output = run(batch)
                    end(batch, stream[batch], output)
                    if checks:
                        finite.append(are_finite(output))
                    _put(stream, batch, output)
            for batch, is_finite in enumerate(fetched(finite)):
                if not is_finite:
                    raise ValueError(
                        f"block {self.blocks[index][0]!r} puts out NaN or Inf{' in the dense stream' if dense else ''} "
                        f"for calibration samples {named(self.batches[batch].windows)}"
                    )

    @torch.no_grad()
    def _run_steps(self, index: int) -> None:
        """Run block ``index``, gathered, on the steps of a fit, for what later blocks read of it there. Local."""
        _, block = self.blocks[index]
        with self.sample_group.passing():
            for step in self.steps:
                step.calls[index].run(block, self.rows(step).to(device_of(block)))

    def go_on(self, outputs: list[torch.Tensor]) -> None:
        """Take ``outputs``, of all batches, for the inputs of the next block. Local."""
        for batch, output in enumerate(outputs):
            _put(self.hidden, batch, output)


def _apart(calls: Sequence[Call]) -> list[Call]:
    """Return ``calls`` with copies of what blocks write into, one of each. Local."""
    copies = {id(value): copy.copy(value) for call in calls for value in call.written}

    def with_copies(call: Call) -> Call:
        args = tuple(copies.get(id(value), value) for value in call.args)
        kwargs = {key: copies.get(id(value), value) for key, value in call.kwargs.items()}
        return Call(args, kwargs, call.hidden_name)

    return [with_copies(call) for call in calls]


def spread(
    token_ids: torch.Tensor, group: SampleGroup, batch_tokens: int = 1, device: torch.device | str = "cpu"
) -> list[Batch]:
    """Return what ``group`` runs of the samples ``token_ids`` (num_samples, length), in turn with the others. Local.

    As many samples run together as make ``batch_tokens`` tokens, or one. Every group has as many batches, because a
    sharded forward needs every rank, and shares its samples out evenly; padding comes last.
    """
    num_samples, length = token_ids.shape
    own = range(group.number, num_samples, group.num_groups)
    most = math.ceil(num_samples / group.num_groups)  # of one group
    num_batches = math.ceil(most / max(batch_tokens // length, 1))
    bounds = [math.ceil(len(own) * i / num_batches) for i in range(num_batches + 1)]
    return [_batch(token_ids, own, own[start:stop], device) for start, stop in itertools.pairwise(bounds)]


def in_steps(token_ids: torch.Tensor, group: SampleGroup, num_together: int, device: torch.device) -> list[Batch]:
    """Return what ``group`` runs, as :func:`spread` does, where ``num_together`` of all samples make a step. Local."""
    own, steps = range(group.number, len(token_ids), group.num_groups), []
    for start in range(0, len(token_ids), num_together):
        of_all = range(start, min(start + num_together, len(token_ids)))
        windows = range(start + (group.number - start) % group.num_groups, of_all.stop, group.num_groups)
        steps.append(dataclasses.replace(_batch(token_ids, own, windows, device), of_all=of_all))
    return steps


def _batch(token_ids: torch.Tensor, own: range, windows: range, device: torch.device | str) -> Batch:
    """Return the batch of ``windows``; without any it is padded by the first of this rank's ``own``, or of all."""
    some = list(windows or own[:1] or range(1))
    return Batch(windows, {"input_ids": sent(token_ids[some], torch.device(device)), "use_cache": False})


def named(windows: range) -> str:
    """Return the numbers of samples as text, such as ``0, 2, 4``."""
    shown = [*map(str, windows[:8]), *(["..."] if len(windows) > 8 else [])]
    return ", ".join(shown) or "that are padding"


def _put(stream: list[torch.Tensor], batch: int, output: torch.Tensor) -> None:
    """Write ``output`` in place if it fits: elsewhere it would lie among what the next block needs."""
    before = stream[batch]
    is_like = before.shape == output.shape and before.dtype == output.dtype
    stream[batch] = before.copy_(output) if is_like else output.to(before.device, copy=True)


def hidden_of(output: Any) -> torch.Tensor:
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, torch.Tensor):
        raise TypeError(f"a decoder block returned a {type(hidden).__name__} where hidden states were expected")
    check_plain("a decoder block returned", hidden)
    return hidden


def with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """Return what a decoder block puts out, ``output``, with other ``hidden`` states."""
    if not isinstance(output, tuple | list):
        return hidden
    make = getattr(type(output), "_make", type(output))  # a named tuple's takes what a tuple does
    return make((hidden, *output[1:]))


def check_plain(what: str, hidden: torch.Tensor) -> None:
    """Between blocks hidden states are whole on every rank; a plain tensor is taken to be."""
    if isinstance(hidden, DTensor):
        raise NotImplementedError(
            f"{what} hidden states laid out as {hidden.placements}; a tensor-parallel plan must leave those between "
            "blocks as plain tensors, whole on every rank (no SequenceParallel across blocks)"
        )


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _outer(model: nn.Module, name: str) -> FSDPModule | None:
    """Return what FSDP2 gathers block ``name`` with, ``None``: the block itself, or nothing."""
    path = name
    while not isinstance(outer := model.get_submodule(path), FSDPModule) and path:
        path = path.rpartition(".")[0]
    return outer if isinstance(outer, FSDPModule) and path != name else None
