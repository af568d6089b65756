"""The k lowest of elements that lie on GPUs, one of each rank: the rounds, and what is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from distprune.collectives.base import Communicator
from distprune.kernels.available import kernels
from distprune.kernels.table import Piece, ScoreName, Table, tables_of
from distprune.shards.device import sent

_SAMPLES = 1 << 18  # of all competitions, over all ranks: a message of 1 MiB
_SAMPLES_ALONE = 1 << 12  # of each, at least, where nothing is sent
_MESSAGE, _ROOM = 1 << 20, 1 << 24  # bytes, of what is sent and of what is not
_SIGMAS = 5  # of a sample's rank: the k-th lies beside the range once in a million calls, which costs two passes more
_LAST_KEY, _LEAST_KEY = (1 << 31) - 1, -(1 << 31)


@dataclass(frozen=True)
class Tuning:
    """How kernels are run; what comes out does not depend on it."""

    block: int = 1024  # elements a program reads at a time
    num_warps: int = 4
    bits: int = 12  # of a bin, at most
    num_samples: int | None = None
    programs: int | None = None


@dataclass(frozen=True)
class Keys:
    """How values become keys. ``gone``: that of what was pruned before; ``last``: the highest that is a number.

    ``zeros_gone``: zero weights were. ``wide``: keys are those of float32.
    """

    score: ScoreName
    gone: int
    last: int
    zeros_gone: bool = True
    wide: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        number = getattr(kernels("tiles"), self.score.upper()).value
        return {"SCORE": number, "ZEROS_GONE": self.zeros_gone, "WIDE": self.wide}


@final
class Lowest:
    """What is pruned of each competition, on the device; the host has not waited for it.

    ``make_tables`` returns this rank's tables, once for each pass. ``states`` and ``num_nans`` are of all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        num_lowest: Sequence[int],
        num_positions: Sequence[int],
        keys: Keys,
        tuning: Tuning = Tuning(),
    ) -> None:
        """Make room for the passes. Local."""
        num, self._comm, self._keys, self._tuning = len(num_lowest), comm, keys, tuning
        most = (_MESSAGE if comm.size > 1 else _ROOM) // (8 * num)
        self._bits = max(min(tuning.bits, (most - 1).bit_length() - 1), 2)
        alone = min(_SAMPLES_ALONE, _ROOM // (4 * num)) if comm.size == 1 else 1
        self._num_samples = tuning.num_samples or max(_SAMPLES // num, alone)

        k, numels = np.array(num_lowest, dtype=np.int64), np.array(num_positions, dtype=np.int64)
        # A sample stands for so many positions; between which of the sorted ones does the k-th lie?
        strides = np.maximum(-(-numels // self._num_samples), 1)
        ranks, nums = k / strides, -(-numels // strides)
        margins = _SIGMAS * np.sqrt(np.maximum(ranks * (1 - ranks / np.maximum(nums, 1)), 0)) + 2
        last = np.maximum(numels - 1, 0)
        begin = 1 + self._num_samples - nums  # what is before them was not filled
        low = begin + np.maximum(np.floor(ranks - margins), 0) - 1
        high = begin + np.minimum(np.ceil(ranks + margins) + 1, nums + 1) - 1
        closed = np.full(num, keys.gone)
        states = np.stack([k, closed, closed, np.where(k > 0, 0, last), last, numels, k], 1)
        words = np.concatenate([states, strides[:, None], numels[:, None], low[:, None], high[:, None]], 1)
        there = sent(torch.tensor(words.astype(np.int64), dtype=torch.int64, device="cpu"), device)
        self.states, self._strides, self._ends = there[:, :7].contiguous(), there[:, 7:9].contiguous(), there[:, 9:]
        shape = num, self._num_samples + 2
        self._samples = torch.full(shape, _LEAST_KEY, dtype=torch.int32, device=device)
        self._histogram = torch.zeros((num, (1 << self._bits) + 1), dtype=torch.int64, device=device)
        self.num_nans = torch.zeros(1, dtype=torch.int64, device=device)
        # Where the sample missed; each pass may waste one bit.
        self._num_passes = 1 + math.ceil((32 + math.ceil(math.log2(max(*numels.tolist(), 2)))) / (self._bits - 1))
        self._constants = {"BLOCK": tuning.block, "num_warps": tuning.num_warps, **keys.constants}

    def find(self, make_tables: Callable[[], Iterable[Table]], *, waits: bool = False) -> None:
        """Find what is pruned. Every rank must call it.

        Communicates a maximum of 1 MiB, and sums of at most 1 MiB. ``waits``: after each pass, and not more of them
        than are needed.
        """
        select, last = kernels("select"), self._keys.last
        for table in make_tables():
            constants = {"NUM": self._samples.shape[1], **self._constants}
            table.run(select.sample_keys, self._strides, self._samples, last, **constants)
        if self._comm.size > 1:
            self._comm.max_in_place(self._samples)
        self._samples[:, -1] = _LAST_KEY
        bracket = self._samples.sort(1).values.gather(1, self._ends).to(torch.int64)
        # What is gone is below: many zeros would wait for each other in one bin.
        self.states[:, 1:3] = torch.where(
            self.states[:, :1] > 0, bracket.clamp_(min=self._keys.gone + 1), self._keys.gone
        )
        del self._samples
        for number in range(self._num_passes):
            for table in make_tables():
                table.run(
                    select.count, self.states, self._histogram, self.num_nans, last, BITS=self._bits,
                    LOOKS_FOR_NANS=number == 0, **self._constants,
                )  # fmt: skip
            if self._comm.size > 1:
                self._comm.sum_to(self._histogram, None)
            select.narrow[(len(self.states),)](
                self.states, self._histogram, self._keys.gone, BITS=self._bits, num_warps=8
            )
            if waits and bool(
                (self.states[:, 1] == self.states[:, 2]).logical_and_(self.states[:, 3] == self.states[:, 4]).all()
            ):
                break
        if self._comm.size > 1:
            self._comm.sum_to(self.num_nans, None)

    def write(self, table: Table, totals: torch.Tensor, *, writes_mask: bool) -> None:
        """Write +0.0 where elements go, or a mask of what stays, unless something is NaN. Local.

        ``totals`` (tensors, 3), int64: pruned, gone before; the NaNs of a tensor are not counted.
        """
        table.run(
            kernels("select").write_lowest, self.states, self.num_nans, totals, self._keys.gone, self._keys.last,
            WRITES_MASK=writes_mask, **self._constants,
        )  # fmt: skip


def prune_pieces(
    comm: Communicator, pieces: Sequence[Piece], num_lowest: Sequence[int], num_positions: Sequence[int], keys: Keys,
    *, writes_mask: bool = False, tuning: Tuning = Tuning(),
) -> tuple[torch.Tensor, Lowest]:  # fmt: skip
    """Prune the ``num_lowest`` of each competition in place, or write masks; return the totals, and what was found.

    Every rank must call it, with at least one piece.
    """
    device = pieces[0].values.device
    tables = tables_of(pieces, tuning.block, programs=tuning.programs)
    lowest = Lowest(comm, device, num_lowest, num_positions, keys, tuning)
    totals = torch.zeros((1 + max(piece.tensor for piece in pieces), 3), dtype=torch.int64, device=device)
    lowest.find(lambda: tables)
    for table in tables:
        lowest.write(table, totals, writes_mask=writes_mask)
    return totals, lowest
