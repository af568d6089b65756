"""N:M groups and rows, each decided by itself, wherever shard edges cut them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.patterns.base import Choice, Pattern, Ranked, check_share, shares_of
from distprune.patterns.census import take_census
from distprune.patterns.cut_units import CutElements, LocalUnits, find_units, settle_cut
from distprune.scores import LocalScores
from distprune.selection import (
    PUT_NUMEL,
    Chosen,
    Counts,
    Order,
    Put,
    count_beyond,
    keep_groups_of_bits,
    keep_highest_per_group,
    keep_highest_per_row,
    put_whole,
)
from distprune.shards import Matrix, chunk_size, count_true, fetched, on_host, sent

__all__ = ["NByM", "PerRow"]

Array = npt.NDArray[Any]

_BATCH = 1 << 24  # elements of cut units that travel at a time, over all ranks; some 40 bytes each while they do


class _WithinRows(Pattern):
    """Units of some inputs of one row, each decided by itself. What is gone is pruned first."""

    is_by_row = True

    @abstractmethod
    def unit_length(self, matrix: Matrix) -> int:
        """Return how many inputs a unit has."""

    @abstractmethod
    @override
    def keep(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def keep_bits(self, bits: Array, magnitude: Any, out: Array) -> tuple[int, int, int] | None:  # noqa: ARG002
        """Do as :meth:`keep` with keys, ``bits & magnitude``, 1-D, on the host; or leave in ``out``, if it is not bool,
        the bits of what stays, and 0 for the others.

        Return how many stay, the lowest and the highest key; ``None``, and do nothing, where no form reads once.
        """
        return None

    def keep_left(self, keys: torch.Tensor, is_gone: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """Return what stays of ``keys`` (rows, inputs), bool, or in ``out``; shares are of what is not ``is_gone``."""
        return self.keep(keys, out)

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census; no other where all units are whole on their ranks.

        Otherwise three more (see ``settle_cut``) for every 2**24 elements, over all ranks, in cut units. A rank sends
        its own elements of cut units.
        """
        orders = [ranked.order([i]) for i in range(len(ranked.numels))]  # raises alike on all ranks
        own = [self.of(member.name) for member in ranked.roster.members]  # so does this
        parts: dict[int, _ParameterUnits] = {}

        def units_of(scores: LocalScores) -> _ParameterUnits:
            member = ranked.place[scores.shard.name]
            return _ParameterUnits(scores, member, own[member], orders[member], ranked.of_left)

        def part_of(scores: LocalScores) -> _ParameterUnits:
            member = ranked.place[scores.shard.name]
            if member not in parts:
                parts[member] = units_of(scores)
            return parts[member]

        def settle() -> list[Chosen]:
            found = [part_of(scores).settle() for scores in ranked.scores]
            return Chosen.all_of([mask for mask, _ in found], [counts for _, counts in found])

        def decide(piece: LocalScores, put: Put) -> Counts:
            return units_of(piece).decide(put)

        if ranked.checks:
            census = take_census(ranked, counts_gone=False, num_cut=lambda scores: part_of(scores).units.num_cut)
            for batch in _batches(census.num_cut):
                held = [(parts[member], stretch, num) for member, stretch, num in batch if member in parts]
                kept = settle_cut(
                    ranked.comm,
                    partial(_cut_parts, held),
                    lambda member, keys: own[member].keep_units(
                        keys, _gone(orders[member], keys), of_left=ranked.of_left
                    ),
                )
                for i, (part, _, _) in enumerate(held):
                    part.answers.append(partial(lambda stays, of_part: stays()[of_part], kept, i))
        return Choice([None] * len(orders), settle, decide)

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, self.unit_length(matrix)

    def keep_units(
        self, keys: torch.Tensor, is_gone: torch.Tensor | None, out: torch.Tensor | None = None, *, of_left: bool
    ) -> torch.Tensor:
        """Return what stays of whole units, bool, of the shape of ``keys`` (rows, inputs); or in ``out``. Local."""
        if is_gone is None:
            return self.keep(keys, out)
        return (self.keep_left(keys, is_gone, out) if of_left else self.keep(keys, out)).logical_and_(~is_gone)


