"""Decoder blocks run one by one over calibration samples, with the activations of one block in memory.

Nouns: a *call* is what a block is called with beside its hidden states: position embeddings, masks,
whatever the model hands over. Blocks that are called alike, with the same values, are of one *kind*
(all of them in most models; models that alternate sliding and full attention have two).

Under FSDP2 a block can be called by itself once the root is known, and a forward that was stopped by an exception,
which is how the calls are caught, leaves it usable once it is reset. Every rank must take the same
steps, as many samples included, because each run gathers the block's weights inside torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.calibration.free_memory import FreeMemory
from distprune.calibration.root_parameters import RootParameters
from distprune.calibration.sample_group import SampleGroup
from distprune.collectives import Alone, Communicator, together
from distprune.models import decoder_blocks, keeping_weights
from distprune.shards import all_finite, kept_gathered, reset_forward, take_roots

__all__ = ["Call", "Walk", "catch_inputs", "fitting"]


@dataclass(frozen=True)
class Call:
    """What comes after the hidden states. ``hidden_name`` is the keyword they go by, ``None``: they come first."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden_name: str | None = None

    def is_same(self, other: Call) -> bool:
        return self.hidden_name == other.hidden_name and _same((self.args, self.kwargs), (other.args, other.kwargs))

    def run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return what ``block`` puts out when called so with ``hidden``."""
        if self.hidden_name is not None:
            return _hidden_of(block(**self.kwargs, **{self.hidden_name: hidden}))
        return _hidden_of(block(hidden, *self.args, **self.kwargs))


@dataclass
class Walk:
    """The samples of this rank on their way through the blocks.

    ``hidden[i]`` is what the next block is given for sample i, (batch, length, features); ``calls[i][b]`` is how
    block b is called for it, one object for all blocks of a kind. ``dense`` are hidden states that go by themselves:
    those of the model before anything was pruned, where they are wanted (see :mod:`distprune.calibration.targets`).
    """

    model: nn.Module
    blocks: list[tuple[str, nn.Module]]
    hidden: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)
    dense: list[torch.Tensor] = field(default_factory=list)
    offload: bool = False  # hidden states are on the CPU between blocks
    sample_group: SampleGroup = field(default_factory=SampleGroup)  # that runs these samples
    num_counted: int = 0  # the first ones; the others are padding: run, not counted
    _memory: FreeMemory = field(default_factory=FreeMemory)

    @property
    def num_samples(self) -> int:
        return len(self.hidden)

    def check_whole(self, length: int) -> None:
        """Refuse hidden states that are cut along the sequence: ranks that share a sample would count tokens twice.

        Raises:
            NotImplementedError: they do not hold all ``length`` tokens of a sample.
        """
        shape = tuple(self.hidden[0].shape)
        if math.prod(shape[:-1]) != length:
            raise NotImplementedError(
                f"hidden states of shape {shape} between blocks, for samples of {length} tokens: a tensor-parallel "
                "plan must leave them whole on every rank (no SequenceParallel across blocks)"
            )

    def split(self) -> None:
        """Let the dense stream go by itself from here. Local.

        Raises:
            ValueError: it does not fit in memory.
        """
        for hidden in self.hidden:
            with fitting(self):
                self.dense.append(hidden.clone())

    @contextmanager
    def block(self, index: int, *, dense: bool = False) -> Iterator[Callable[[int], torch.Tensor]]:
        """Yield a function that runs block ``index`` on a sample and returns its output, (batch, length, features).

        The block's weights may have been changed before. Under FSDP2 they are gathered (inside torch) once for all
        runs, with all that ``fully_shard`` put into one group with them, and are shards again afterwards. No gradients.
        """
        name, block = self.blocks[index]
        device = next((p.device for p in block.parameters()), torch.device("cpu"))
        _synchronize(device)
        stream = self.dense if dense else self.hidden

        def run(sample: int) -> torch.Tensor:
            with torch.no_grad():
                return self.calls[sample][index].run(block, stream[sample].to(device))

        outer = _outer(self.model, name)
        if outer is not None:
            outer.unshard()
        try:
            with kept_gathered(block):
                yield run
        finally:
            # Weights that stay gathered would hide what is written into the shards.
            if outer is not None:
                outer.reshard()

    def advance(
        self,
        index: int,
        comm: Communicator,
        *,
        dense: bool = False,
        begin: Callable[[], object] = lambda: None,
        end: Callable[[int, torch.Tensor, torch.Tensor], None] = lambda *_: None,
    ) -> None:
        """Run block ``index`` on every sample and take its outputs for the inputs of the next one.

        ``begin`` is called before each sample is run, ``end`` with its number, what the block was given and what it
        puts out. One round of 64 bytes beyond the block's own.

        Raises:
            ValueError: on every rank: an output is NaN or infinite; it names the block, the stream and the sample.
        """
        bad: list[int] = []
        stream = self.dense if dense else self.hidden
        with together(comm):
            with self.block(index, dense=dense) as run:
                for sample in range(self.num_samples):
                    begin()
                    output = run(sample)
                    end(sample, stream[sample], output)
                    if not all_finite(output):
                        bad.append(sample)
                    # In place if it fits: elsewhere it would lie among what the next block needs.
                    own = stream[sample]
                    is_like = own.shape == output.shape and own.dtype == output.dtype
                    stream[sample] = own.copy_(output) if is_like else output.to(own.device, copy=True)
            self._memory.give_back()
            if bad:
                raise ValueError(
                    f"block {self.blocks[index][0]!r} puts out NaN or Inf{' in the dense stream' if dense else ''} for "
                    f"{len(bad)} of this rank's {self.num_samples} samples, the first of them number {bad[0]}"
                )


@contextmanager
def fitting(walk: Walk, num_kept: int = 0) -> Iterator[None]:
    """Say what the dense stream takes if the body runs out of memory; ``num_kept``: bytes kept of one sample beside it.

    Local.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        streams = 2 * sum(hidden.nbytes for hidden in walk.hidden)
        needs = (streams + num_kept * walk.num_samples) / 2**30
        way_out = "" if walk.offload else "; offload=True (--offload) lets them wait on the CPU, where it takes as much"
        raise ValueError(
            "there is no memory left for the dense stream: with the pruned one, and what a block makes of it, it takes "
            f"{needs:.1f} GiB for this rank's {walk.num_samples} samples{way_out}. Or take fewer samples, more ranks, "
            f"or targets='own'. ({error})"
        ) from error


