"""Groups and rows, each decided by itself, wherever shard edges cut them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.patterns.base import Choice, Pattern, Ranked, check_share, shares_of
from distprune.patterns.census import take_census
from distprune.patterns.cut_units import (
    Answers,
    CutPart,
    Lines,
    batches_of,
    decide_cut,
    most_bytes,
)
from distprune.patterns.local_units import LocalUnits, find_units
from distprune.scores.base import LocalScores
from distprune.selection.decide import decide_together
from distprune.selection.highest import keep_highest_per_row
from distprune.selection.order import Order
from distprune.shards.device import chunk_size, count_true, fetched, is_small, on_host, sent
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

# Weights on a device: of fewer a wait takes longer than the looks that it saves. An estimate, not measured.
_WORTH = 1 << 22


class WithinRows(Pattern):
    """Units of some inputs of one row, each decided by itself. What is gone is pruned first."""

    is_by_row = True

    @abstractmethod
    def unit_length(self, matrix: Matrix) -> int:
        """Return how many inputs a unit has."""

    @abstractmethod
    @override
    def keep(self, scores: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def keep_left(self, keys: torch.Tensor, is_gone: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """Return what stays of ``keys`` (rows, inputs), bool, or in ``out``; shares are of what is not ``is_gone``."""
        return self.keep(keys, out)

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census; no other where all units are whole on their ranks.

        Otherwise one more, of 8 bytes for each parameter with cut units, and three (see ``decide_cut``) for every 8 MiB
        that a rank sends, however many ranks there are. A rank sends its own elements of cut units, at most once, to
        ranks that hold the same rows, or, where no layout says which, parts of the same parameter. It is told as much,
        or the rows that it decides, if that is more.
        """
        orders = [ranked.order([i]) for i in range(len(ranked.numels))]  # raises alike on all ranks
        own = [self.of(member.name) for member in ranked.roster.members]  # so does this
        parts: dict[int, _RowUnits] = {}
        units = cache(find_units)  # of equal shapes alike

        def rows_of(scores: LocalScores) -> _RowUnits:
            member = ranked.index[scores.shard.name]
            if member in parts and parts[member].scores is scores:
                return parts[member]
            return _RowUnits(scores, member, own[member], orders[member], ranked.of_left, units)

        def num_cut(scores: LocalScores) -> int:
            part = parts[ranked.index[scores.shard.name]] = rows_of(scores)
            return part.units.num_cut

        def keep(member: int, keys: torch.Tensor) -> torch.Tensor:
            if ranked.regrows:
                return _keep_as_many(torch.maximum(keys, ~keys), keys >= 0, keys.shape[1])
            return own[member].keep_units(keys, _gone(orders[member], keys), of_left=ranked.of_left)

        def decide_all(scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return _decide([rows_of(each) for each in scores], outs)

        lines = Lines(ranked.comm, ranked.roster)

        @cache
        def cut_part(member: int) -> CutPart | None:
            return parts[member].cut_part(lines, partial(keep, member)) if member in parts else None

        if ranked.checks:
            members = [member for member, num in enumerate(take_census(ranked, num_cut=num_cut)[1]) if num]
            for batch in batches_of(ranked.roster, most_bytes(ranked.comm, members, cut_part)):
                stays = decide_cut(ranked.comm, batch, cut_part)
                for member in {member for member, _, _ in batch if member in parts}:
                    parts[member].answers.append(stays)
        return Choice([None] * len(orders), lambda scores, out: rows_of(scores).decide(out), decide_all)

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, self.unit_length(matrix)

    def keep_units(
        self, keys: torch.Tensor, is_gone: torch.Tensor | None, out: torch.Tensor | None = None, *, of_left: bool
    ) -> torch.Tensor:
        """Return what stays of whole units, bool, of the shape of ``keys`` (rows, inputs); or in ``out``. Local."""
        if is_gone is None:
            return self.keep(keys, out)
        stays = self.keep_left(keys, is_gone, out) if of_left else self.keep(keys, out)
        return torch.gt(stays, is_gone, out=stays)


@final
@dataclass(frozen=True)
class PerRow(WithinRows):
    """The lowest ``sparsity``, a fraction, of the weights of every row (output), rounded by ``round()``.

    >>> layer = torch.nn.Linear(8, 4)
    >>> report = prune_model(layer, pattern=PerRow(0.25))  # or 0.25, pattern="row"
    >>> (layer.weight == 0).sum(dim=1)
    tensor([2, 2, 2, 2])

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
    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        return PerRow(share), PerRow(0.0)

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


def _decide(parts: Sequence[_RowUnits], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Write what stays of ``parts``, small ones together; return the counts of each. On a device one wait at most."""
    _look_for_zeros(parts)
    return decide_together(
        [(part.scores, slice(0, part.scores.shard.geometry.local_numel)) for part in parts],
        [part.kind for part in parts],
        lambda i: parts[i].order,
        lambda keys, which: parts[which[0]].keep(keys),
        outs,
        lambda i: parts[i].decide(outs[i]),
    )


def _look_for_zeros(parts: Sequence[_RowUnits]) -> None:
    """Learn, of weights on a device that are their own scores, whether any is gone or NaN. Local; one wait, or none.

    One read of the weights saves each look for these; of few, the wait would take longer.
    """
    read = [part for part in parts if part.is_of_weights and not on_host(part.scores.device)]
    locals_ = [part.scores.shard.local.detach() for part in read]
    if sum(each.numel() for each in locals_) < _WORTH:
        return
    lowest = fetched([torch.linalg.vector_norm(each, -math.inf).double() for each in locals_])
    for part, number in zip(read, torch.stack(lowest).tolist() if lowest else [], strict=True):
        part.may_have_nans = math.isnan(number)
        part.may_have_gone &= not (part.order.zeros_gone and number > 0)


class _RowUnits:
    """The groups, or the rows, of one parameter on this rank."""

    def __init__(
        self,
        scores: LocalScores,
        member: int,
        pattern: WithinRows,
        order: Order,
        of_left: bool,
        units: Callable[[Geometry, Matrix, int], LocalUnits],
    ) -> None:
        self.scores = scores
        self._member = member
        self._pattern = pattern
        self._of_left = of_left
        self.order = order
        self._matrix = scores.shard.as_matrix()
        self._length = pattern.unit_length(self._matrix)
        self.units = units(scores.shard.geometry, self._matrix, self._length)
        self.may_have_gone = order.zeros_gone or scores.gone is not None
        self.may_have_nans = order.value_dtype.is_floating_point
        self.answers: list[Callable[[], Answers]] = []  # what became of cut units

    @property
    def is_of_weights(self) -> bool:
        """Whether there are weights, and they are the scores: then the least magnitude says if any is zero or NaN."""
        shard = self.scores.shard
        is_key = self.order.mask_of_bits(shard.local.dtype) is not None
        return self.scores.score.is_weight and is_key and not self.scores.regrows and shard.local.numel() > 0

    @property
    def kind(self) -> object:
        """What small parts that can be decided together have in common; ``None`` where this one is decided alone."""
        scores, units = self.scores, self.units
        is_whole = units.is_dense and not units.cut
        can_join = is_whole and not scores.regrows and is_small(scores.shard.geometry.local_numel, scores.device)
        return (self._pattern, self.order, self._length, self._of_left) if can_join else None

    def keep(self, keys: Array) -> BoolArray:
        """Return what stays, 1-D, of the ``keys`` of whole units, 1-D, on the host. Local."""
        rows = torch.from_numpy(keys).view(-1, self._length)
        stays: BoolArray = self._pattern.keep_units(rows, _gone(self.order, rows), of_left=self._of_left).numpy()
        return stays.reshape(-1)

    def cut_part(self, lines: Lines, keep: Callable[[torch.Tensor], torch.Tensor]) -> CutPart:
        """Return the cut units, as the ranks that share rows decide them."""
        scores, shard = self.scores, self.scores.shard
        line = lines.of(self._member, shard, self.units.cut)
        keys = self._sent_keys if line.is_told_by_all or shard.owned else None
        return CutPart(shard.name, self._length, line, scores.device, self.order.key_dtype, keys, keep)

    def _sent_keys(self, at: slice | torch.Tensor) -> torch.Tensor:
        """Return the keys that a home is told; where weights regrow, the bits of what is gone are inverted."""
        keys = self.scores.keys(self.order, at)
        return torch.where(self._was_kept(at), keys, ~keys) if self.scores.regrows else keys

    def _was_kept(self, at: slice | torch.Tensor) -> torch.Tensor:
        gone, num = self.scores.is_gone(at), at.stop - at.start if isinstance(at, slice) else len(at)
        return torch.ones(num, dtype=torch.bool, device=self.scores.device) if gone is None else ~gone

    def decide(self, out: torch.Tensor) -> torch.Tensor:
        """Decide the whole units, take over what became of the cut ones: see ``Choice``."""
        scores, units, device = self.scores, self.units, self.scores.device
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        width = len(units.whole)
        columns = None if units.is_dense else sent(torch.from_numpy(units.whole), device)
        num_rows, step = len(units.matrix.rows) if width else 0, max(1, chunk_size(device) // max(width, 1))
        memory = torch.empty(step * width, dtype=self.order.key_dtype, device=device)  # fresh each time would be slow
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            if columns is None:
                at = slice(units.begin + first * width, units.begin + last * width)
                self._keep_keys(at, memory, out[at], counts)
            else:
                rows = torch.arange(first, last, device=device)
                offsets = (units.begin + units.matrix.offsets(rows, columns)).reshape(-1)
                out[offsets] = self._keep_keys(offsets, memory, None, counts)
        for piece, packed in (each for answers in self.answers for each in answers().get(self._member, ())):
            stays = np.unpackbits(packed, count=piece.numel).view(np.bool_)
            for places, there in piece.chunks(device):
                self._count(scores.keys(self.order, there), counts)
                out[there] = sent(torch.from_numpy(stays[places]), device)
        # Where nothing is gone, as many stay of each unit.
        is_even = units.is_dense and not units.cut and not self.may_have_gone and not scores.regrows
        num_counted = self._length if is_even and len(out) else len(out)
        counts[0] = (num_counted - count_true(out[:num_counted])) * (len(out) // max(num_counted, 1))
        return counts

    def _keep_keys(
        self, at: slice | torch.Tensor, memory: torch.Tensor, out: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Return what stays of whole units, 1-D, and in ``out``, if given; count gone and NaN. ``memory``: of keys."""
        width = len(self.units.whole)
        keys = self.scores.keys(self.order, at, memory).view(-1, width)
        is_gone, out = self._count(keys, counts), None if out is None else out.view(-1, width)
        if self.scores.regrows:
            return _keep_as_many(keys, self._was_kept(at), self._length, out).view(-1)
        return self._pattern.keep_units(keys, is_gone, out, of_left=self._of_left).view(-1)

    def _count(self, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
        """Return which of ``keys`` are of what is gone; it and NaNs are added to ``counts``."""
        is_gone = _gone(self.order, keys) if self.may_have_gone else None
        if is_gone is not None:
            counts[1] += count_true(is_gone)
        is_seen = on_host(keys.device) and (not len(keys) or keys.numpy().max() <= self.order.last)
        if self.may_have_nans and not is_seen:
            counts[2] += count_true(keys > self.order.last)
        return is_gone


def _gone(order: Order, keys: torch.Tensor) -> torch.Tensor | None:
    """Return which of ``keys`` are of what is gone, bool; ``None``, on the host, where none is."""
    if on_host(keys.device) and (keys.numel() == 0 or keys.numpy().min() >= order.first):  # a quarter of torch's time
        return None
    return keys < order.first


def _keep_as_many(
    keys: torch.Tensor, was_kept: torch.Tensor, length: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what stays of ``keys`` (rows, inputs) of whole units: of each as many as ``was_kept``; or in ``out``."""
    num_pruned = length - was_kept.reshape(-1, length).sum(1)
    out = None if out is None else out.view(-1, length)
    return keep_highest_per_row(keys.reshape(-1, length), num_pruned, out).view(keys.shape)