@final
@dataclass(frozen=True)
class NByM(_WithinRows):
    """``n`` of every ``m`` consecutive inputs of a row are kept. What is gone counts as pruned.

    Raises:
        TypeError: ``n`` or ``m`` is not an int.
        ValueError: not 0 < ``n`` < ``m``.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        for name, number in (("n", self.n), ("m", self.m)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an int, not {number!r}")
        if not 0 < self.n < self.m:
            raise ValueError(f"{self.n}:{self.m} is not a pattern: n of every m are kept, 0 < n < m")

    @override
    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @override
    def check_fits(self, name: str, matrix: Matrix) -> None:
        if matrix.num_in % self.m:
            raise ValueError(f"{self} does not fit {name!r}: its {matrix.num_in} inputs are not a multiple of {self.m}")

    @property
    @override
    def width(self) -> int:
        return self.m

    @override
    def unit_length(self, matrix: Matrix) -> int:
        return self.m

    @override
    def keep(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return keep_highest_per_group(scores, self.n, self.m, out)

    @override
    def keep_bits(self, bits: Array, magnitude: Any, out: Array) -> tuple[int, int, int] | None:
        return keep_groups_of_bits(bits, magnitude, self.n, self.m, out)


@final
@dataclass(frozen=True)
class PerRow(_WithinRows):
    """The lowest ``sparsity``, a fraction, of the weights of every row (output), rounded by ``round()``.

    Each parameter may have a fraction of its own: ``PerRow({"0.weight": 0.5, "2.weight": 0.8})``. SparseGPT spreads
    the pruned weights evenly over its column blocks.

    Raises:
        TypeError: ``sparsity`` is not a fraction.
        ValueError: it is out of range.
    """

    width = 1

    sparsity: float | Mapping[str, float]

    def __post_init__(self) -> None:
        check_share(self.sparsity)
        if any(isinstance(each, int) for each in shares_of(self.sparsity)):
            raise TypeError(f"sparsity must be a fraction such as 0.5, not {self.sparsity!r}")

    @property
    def _share(self) -> float:
        if isinstance(self.sparsity, Mapping):
            raise TypeError(f"{self!r} is of several parameters; take of(name)")
        return self.sparsity

    @override
    def __str__(self) -> str:
        return "row"

    @override
    def part(self, start: int, stop: int) -> Pattern:
        num = round(self._share * stop) - round(self._share * start)
        return PerRow(num / max(stop - start, 1))

    @override
    def unit_length(self, matrix: Matrix) -> int:
        return max(matrix.num_in, 1)

    @override
    def keep_left(self, keys: torch.Tensor, is_gone: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        num_gone = is_gone.sum(1)
        wanted = (self._share * (keys.shape[1] - num_gone).to(torch.float64)).round_()  # half to even, as round()
        return keep_highest_per_row(keys, num_gone + wanted.to(torch.int64), out)

    @override
    def keep(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return keep_highest_per_row(scores, round(self._share * scores.shape[1]), out)


class _ParameterUnits:
    """The units of one parameter on this rank."""

    def __init__(self, scores: LocalScores, member: int, pattern: _WithinRows, order: Order, of_left: bool) -> None:
        self._scores = scores
        self._keep = partial(pattern.keep_units, of_left=of_left)
        self._keep_bits = pattern.keep_bits
        self._order = order
        self._member = member
        self._matrix = scores.shard.as_matrix()
        self._length = pattern.unit_length(self._matrix)
        self.units: LocalUnits = find_units(scores.shard.geometry, self._matrix, self._length)
        self._bits = scores.bits(order) if self.units.is_dense else None
        self._cut: list[torch.Tensor] = []  # local offsets
        self.answers: list[partial[npt.NDArray[np.bool_]]] = []  # what stays of each of ``_cut``

    def cut(self, stretch: int, num_stretches: int) -> tuple[CutElements, torch.Tensor]:
        """Return the elements in cut units of the ``stretch``-th of ``num_stretches`` of the rows, and their keys."""
        shard, num_rows = self._scores.shard, self._matrix.num_rows
        rows = num_rows * stretch // num_stretches, num_rows * (stretch + 1) // num_stretches
        offsets = torch.from_numpy(self.units.cut_offsets(shard.geometry, self._matrix, *rows))
        self._cut.append(offsets)
        flat = shard.geometry.flat_indices_at(offsets).numpy()
        part = CutElements(self._member, self._matrix, self._length, rows, flat, shard.owned)
        return part, self._scores.keys(self._order, sent(offsets, self._scores.device))

    def settle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide the whole units, and take over what became of the cut ones: the mask, and its counts."""
        scores, device = self._scores, self._scores.device
        mask = torch.empty(scores.shard.geometry.local_shape, dtype=torch.bool, device=device)
        flat_mask = mask.view(-1)
        counts = torch.zeros(3, dtype=torch.int64, device=device)  # gone, pruned, NaNs
        keys = self._memory(chunk_size(device), self._order.key_dtype)
        if self.units.is_dense:
            flags = flat_mask.numpy() if on_host(device) else None
            for at in self._slices(chunk_size(device)):
                if flags is None or self._keep_at_once(at, flags[at], counts) is None:
                    self._keep_keys(at, keys, flat_mask[at], counts)
        else:
            columns = sent(torch.from_numpy(self.units.whole), device)
            for first, last in self._row_ranges(chunk_size(device)):
                offsets = self.units.offsets(torch.arange(first, last, device=device), columns).reshape(-1)
                flat_mask[offsets] = self._keep_keys(offsets, keys, None, counts)
        for offsets, answer in zip(self._cut, self.answers, strict=True):
            there = sent(offsets, device)
            self._count(scores.keys(self._order, there), counts)
            flat_mask[there] = sent(torch.from_numpy(answer()), device)
        counts[1] = mask.numel() - count_true(mask)
        return mask, counts

    def decide(self, put: Put) -> Counts:
        """Decide whole units on the host, of which there are no others, and ``put`` what stays (see ``Choice``)."""
        if not self.units.is_dense:
            mask, found = self.settle()
            return put_whole(Chosen(*found.tolist(), mask=mask), put)
        counts, num_pruned = torch.zeros(3, dtype=torch.int64), 0
        memory, keys = self._memory(PUT_NUMEL, torch.bool), self._memory(PUT_NUMEL, self._order.key_dtype)
        for at in self._slices(PUT_NUMEL):
            left = put.memory(at.stop - at.start)
            if (num_kept := self._keep_at_once(at, left, counts)) is not None:
                put.left(at.start, left)
            else:
                stays = self._keep_keys(at, keys, memory[: len(left)], counts).numpy()
                num_kept = int(np.count_nonzero(stays))
                put.stays(at.start, stays)
            num_pruned += len(left) - num_kept
        counts[1] = num_pruned
        return Counts(*counts.tolist())

    def _num_rows(self, num: int) -> int:
        """Return how many rows of whole units have about ``num`` elements, at least one."""
        return max(1, num // max(len(self.units.whole), 1))

    def _memory(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for that many rows: fresh memory each time would be slow."""
        return torch.empty(self._num_rows(num) * len(self.units.whole), dtype=dtype, device=self._scores.device)

    def _row_ranges(self, num: int) -> Iterator[tuple[int, int]]:
        """Yield the local rows, about ``num`` elements of whole units at a time: the first, and the one after them."""
        num_rows, step = len(self.units.matrix.rows) if len(self.units.whole) else 0, self._num_rows(num)
        for first in range(0, num_rows, step):
            yield first, min(first + step, num_rows)

    def _slices(self, num: int) -> Iterator[slice]:
        """Yield the local offsets of those rows, where they are dense."""
        begin, width = self.units.begin, len(self.units.whole)
        for first, last in self._row_ranges(num):
            yield slice(begin + first * width, begin + last * width)

    def _keep_at_once(self, at: slice, out: Array, counts: torch.Tensor) -> int | None:
        """Choose from whole units on the host by one read of them, into ``out`` as ``keep_bits``; add to ``counts``.

        Return how many stay. ``None``, and nothing counts: not possible.
        """
        if self._bits is None:
            return None
        bits, magnitude = self._bits[0][at], self._bits[1]
        found = self._keep_bits(bits, magnitude, out)
        if found is None or found[1] < self._order.first:  # what is gone has rules of its own
            return None
        num_kept, lowest, highest = found
        if highest > self._order.last:
            counts[2] += count_beyond(self._order, bits, magnitude, lowest, highest)[0]
        return num_kept

    def _keep_keys(
        self, at: slice | torch.Tensor, memory: torch.Tensor, out: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Return what stays of whole units, 1-D, and in ``out``, if given; add to ``counts``. ``memory`` is of keys."""
        width = len(self.units.whole)
        keys = self._scores.keys(self._order, at, memory).view(-1, width)
        is_gone = self._count(keys, counts)
        return self._keep(keys, is_gone, None if out is None else out.view(-1, width)).view(-1)

    def _count(self, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
        """Return which of ``keys`` are of what is gone; it and NaNs are added to ``counts``."""
        if (is_gone := _gone(self._order, keys)) is not None:
            counts[0] += is_gone.sum()
        if not on_host(keys.device) or (len(keys) and keys.numpy().max() > self._order.last):
            counts[2] += (keys > self._order.last).sum()
        return is_gone


def _gone(order: Order, keys: torch.Tensor) -> torch.Tensor | None:
    """Return which of ``keys`` are of what is gone, bool; ``None``, on the host, where none is."""
    if on_host(keys.device) and (keys.numel() == 0 or keys.numpy().min() >= order.first):  # a quarter of torch's time
        return None
    return keys < order.first


def _cut_parts(held: Sequence[tuple[_ParameterUnits, int, int]]) -> list[tuple[CutElements, npt.NDArray[Any]]]:
    """Return what of each part travels, and the keys; those of all are fetched at once."""
    found = [part.cut(stretch, num) for part, stretch, num in held]
    keys = fetched([there for _, there in found])
    return [(part, here.numpy()) for (part, _), here in zip(found, keys, strict=True)]


def _batches(num_cut: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield batches of (member, which range of its rows, of how many ranges), for the members with cut units."""
    batch: list[tuple[int, int, int]] = []
    total = 0
    for member, num in enumerate(num_cut):
        num_stretches = -(-num // _BATCH)
        for stretch in range(num_stretches):
            size = -(-num // num_stretches)
            if batch and total + size > _BATCH:
                yield batch
                batch, total = [], 0
            batch.append((member, stretch, num_stretches))
            total += size
    if batch:
        yield batch
