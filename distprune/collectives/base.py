"""The door to the other ranks: what every implementation offers, and what it counts.

Nouns: a *round* is one collective as its caller sees it; its *bytes* are the larger of what one rank sends and
receives, as the caller sees it. Messages are small by design (at most a few hundred KiB), so tensors travel through
host memory unless the backend cannot.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, final

import torch

Op = Literal["sum", "max"]
_FAILED, _OUT_OF_STEP = "_failed_to_communicate", "_is_out_of_step"  # on an exception


@dataclass
class Traffic:
    """Rounds and bytes of one rank since the communicator was made."""

    num_rounds: int = 0
    num_bytes: int = 0

    def copy(self) -> Traffic:
        """Return the counts as they are now, to subtract later."""
        return Traffic(self.num_rounds, self.num_bytes)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.num_rounds - earlier.num_rounds, self.num_bytes - earlier.num_bytes)


class Communicator(ABC):
    """A group of ranks. Every method but the properties must be called by all of them, in the same order.

    Implementations provide the underscore methods; counting happens here, once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()

    def __deepcopy__(self, memo: object) -> Self:
        return self  # the ranks are the same

    def global_rank(self, rank: int) -> int:
        """Return the number by which a device mesh knows rank ``rank`` of this group. Local."""
        return rank

    @final
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over ranks (one round, the tensor's bytes), on the CPU.

        ``values`` must have the same shape and dtype (int64 or float64) on every rank.
        """
        if values.dtype not in (torch.int64, torch.float64):
            raise TypeError(f"sums carry int64 or float64, not {values.dtype=}")
        values = values.detach().to("cpu", copy=True).contiguous()
        self.reduce_(values)
        return values

    @final
    def reduce_(self, values: torch.Tensor, op: Op = "sum", rank: int | None = None) -> None:
        """Reduce ``values`` over ranks in place, on rank ``rank`` alone, or on all (one round, the tensor's bytes).

        Contiguous, of the same shape and dtype (int64, float64, or float32 whose sums are exact) on every rank. They
        stay on their device where the backend works there. Other ranks than ``rank`` are left with anything.
        """
        with self.round(values.nbytes):
            if values.numel():
                self._reduce_in_place(values, op, rank)

    @final
    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return what rank ``source`` passed, on every rank (two rounds: length, then JSON text).

        ``value`` is anything JSON carries; the other ranks' argument is ignored. Nothing is pickled.
        """
        buffer = self._padded(json.dumps(value) if self.rank == source else "")
        with self.round(len(buffer)):
            self._broadcast_in_place(buffer, source)
        return json.loads(bytes(buffer.numpy()))

    @final
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order, on every rank (two rounds: length, then JSON text).

        For small objects only: bytes are ranks x the longest text. Nothing is pickled.
        """
        buffer = self._padded(json.dumps(value))
        with self.round(len(buffer) * self.size):
            texts = self._gather_bytes(buffer)
        return [json.loads(text) for text in texts]

    def _padded(self, text: str) -> torch.Tensor:
        """Return ``text`` as bytes, as many on every rank (one round); JSON may end in blanks."""
        payload = text.encode()
        length = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        self.reduce_(length, "max")
        return torch.frombuffer(bytearray(payload.ljust(int(length))), dtype=torch.uint8)

    @final
    def swap(self, sent: torch.Tensor, sent_sizes: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return what every rank has for this one, joined in rank order (one round), on the device of ``sent``.

        ``sent`` (uint8) is joined of ``sent_sizes[r]`` bytes for each rank r, from which ``sizes[r]`` come. It stays on
        its device where the backend works there.
        """
        with self.round(max(sum(sent_sizes), sum(sizes))):
            return self._swap_bytes(sent, list(sent_sizes), list(sizes))

    def round(self, num_bytes: int) -> AbstractContextManager[None]:
        """Count a round, whose collective is the body. What it raises is marked: the ranks may no longer meet."""
        self.traffic.num_rounds += 1
        self.traffic.num_bytes += num_bytes
        return _marking(_FAILED)

    @abstractmethod
    def _reduce_in_place(self, values: torch.Tensor, op: Op, rank: int | None) -> None:
        """Reduce a contiguous tensor, which may be on a device, to rank ``rank``, or to all."""

    @abstractmethod
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        """Broadcast a contiguous uint8 tensor, which may be on a device, of the same length on every rank."""

    @abstractmethod
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        """Return every rank's uint8 buffer; all have the same length."""

    @abstractmethod
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        """Return what every rank sent to this one, joined: ``sizes[r]`` bytes from rank r; uint8, where ``sent`` is."""


@contextmanager
def _marking(mark: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        setattr(error, mark, True)
        raise


# Mark what the body raises: the other ranks may be waiting in a collective that this one has left.
out_of_step = partial(_marking, _OUT_OF_STEP)


def as_told(error: BaseException) -> Exception:
    """Return ``error`` as the other ranks are told of it, or raise it, if it ends this rank alone.

    Extensions in Rust panic by a BaseException of their own: it becomes a RuntimeError.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    told = RuntimeError(repr(error))
    told.__cause__ = error
    return told


def as_raised(error: Exception) -> BaseException:
    """Return what :func:`as_told` was given: what a lone process raises, which has nobody to tell."""
    cause = error.__cause__
    return error if cause is None or isinstance(cause, Exception) else cause


def has_lost_ranks(error: Exception) -> bool:
    """Return whether a communicator raised ``error``."""
    return getattr(error, _FAILED, False)


def cannot_meet(error: Exception) -> bool:
    """Return whether to tell the other ranks of ``error`` would be to wait for them in vain."""
    return has_lost_ranks(error) or getattr(error, _OUT_OF_STEP, False)


def as_met(caught: BaseException) -> Exception:
    """Return ``caught`` as the other ranks are told of it; raise what ends this rank alone, or cannot be told."""
    if cannot_meet(error := as_told(caught)):
        raise error
    return error
