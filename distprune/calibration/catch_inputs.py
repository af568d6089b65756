"""Walks through the decoder blocks of a model: how it calls them, and what it makes of what the last one puts out.

Both are told by forwards of the model in which its blocks are stood in for: neither run nor gathered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.data import device_of, tokens_together
from distprune.calibration.sample_group import find_sample_group
from distprune.calibration.walk import Batch, Call, Walk, check_plain, hidden_of, in_steps, spread, with_hidden
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone
from distprune.collectives.guarded import Guarded, guarding
from distprune.models.decoder_blocks import decoder_blocks, is_encoder_decoder
from distprune.models.evaluating import evaluating, keeping_weights
from distprune.models.runnable import does_not_run, inputs_of, logits_on_tokens
from distprune.shards.device import fetched
from distprune.shards.fsdp2_forward import gather, kept_gathered, reset_forward, take_roots
from distprune.shards.torch_private import private

Progress = Callable[[int, int], None] | None
_tree_leaves = private("torch.utils._pytree", "tree_leaves")
# Open while a block is run on all batches of this rank: what a batch adds, (n,), given what the block was given and put
# out. Local.
Visit = AbstractContextManager[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
# Of a block's number, args and kwargs: what its call puts out.
_Called = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def walking(
    comm: Communicator,
    model: nn.Module,
    samples: torch.Tensor,
    *,
    offload: bool = False,
    has_dense: bool = False,
    batch_tokens: int | None = None,
    num_copies: int = 0,
    num_together: int | None = None,
) -> Iterator[Walk]:
    """Yield the walk of ``samples`` (num_samples, length) through ``model``, which is in evaluation mode meanwhile.

    ``has_dense``: the walk has a dense stream; ``batch_tokens`` run together, with ``num_copies`` of their logits, see
    ``tokens_together``; ``num_together`` consecutive samples of all make one of the walk's steps, if there are to be
    any. Every rank must call it. Rounds: those of :func:`find_sample_group` and :func:`catch_inputs`, and one of 64
    bytes at the end.

    Raises:
        NotImplementedError: on every rank: tensor parallelism cuts hidden states between blocks.
        Exception: on every rank: what ``find_sample_group`` and ``catch_inputs`` raise.
    """
    sample_group = find_sample_group(comm, model)
    with ExitStack() as stack:
        with guarding(comm) as ranks:
            stack.enter_context(evaluating(model))
            device = device_of(model)
            batches = spread(samples, sample_group, tokens_together(model, batch_tokens, num_copies), device)
            steps = [] if num_together is None else in_steps(samples, sample_group, num_together, device)
            with sample_group.passing():
                walk = catch_inputs(model, batches, steps=steps, offload=offload, comm=ranks)
            walk.sample_group = sample_group
            shape, num_tokens = tuple(walk.hidden[0].shape), batches[0].inputs["input_ids"].numel()
            if sample_group.size > 1 and math.prod(shape[:-1]) != num_tokens:
                raise NotImplementedError(
                    f"hidden states of shape {shape} between blocks, for {num_tokens} tokens: a tensor-parallel "
                    "plan must leave them whole on every rank (no SequenceParallel across blocks)"
                )
            if has_dense:
                walk.begin_dense()
        yield walk


def visit_blocks(
    comm: Communicator,
    model: nn.Module,
    samples: torch.Tensor,
    visits: Sequence[Visit],
    progress: Progress = None,
    *,
    offload: bool = False,
    batch_tokens: int | None = None,
) -> Iterator[torch.Tensor]:
    """Yield for each decoder block what its visit measures, summed over all samples, float64.

    Every rank must call it. Rounds: those of a walk, and for each block 1 of 64 bytes, that of its run, and 1 of 8
    bytes a number. ``progress`` is called with the number of blocks done, and of all; ``offload``, ``batch_tokens``: as
    of :func:`walking`.

    Raises:
        ValueError, NotImplementedError, Exception: on every rank: what the walk raises, or on one a visit or
            ``progress``.
    """
    with walking(comm, model, samples, offload=offload, batch_tokens=batch_tokens) as walk:
        for index, visit in enumerate(visits):
            yield _visited(comm, walk, index, visit, progress)


def _visited(comm: Communicator, walk: Walk, index: int, visit: Visit, progress: Progress) -> torch.Tensor:
    measured: list[torch.Tensor] = []  # by batch

    def fill(words: torch.Tensor) -> None:
        for batch, of_batch in zip(walk.batches, fetched(measured), strict=True):
            if batch.windows and walk.sample_group.rank == 0:
                words += of_batch
        if progress is not None:
            progress(index + 1, len(walk.blocks))

    with ExitStack() as stack:
        with together(comm):
            measure = stack.enter_context(visit)
        walk.advance(index, comm, end=lambda _, given, output: measured.append(measure(given, output)))
    return sum_together(comm, measured[0].shape, fill, torch.float64)


def catch_inputs(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    steps: Sequence[Batch] = (),
    offload: bool = False,
    comm: Guarded | None = None,
) -> Walk:
    """Return the walk that begins before the first decoder block of ``model``; ``batches`` learn their calls.

    The first one runs the first block and what is around the blocks, to learn how each of them is called; the others
    stop where the last kind of call begins, which for most models is at the first block. With ``offload`` the hidden
    states wait on the CPU between blocks. Of ``steps`` the calls are learned, too. Every rank must pass as many of
    both. FSDP2 gathers the root, embeddings and head, once for all of them. Rounds: 1 for each batch and each step,
    and 1 before the first block is gathered, of 64 bytes.

    Raises:
        ValueError: no decoder blocks, a forward that does not reach the blocks in order, or that gives a
            block other hidden states than the one before puts out; it names the block.
        RuntimeError: a forward that changes the model's own weights.
        NotImplementedError: hidden states that are DTensors.
    """
    blocks = decoder_blocks(model)
    take_roots(model)
    walk = Walk(model, blocks, batches=list(batches), steps=list(steps), offload=offload)
    learner = _Learner(model, blocks, comm or Guarded(Alone()))
    reset_forward(model)
    try:
        with keeping_weights(model):
            for batch in batches:
                walk.hidden.append(walk.kept(learner.learn(batch)))
            for step in steps:
                sizes = zip(learner.learn(step).shape, walk.hidden[0].shape, strict=True)
                walk.sample_dim = next((dim for dim, (a, b) in enumerate(sizes) if a != b), walk.sample_dim)
    finally:
        reset_forward(model)
    walk.in_place = learner.in_place
    walk.output = with_hidden(learner.output, torch.empty(0, dtype=torch.float32, device="cpu"))
    return walk


@contextmanager
def past_blocks(walk: Walk) -> Iterator[Callable[[int, torch.Tensor], torch.Tensor]]:
    """Yield a function that returns the logits, (samples, length, vocabulary), of a batch and of its hidden states.

    These are what the last block puts out. Under FSDP2 what is around the blocks is gathered (inside torch), once for
    all runs: embeddings, too. Every rank must call it. No gradients.
    """
    device = device_of(walk.model)
    last = torch.empty(0, dtype=torch.float32, device="cpu")

    def logits(batch: int, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = hidden.to(device)
        with torch.no_grad(), walk.sample_group.passing():
            return logits_on_tokens(walk.model, **walk.batches[batch].inputs)

    with _standing_in(walk.model, walk.blocks, lambda *_: with_hidden(walk.output, last)), kept_gathered(walk.model):
        yield logits


@contextmanager
def _standing_in(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], called: _Called) -> Iterator[None]:
    """Have ``called`` run in place of each of ``blocks``, (name in ``model``, block), while this lasts. Local."""
    with ExitStack() as stack:
        for index, (name, block) in enumerate(blocks):
            parent_name, _, child = name.rpartition(".")
            siblings = model.get_submodule(parent_name)._modules
            stack.callback(siblings.__setitem__, child, block)
            siblings[child] = _StandIn(called, index, block)
        yield


class _StandIn(nn.Module):
    """In place of a block while a model shows how it calls it."""

    def __init__(self, called: _Called, index: int, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_called=called, _index=index, _block=block)  # the block is no submodule of this

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(self._index, args, kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)  # models ask their blocks which attention they have


class _ReachedLast(Exception):
    """Ends a forward before the last block that is asked for."""


class _Learner:
    """Learns how ``model`` calls its ``blocks``. The first one runs once, to show what a block puts out."""

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], comm: Guarded) -> None:
        self._model, self._blocks, self._comm = model, blocks, comm
        self.output: Any = None  # of a block
        self.in_place = False  # it writes into its hidden states
        self._extras: list[torch.Tensor] = []  # what a block puts out; the next one alone is given hidden states
        self._firsts = list(range(len(blocks)))  # by block, the first of its kind; until it is known, itself
        # Of a forward:
        self._calls: list[Call] = []
        self._hidden = torch.empty(0, dtype=torch.float32, device="cpu")  # that the first block is given
        self._put_out = self._hidden  # a copy of what the block called last hands on
        self._handed_on: list[torch.Tensor] = []  # of each block but the first: whether it is given that

    def learn(self, batch: Batch) -> torch.Tensor:
        """Give ``batch`` its calls, and return the hidden states of it that the first block is given."""
        is_first, num_asked = self.output is None, max(self._firsts) + 1
        self._calls, self._handed_on = [], []
        with _standing_in(self._model, self._blocks[:num_asked], self._called), torch.no_grad():
            self._comm.meet()  # it may gather
            try:
                self._model(**inputs_of(self._model, batch.inputs))
            except _ReachedLast:
                pass
            except (TypeError, ValueError, AttributeError) as error:
                if self._calls or not (is_encoder_decoder(self._model) or isinstance(error, AttributeError)):
                    raise
                raise does_not_run(self._model, error) from error
        calls = self._calls
        if len(calls) < num_asked:
            raise ValueError(
                f"a forward of {type(self._model).__name__} ended after {len(calls)} of {num_asked} decoder blocks"
            )
        for index, is_equal in enumerate(fetched(self._handed_on), 1):  # one wait for a device, for all
            if not is_equal:
                raise ValueError(
                    f"block {self._blocks[index][0]!r} is not given what {self._blocks[index - 1][0]!r} puts out: the "
                    "model changes hidden states between them, which a walk from block to block cannot follow"
                )
        if is_first:
            self._firsts = [next(i for i, other in enumerate(calls) if other.is_same(call)) for call in calls]
        batch.calls = [calls[first] for first in self._firsts]
        return self._hidden

    def _called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call and return what a block would put out; end the forward with the last one that is asked for."""
        name, block = self._blocks[index]
        if index != len(self._calls):
            raise ValueError(
                f"block {name!r} is called as number {len(self._calls) + 1}; a walk needs every block to be called "
                "once, in order; prune_model prunes by the weights alone"
            )
        hidden, call = _part(name, block, args, kwargs)
        if any(given is extra for given in _tree_leaves((call.args, call.kwargs)) for extra in self._extras):
            raise NotImplementedError(
                f"block {name!r} is given more of what the one before puts out than hidden states, which a walk from "
                "block to block cannot follow; prune_model prunes by the weights alone"
            )
        self._calls.append(call)
        if index == 0:
            self._hidden = hidden
        else:
            self._handed_on.append(_equal(hidden, self._put_out))
        if index == max(self._firsts):
            raise _ReachedLast
        if self.output is None:
            self._comm.meet()
            gather(block)
            self._hidden = hidden.clone()
            version = -1 if hidden.is_inference() else hidden._version
            self.output = block(*args, **kwargs)
            self.in_place = version == -1 or hidden._version != version
            self._put_out = hidden_of(self.output).clone()
            self._extras = [extra for extra in _tree_leaves(self.output) if isinstance(extra, torch.Tensor)]
            return self.output
        self._put_out = hidden.clone()
        return with_hidden(self.output, hidden)


def _part(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Call]:
    hidden_name, others = None, args[1:]
    hidden = args[0] if args else None
    if not args:
        floats = {key: v for key, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        likely = ["hidden_states", *list(inspect.signature(block.forward).parameters)[:1], *floats]
        hidden_name = next((key for key in likely if key in floats), None)
        hidden = floats.get(hidden_name or "")
        kwargs = {key: value for key, value in kwargs.items() if key != hidden_name}
    if not isinstance(hidden, torch.Tensor):
        raise ValueError(f"block {name!r} is called without a tensor of hidden states in front")
    check_plain(f"block {name!r} is called with", hidden)
    return hidden, Call(others, kwargs, hidden_name)


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether both hold the same values, in which NaN is one: bool, where they are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    return ((one == other) | (one.isnan() & other.isnan())).all()