def catch_inputs(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    offload: bool = False,
    comm: Communicator | None = None,
) -> Walk:
    """Return the walk that begins before the first decoder block of ``model``.

    Each batch is one sample: the keyword arguments of the model's forward. The first one runs the first
    block and what is around the blocks, to learn how each of them is called; the others stop where the last
    kind of call begins, which for most models is at the first block. With ``offload`` the hidden states wait on the
    CPU between blocks. Every rank must pass as many batches. Under FSDP2 alone, embeddings are looked up in their
    shards (see ``RootParameters``; its rounds count in the traffic of ``comm``); in other layouts that FSDP2 is part
    of, it gathers the root once for all samples.

    Raises:
        ValueError: no decoder blocks, no batches, a forward that does not reach the blocks in order, or that gives a
            block other hidden states than the one before puts out; it names the block.
        RuntimeError: a forward that changes the model's own weights.
        NotImplementedError: hidden states that are DTensors.
    """
    blocks = decoder_blocks(model)
    if not batches:
        raise ValueError("there is no calibration sample")
    take_roots(model)
    walk, learner = Walk(model, blocks, offload=offload), _Learner(model, blocks, comm or Alone())
    firsts: list[int] = []  # by block, the first of its kind
    reset_forward(model)
    try:
        with keeping_weights(model):
            for batch in batches:
                hidden, calls = learner.calls(batch, max(firsts) + 1 if firsts else len(blocks))
                if not firsts:
                    firsts = [next(i for i, other in enumerate(calls) if other.is_same(call)) for call in calls]
                walk.hidden.append(hidden.to("cpu" if offload else hidden.device, copy=True))
                walk.calls.append([calls[first] for first in firsts])
    finally:
        reset_forward(model)
    return walk


class _ReachedLast(Exception):
    """Ends a forward before the last block that is asked for."""


