"""The k lowest of elements that lie on GPUs, one of each rank: the rounds, and what is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.kernels.available import kernels, launch
from distprune.kernels.table import ScoreName, Table
from distprune.shards.device import fetched, sent

_SAMPLES = 1 << 18  # of all competitions, over all ranks: a message of 1 MiB
_SAMPLES_ALONE = 1 << 12  # of each, at least, where nothing is sent
_MESSAGE, _ROOM = 1 << 20, 1 << 24  # bytes, of what is sent and of what is not
BLOCK = 1024  # elements a program reads at a time
_SIGMAS = 5  # of a sample's rank: the k-th lies beside the range once in a million calls, which costs two passes more
Mark = Literal["unmarked", "zeros", "masked", "left"]

_LAST_KEY, _LEAST_KEY = (1 << 31) - 1, -(1 << 31)


@dataclass(frozen=True)
class Keys:
    """How values become keys. ``gone``: that of what was pruned before; ``last``: the highest that is a number.

    ``marked``: what was, or what was not and comes last. ``wide``: keys are those of float32.
    """

    score: ScoreName
    gone: int
    last: int
    marked: Mark = "zeros"
    wide: bool = False
    checks_weights: bool = True  # whether a NaN weight counts, also where scores are not the weights

    @property
    def kind(self) -> dict[str, Any]:
        """What kernels have to know of it."""
        score, marked = (getattr(kernels("tiles"), name.upper()).value for name in (self.score, self.marked))
        return {"score": score, "marked": marked, "wide": self.wide, "checks_weights": self.checks_weights}


@final
class Lowest:
    """What is pruned of each competition, on the device; the host has not waited for it.

    ``states`` and ``num_nans`` are of all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        num_lowest: Sequence[int],
        num_positions: Sequence[int],
        keys: Keys,
        *,
        block: int = BLOCK,
        bits: int = 12,
        num_samples: int | None = None,
    ) -> None:
        """Make room for the passes. Local. ``bits``: of a bin, at most. What comes out depends on none of the last."""
        num, self._comm, self._keys = len(num_lowest), comm, keys
        most = (_MESSAGE if comm.size > 1 else _ROOM) // (8 * num)
        self._bits = max(min(bits, (most - 1).bit_length() - 1), 2)
        alone = min(_SAMPLES_ALONE, _ROOM // (4 * num)) if comm.size == 1 else 1
        self._num_samples = num_samples or max(_SAMPLES // num - 2, alone)

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
        columns = sent(torch.tensor(words.astype(np.int64), dtype=torch.int64, device="cpu"), device)
        self.states, self._strides, self._ends = (part.contiguous() for part in torch.split(columns, [7, 2, 2], 1))
        shape = num, self._num_samples + 2
        self._samples = torch.full(shape, _LEAST_KEY, dtype=torch.int32, device=device)
        # Of each competition bins, and what is below; of all how many are NaN.
        self._histogram = torch.zeros((num, (1 << self._bits) + 2), dtype=torch.int64, device=device)
        self.num_nans = torch.zeros(1, dtype=torch.int64, device=device)
        # Where the sample missed; each pass may waste one bit.
        self._num_passes = 1 + math.ceil((32 + math.ceil(math.log2(max(*numels.tolist(), 2)))) / (self._bits - 1))
        self._constants = {"BLOCK": block, "keys": keys.kind}

    def sample(self, tables: Iterable[Table], *, in_place: bool) -> None:
        """Take this rank's part of the sample. Local.

        Of several ranks, what is launched later is compiled, ``in_place`` or for masks: what fails, fails here.
        """
        constants = {"NUM": self._samples.shape[1], **self._constants}
        for table in tables:
            table.run(kernels("select").sample_keys, self._strides, self._samples, self._keys.last, **constants)
            if self._comm.size > 1:
                idle = table.without_segments()
                for is_first in (True, False):
                    self._count(idle, is_first)
                for writes_mask in (True, False)[: 1 + in_place]:
                    self.write(idle, self.num_nans, writes_mask=writes_mask)
                self._narrow(torch.zeros_like(self.states[:1]))

    def find(self, make_tables: Callable[[], Iterable[Table]], *, may_fail: bool) -> None:
        """Find what is pruned. Every rank must call it, after :meth:`sample`.

        Communicates a maximum of 1 MiB, and sums of at most 1 MiB. ``may_fail``: what ``make_tables`` raises is raised
        on all ranks; the host then waits for each pass, and there are not more than are needed.
        """
        if self._comm.size > 1:
            self._comm.reduce_(self._samples, "max")
        self._samples[:, -1] = _LAST_KEY
        bracket = self._samples.sort(1).values.gather(1, self._ends).to(torch.int64)
        # What is gone is below: many zeros would wait for each other in one bin.
        bracket.clamp_(min=self._keys.gone + 1)
        self.states[:, 1:3] = torch.where(self.states[:, :1] > 0, bracket, self._keys.gone)
        del self._samples
        for number in range(self._num_passes):

            def count(words: torch.Tensor, is_first: bool = number == 0) -> None:
                for table in make_tables():
                    self._count(table, is_first)
                if words is not self._histogram:
                    words.copy_(fetched([self._histogram])[0])

            if may_fail:
                total = sum_together(self._comm, tuple(self._histogram.shape), count)
                self._histogram.copy_(sent(total, self._histogram.device))
            else:
                count(self._histogram)
                if self._comm.size > 1:
                    self._comm.reduce_(self._histogram)
            if number == 0:
                self.num_nans.copy_(self._histogram[:1, -1])
                self._histogram[:, -1] = 0
            self._narrow(self.states)
            if may_fail:
                states = fetched([self.states])[0]
                if bool((states[:, [1, 3]] == states[:, [2, 4]]).all()):
                    break

    def _count(self, table: Table, is_first: bool) -> None:
        constants = {"BITS": self._bits, "LOOKS_FOR_NANS": is_first, **self._constants}
        given = self.states, self._histogram, self._histogram[0, -1:], self._keys.last
        table.run(kernels("select").count, *given, **constants)

    def _narrow(self, states: torch.Tensor) -> None:
        constants = {"BITS": self._bits, "num_warps": 8}
        narrow = kernels("select").narrow
        launch(narrow, (len(states),), states.device, states, self._histogram, self._keys.gone, **constants)

    def write(self, table: Table, totals: torch.Tensor, *, writes_mask: bool) -> None:
        """Write +0.0 where elements go, or a mask of what stays, unless something is NaN. Local.

        ``totals`` (tensors, 3), int64: pruned, gone before; or how many are NaN.
        """
        numbers = self._keys.gone, self._keys.last
        constants = {"WRITES_MASK": writes_mask, **self._constants}
        table.run(kernels("select").write_lowest, self.states, self.num_nans, totals, *numbers, **constants)
