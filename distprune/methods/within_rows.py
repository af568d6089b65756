"""N:M groups and rows, each decided for itself, wherever shard edges cut them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import Communicator, Roster
from distprune.methods.cut_units import CutPart, LocalUnits, find_units, settle_cut
from distprune.methods.decide import Candidate, Decision, Rule, score_of, score_order, total_census
from distprune.selection import NByM, Order, PerRow, Scores, keep_highest_per_group, keep_highest_per_row
from distprune.shards import LocalShard, Matrix, flat_chunk

__all__ = ["decide_within_rows", "matrix_of"]

IntArray = npt.NDArray[np.int64]

_CHUNK = 1 << 18  # elements whose keys and places are in memory at a time
_BATCH = 1 << 24  # elements of cut units that travel at a time, over all ranks; some 40 bytes each while they do


def matrix_of(shard: LocalShard) -> Matrix:
    """Return how the shard's parameter is a matrix."""
    return shard.matrix or Matrix.of_shape(shard.geometry.global_shape)


def decide_within_rows(
    comm: Communicator, roster: Roster, candidates: Sequence[Candidate], pattern: NByM | PerRow, rule: Rule
) -> Decision:
    """Return what ``pattern`` prunes by the scores of ``rule``. Every rank must call it, owners settled.

    What was pruned before goes first; ``rule.zeros`` says whether :class:`PerRow` counts it. One round for
    the census (40 bytes a parameter), and nothing else where every unit is whole on the ranks that
    hold it. Otherwise three rounds (see ``settle_cut``) for every 2**24 elements, over all ranks, in cut units;
    of those a rank hands over its own.

    Raises:
        ValueError: on every rank: values are NaN, replicas differ, or elements without an owner.
        TypeError: on every rank: values of a dtype that has no order.
    """
    place = roster.index()
    orders = [score_order([member], rule.method) for member in roster.members]
    parts = [_Part(candidate, place[candidate.shard.name], pattern) for candidate in candidates]
    census = total_census(comm, roster, candidates, rule, [part.units.num_cut for part in parts])
    masks = []
    for part in parts:
        part.scores = score_of(part.candidate.shard, rule, census.seed)
        masks.append(part.whole_units(orders[part.member], rule))
    by_member = {part.member: (part, mask) for part, mask in zip(parts, masks, strict=True)}

    def keep(_: int, keys: torch.Tensor) -> torch.Tensor:
        return _keep(keys, pattern, rule)

    for batch in _batches(census.num_cut):
        cut: list[CutPart] = []
        asking: list[tuple[torch.Tensor, torch.Tensor]] = []  # mask, where in it
        for member, stretch, num_stretches in batch:
            if member in by_member:
                part, mask = by_member[member]
                num_rows = part.matrix.num_rows
                rows = num_rows * stretch // num_stretches, num_rows * (stretch + 1) // num_stretches
                offsets = part.units.cut_offsets(part.candidate.shard.geometry, part.matrix, *rows)
                cut.append(part.cut(orders[member], rows, offsets))
                asking.append((mask, _at(offsets, mask)))
        for (mask, at), kept in zip(asking, settle_cut(comm, cut, keep), strict=True):
            mask.view(-1)[at] = torch.from_numpy(kept).to(mask.device)
    return Decision(masks, census.num_zeros, [None] * len(roster.members), census.seed)


class _Part:
    """One parameter on this rank, cut into units."""

    scores: Scores

    def __init__(self, candidate: Candidate, member: int, pattern: NByM | PerRow) -> None:
        self.candidate = candidate
        self.member = member
        self.pattern = pattern
        self.matrix = matrix_of(candidate.shard)
        self.length = pattern.m if isinstance(pattern, NByM) else max(self.matrix.num_in, 1)
        self.units: LocalUnits = find_units(candidate.shard.geometry, self.matrix, self.length)

    def whole_units(self, order: Order, rule: Rule) -> torch.Tensor:
        """Return the local mask once the whole units are decided."""
        local, units = self.candidate.shard.local, self.units
        mask = torch.ones(self.candidate.shard.geometry.local_shape, dtype=torch.bool, device=local.device)
        num_rows, width = len(units.matrix.rows), len(units.whole)
        step = max(1, _CHUNK // max(width, 1))
        for start in range(0, num_rows if width else 0, step):
            stop = min(start + step, num_rows)
            if units.is_dense:
                first, last = units.begin + start * width, units.begin + stop * width
                keys = self._keys_of(order, self.scores.values(first, last), slice(first, last))
                mask.view(-1)[first:last] = _keep(keys.view(-1, width), self.pattern, rule).view(-1)
            else:
                offsets = _at(units.offsets(start, stop).reshape(-1), local)
                keys = self._keys_of(order, self.scores.values_at(offsets), offsets)
                mask.view(-1)[offsets] = _keep(keys.view(-1, width), self.pattern, rule).view(-1)
        return mask

    def cut(self, order: Order, rows: tuple[int, int], offsets: IntArray) -> CutPart:
        """Return the elements at ``offsets``, all those in cut units of ``rows``, as they travel."""
        shard = self.candidate.shard
        at = _at(offsets, shard.local)
        keys = self._keys_of(order, self.scores.values_at(at), at).cpu().numpy()
        flat = shard.geometry.flat_indices_at(offsets)
        return CutPart(self.member, self.matrix, self.length, rows, flat, keys, bool(shard.owned))

    def _keys_of(self, order: Order, values: torch.Tensor, at: slice | torch.Tensor) -> torch.Tensor:
        """Return the keys of ``values``; what was pruned before comes below everything else."""
        keys, zeros_of = order.keys(values), self.candidate.zeros_of
        if zeros_of is not None:
            before = flat_chunk(zeros_of, at.start, at.stop) if isinstance(at, slice) else torch.take(zeros_of, at)
            keys.masked_fill_(before == 0, -1)
        return keys


def _at(offsets: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(offsets).to(like.device)


def _keep(keys: torch.Tensor, pattern: NByM | PerRow, rule: Rule) -> torch.Tensor:
    """Return what stays of whole units (rows, inputs); those pruned before have negative keys."""
    if isinstance(pattern, NByM):
        return keep_highest_per_group(keys, pattern.n, pattern.m)
    if rule.zeros == "first":
        return keep_highest_per_row(keys, round(pattern.amount * keys.shape[1]))
    num_before = (keys < 0).sum(1)
    wanted = np.rint(pattern.amount * (keys.shape[1] - num_before).cpu().numpy()).astype(np.int64)  # as round() does
    return keep_highest_per_row(keys, num_before + torch.from_numpy(wanted).to(keys.device))


def _batches(num_cut: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield (member, which stretch of its rows, of how many) of the members with cut units, so many at a time."""
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