class _Learner:
    """Learns how ``model`` calls its ``blocks``, which are stood in for, so that none of them is gathered or run.

    But the first one runs once, to show what a block puts out.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], comm: Communicator) -> None:
        self._model = model
        self._blocks = blocks
        of_root = RootParameters.can_stand_in(model, [block for _, block in blocks])
        self._root = RootParameters(comm, model) if of_root else None
        self._output: Any = None  # of a block
        self._extras: list[torch.Tensor] = []  # what a block puts out beside hidden states
        self._num_asked = 0
        self._first_hidden: torch.Tensor | None = None
        self._put_out = torch.empty(0)  # a copy of what the block called last hands on
        self._calls: list[Call] = []

    def calls(self, batch: Mapping[str, Any], num_asked: int) -> tuple[torch.Tensor, list[Call]]:
        """Return the hidden states given to the first block, and the calls of the first ``num_asked`` blocks."""
        self._num_asked, self._first_hidden, self._calls = num_asked, None, []
        with ExitStack() as stack, torch.no_grad():
            for index in range(num_asked):
                stack.enter_context(self._standing_in(index))
            try:
                if self._root is None:
                    self._model(**batch)
                else:
                    with self._root:
                        self._model.forward(**batch)  # without the hooks that gather
            except _ReachedLast:
                assert self._first_hidden is not None
                return self._first_hidden, self._calls
            except (TypeError, ValueError) as error:
                if self._calls or not getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
                    raise
                raise ValueError(
                    f"{type(self._model).__name__} is an encoder-decoder model that does not run on input_ids alone: "
                    f"{error}"
                ) from error
        raise ValueError(
            f"a forward of {type(self._model).__name__} ended after {len(self._calls)} of {num_asked} decoder blocks"
        )

    def called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call and return what a block would put out; end the forward with the last one that is asked for."""
        name, block = self._blocks[index]
        if index != len(self._calls):
            raise ValueError(
                f"block {name!r} is called as number {len(self._calls) + 1}; a walk needs every block to be called "
                "once, in order"
            )
        hidden, call = _part(name, args, kwargs)
        if any(given is extra for given in _tensors((call.args, call.kwargs)) for extra in self._extras):
            raise NotImplementedError(
                f"block {name!r} is given more of what the one before puts out than hidden states, which a walk from "
                "block to block cannot follow; prune_model prunes by the weights alone"
            )
        self._calls.append(call)
        if index == 0:
            self._first_hidden = hidden
        elif not _equal(hidden, self._put_out):
            raise ValueError(
                f"block {name!r} is not given what {self._blocks[index - 1][0]!r} puts out: the model changes hidden "
                "states between them, which a walk from block to block cannot follow"
            )
        if len(self._calls) == self._num_asked:
            raise _ReachedLast
        if self._output is None:
            self._output = block(*args, **kwargs)
            self._put_out = _hidden_of(self._output).clone()
            beside = self._output[1:] if isinstance(self._output, tuple | list) else ()
            self._extras = list(_tensors(beside))
            return self._output
        self._put_out = hidden.clone()
        output = self._output
        return type(output)((hidden, *output[1:])) if isinstance(output, tuple | list) else hidden

    @contextmanager
    def _standing_in(self, index: int) -> Iterator[None]:
        name, block = self._blocks[index]
        parent_name, _, child = name.rpartition(".")
        siblings = self._model.get_submodule(parent_name)._modules
        siblings[child] = _StandIn(self, index, block)
        try:
            yield
        finally:
            siblings[child] = block


class _StandIn(nn.Module):
    """In place of a block while a model shows how it calls it."""

    def __init__(self, learner: _Learner, index: int, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_learner=learner, _index=index, _block=block)  # the block is no submodule of this

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._learner.called(self._index, args, kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)  # models ask their blocks which attention they have


def _part(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Call]:
    hidden_name, others = None, args[1:]
    hidden = args[0] if args else None
    if not args:
        hidden_name, hidden = next(((key, v) for key, v in kwargs.items() if isinstance(v, torch.Tensor)), (None, None))
        kwargs = {key: value for key, value in kwargs.items() if key != hidden_name}
    if not isinstance(hidden, torch.Tensor):
        raise ValueError(f"block {name!r} is called without a tensor of hidden states in front")
    _check_plain(f"block {name!r} is called with", hidden)
    return hidden, Call(others, kwargs, hidden_name)


def _hidden_of(output: Any) -> torch.Tensor:
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, torch.Tensor):
        raise TypeError(f"a decoder block returned a {type(hidden).__name__} where hidden states were expected")
    _check_plain("a decoder block returned", hidden)
    return hidden


def _check_plain(what: str, hidden: torch.Tensor) -> None:
    """Between blocks hidden states are whole on every rank; a plain tensor is taken to be."""
    if isinstance(hidden, DTensor):
        raise NotImplementedError(
            f"{what} hidden states laid out as {hidden.placements}; a tensor-parallel plan must leave those between "
            "blocks as plain tensors, whole on every rank (no SequenceParallel across blocks)"
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both hold the same values, in which NaN is one."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))


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


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _outer(model: nn.Module, name: str) -> FSDPModule | None:
    """Return what FSDP2 gathers block ``name`` with, ``None``: the block itself, or nothing."""
    path = name
    while not isinstance(outer := model.get_submodule(path), FSDPModule) and path:
        path = path.rpartition(".")[0]
    return outer if isinstance(outer, FSDPModule) and path != name else None


def _synchronize(device: torch.device) -> None:
    """Wait for writes into the shards: a block called outside of its root's forward gathers on another stream."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize(device)
