"""How a model calls its decoder blocks: learned by forwards in which blocks are stood in for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distprune.calibration.stand_in import standing_in
from distprune.calibration.walk import Call, Part, Walk, check_plain, hidden_of, with_hidden
from distprune.collectives.communicator import Alone
from distprune.collectives.guarded import Guarded
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.evaluating import keeping_weights
from distprune.shards.device import fetched
from distprune.shards.fsdp2_forward import gather, reset_forward, take_roots


def catch_inputs(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    parts: Sequence[Part] = (),
    offload: bool = False,
    comm: Guarded | None = None,
) -> Walk:
    """Return the walk that begins before the first decoder block of ``model``.

    Each batch is the keyword arguments of the model's forward. The first one runs the first block and what is around
    the blocks, to learn how each of them is called; the others stop where the last kind of call begins, which for most
    models is at the first block. With ``offload`` the hidden states wait on the CPU between blocks. Of ``parts`` the
    calls are learned, too. Every rank must pass as many of both. FSDP2 gathers the root, embeddings and head, once for
    all of them. Rounds: 1 for each batch and 1 before the first block is gathered, of 64 bytes.

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
    windows = [range(i, i + 1) for i in range(len(batches))]  # unless the caller knows better
    walk = Walk(model, blocks, batches=list(batches), windows=windows, parts=list(parts), offload=offload)
    learner = _Learner(model, blocks, comm or Guarded(Alone()))
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
            for part in parts:
                hidden, calls = learner.calls(part.batch, max(firsts) + 1)
                part.calls = [calls[first] for first in firsts]
                sizes = zip(hidden.shape, walk.hidden[0].shape, strict=True)
                walk.sample_dim = next((dim for dim, of in enumerate(sizes) if len(set(of)) > 1), walk.sample_dim)
    finally:
        reset_forward(model)
    walk.output = with_hidden(learner.output, torch.empty(0, dtype=torch.float32, device="cpu"))
    return walk


class _ReachedLast(Exception):
    """Ends a forward before the last block that is asked for."""


class _Learner:
    """Learns how ``model`` calls its ``blocks``, which are stood in for, so that none of them is gathered or run.

    But the first one runs once, to show what a block puts out.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], comm: Guarded) -> None:
        self._model = model
        self._blocks = blocks
        self._comm = comm
        self.output: Any = None  # of a block
        self._extras: list[torch.Tensor] = []  # what a block puts out beside hidden states
        self._num_asked = 0
        self._first_hidden: torch.Tensor | None = None
        # A copy of what the block called last hands on.
        self._put_out = torch.empty(0, dtype=torch.float32, device="cpu")
        self._calls: list[Call] = []
        self._handed_on: list[torch.Tensor] = []  # of each block but the first: whether it is given that

    def calls(self, batch: Mapping[str, Any], num_asked: int) -> tuple[torch.Tensor, list[Call]]:
        """Return the hidden states given to the first block, and the calls of the first ``num_asked`` blocks."""
        self._num_asked, self._first_hidden, self._calls, self._handed_on = num_asked, None, [], []
        with standing_in(self._model, self._blocks[:num_asked], self.called), torch.no_grad():
            self._comm.meet()  # it may gather
            try:
                self._model(**batch)
            except _ReachedLast:
                assert self._first_hidden is not None
                self._check_handed_on()
                return self._first_hidden, self._calls
            except (TypeError, ValueError, AttributeError) as error:
                is_encoder_decoder = getattr(getattr(self._model, "config", None), "is_encoder_decoder", False)
                if self._calls or not (is_encoder_decoder or isinstance(error, AttributeError)):
                    raise
                kind = "is an encoder-decoder model that " if is_encoder_decoder else ""
                raise ValueError(
                    f"{type(self._model).__name__} {kind}does not run on input_ids alone ({error}); prune_model prunes "
                    "by the weights alone"
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
        else:
            self._handed_on.append(_equal(hidden, self._put_out))
        if len(self._calls) == self._num_asked:
            raise _ReachedLast
        if self.output is None:
            self._comm.meet()
            gather(block)
            self.output = block(*args, **kwargs)
            self._put_out = hidden_of(self.output).clone()
            beside = self.output[1:] if isinstance(self.output, tuple | list) else ()
            self._extras = list(_tensors(beside))
            return self.output
        self._put_out = hidden.clone()
        return with_hidden(self.output, hidden)

    def _check_handed_on(self) -> None:
        """Raise unless each block was given what the one before puts out. One wait for a device, for all."""
        for index, is_equal in enumerate(fetched(self._handed_on), 1):
            if not is_equal:
                raise ValueError(
                    f"block {self._blocks[index][0]!r} is not given what {self._blocks[index - 1][0]!r} puts out: the "
                    "model changes hidden states between them, which a walk from block to block cannot follow"
                )


def _part(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Call]:
    hidden_name, others = None, args[1:]
    hidden = args[0] if args else None
    if not args:
        hidden_name, hidden = next(((key, v) for key, v in kwargs.items() if isinstance(v, torch.Tensor)), (None, None))
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


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
