"""The blocks of which a rank holds a part: they compete as elements of a coarser matrix.

A block that shard edges cut is put together at its home, which enters it into the competition (see ``cut_bands``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.patterns.addends import NUM_GONE, NUM_ROWS, Grid, ShardAddends, keys_of
from distprune.patterns.base import Choice, Ranked
from distprune.patterns.cut_bands import Answer, CutBands, CutPart
from distprune.patterns.local_blocks import LocalBlocks
from distprune.scores.base import Elements, LocalScores, Score
from distprune.shards.device import fetched, sent, sent_together
from distprune.shards.geometry import Geometry, runs_of
from distprune.shards.local_shard import LocalShard, Ownership

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class _BlockSum(Score):
    """What stands in the place of weights is the score of a block."""

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.int64


@dataclass(frozen=True)
class _PartSums:
    """Of a part of a shard: the ``keys`` of all blocks, which are ``left``, and the table of cut ones."""

    keys: torch.Tensor
    left: torch.Tensor
    cut: torch.Tensor


class OwnBlocks:
    """The blocks of which this rank holds a part, and the cut ones whose home it is. To be used within rounds."""

    def __init__(self, ranked: Ranked, size: int) -> None:
        self._ranked, self._size, self._made = ranked, size, cache(LocalBlocks.of)
        self.cut = CutBands(ranked.comm, ranked.roster)
        self.grid: Grid | None = None
        self._nums = [numel // size**2 for numel in ranked.numels]

    def of(self, scores: LocalScores) -> list[LocalBlocks]:
        """Return the blocks of one of this rank's shards, or of a piece of one."""
        return self._made(scores.shard.geometry, scores.shard.as_matrix(), self._size)

    def num_cut(self, scores: LocalScores) -> int:
        return sum(part.num_cut for part in self.of(scores))

    @cached_property
    def scores(self) -> dict[int, LocalScores]:
        """The scores of this rank's shards, by member."""
        return {self._ranked.index[scores.shard.name]: scores for scores in self._ranked.scores}

    @cached_property
    def addends(self) -> dict[int, ShardAddends]:
        return {member: ShardAddends(scores) for member, scores in self._ranked.owned.items()}

    @cached_property
    def _sums(self) -> dict[int, list[_PartSums]]:
        """By member, of each part."""
        found = {
            member: [self._sums_of(part, ShardAddends(scores), member) for part in self.of(scores)]
            for member, scores in self.scores.items()
        }
        tensors = [tensor for sums in found.values() for of_part in sums for tensor in vars(of_part).values()]
        there = fetched([tensor.view(-1).view(torch.uint8) for tensor in tensors])  # of one dtype: one wait
        here = (of.view(tensor.dtype).view(tensor.shape) for of, tensor in zip(there, tensors, strict=True))
        return {member: [_PartSums(next(here), next(here), next(here)) for _ in sums] for member, sums in found.items()}

    def _sums_of(self, part: LocalBlocks, addends: ShardAddends, member: int) -> _PartSums:
        device, num_across = addends.scores.device, part.shape[1]
        keys = torch.empty(part.shape, dtype=torch.int64, device=device)
        left = torch.empty(part.shape, dtype=torch.bool, device=device)
        places, cut = part.cut if part.num_cut else np.empty(0, dtype=np.int64), list[torch.Tensor]()
        for at, bands in part.chunks(device):
            table = torch.zeros((NUM_ROWS, bands.stop - bands.start, num_across), dtype=torch.int64, device=device)
            addends.add(table, at, partial(part.added_up, bands), self.grid, member)
            first, last = np.searchsorted(places, [bands.start * num_across, bands.stop * num_across]).tolist()
            if first < last:
                which = torch.from_numpy(places[first:last] - bands.start * num_across)
                cut.append(table.view(NUM_ROWS, -1)[:, sent(which, device)])
            torch.ne(table[NUM_GONE], self._size**2, out=left[bands])
            keys[bands] = keys_of(table, addends.scores.score, self._size**2, gone_compete=True)
        return _PartSums(keys, left, torch.cat(cut, 1) if cut else keys.new_empty((NUM_ROWS, 0)))

    def _competing(
        self, member: int, keys: torch.Tensor, left: torch.Tensor, geometry: Geometry, *, owned: bool
    ) -> LocalScores:
        """Return blocks as elements of a coarser parameter, which compete; ``geometry``: which of all they are."""
        name, score, regrows = self._ranked.roster.members[member].name, self._ranked.score, self._ranked.regrows
        if score.scores_units:
            keys = score.of_units(name, geometry.flat_indices(0, geometry.local_numel)).to(torch.int64)
        shard = LocalShard(name, keys.view(geometry.local_shape), geometry, Ownership(owned))
        return LocalScores(shard, _BlockSum(), gone=left.view(geometry.local_shape), regrows=regrows)

    @cached_property
    def _whole(self) -> dict[int, list[tuple[LocalScores, IntArray | slice]]]:
        """By member, of each part: whole blocks, and their places among all of its blocks."""
        found: dict[int, list[tuple[LocalScores, IntArray | slice]]] = {}
        for member, sums in self._sums.items():
            scores, found[member] = self.scores[member], []
            for part, of_part in zip(self.of(scores), sums, strict=True):
                geometry, places = part.whole_places
                keys, left = of_part.keys.view(-1)[places], of_part.left.view(-1)[places]
                whole = self._competing(member, keys, left, geometry, owned=scores.shard.owned)
                found[member].append((whole, places))
        return found

    @cached_property
    def _homes(self) -> dict[int, tuple[LocalScores, list[IntArray]]]:
        """By member, the cut blocks whose home this rank is, and the places among them of what each rank told."""
        found = {}
        for member, told in self.cut.told().items():
            first = self.cut.first_band(member, self._nums[member])
            numbers, places = np.unique(np.concatenate([numbers for numbers, _ in told]), return_inverse=True)
            parts = np.split(places, np.cumsum([len(numbers) for numbers, _ in told])[:-1])
            table = torch.zeros((NUM_ROWS, len(numbers)), dtype=torch.int64, device="cpu")
            for place, (_, values) in zip(parts, told, strict=True):
                if values is not None:
                    table.index_add_(1, torch.from_numpy(place), torch.from_numpy(values.T.copy()))
            left = table[NUM_GONE] != self._size**2
            keys = keys_of(table, self._ranked.score, self._size**2, gone_compete=True)
            geometry = Geometry((self._nums[member],), (runs_of(numbers + first),))
            scores = self._competing(member, keys, left, geometry, owned=True)
            found[member] = scores, parts
        return found

    def cut_part(self, member: int) -> CutPart | None:
        """Return what this rank holds of the cut blocks of ``member``."""
        scores = self.scores.get(member)
        if scores is None or not self.num_cut(scores):
            return None
        numbers, order = self._cut_numbers(scores)
        values = torch.cat([of_part.cut for of_part in self._sums[member]], 1)[:, torch.from_numpy(order)].T

        def items(low: int, high: int) -> tuple[IntArray, torch.Tensor | None]:
            at = slice(*np.searchsorted(numbers, [low, high]).tolist())
            return numbers[at] - low, values[at] if scores.shard.owned else None

        return CutPart(self._nums[member], (int(numbers[0]), int(numbers[-1])), items)

    def _cut_numbers(self, scores: LocalScores) -> tuple[IntArray, IntArray]:
        """Return the numbers of cut blocks of all parts, ascending, and of each its place among them as they lie."""
        numbers = np.concatenate([part.numbers(part.cut) for part in self.of(scores)])
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order

    def count_gone(self, num_gone: torch.Tensor) -> None:
        """Add the number of blocks that are gone, by member."""
        whole = [(member, part) for member, parts in self._whole.items() for part, _ in parts]
        for member, scores in [*whole, *((member, scores) for member, (scores, _) in self._homes.items())]:
            if scores.shard.owned and scores.gone is not None:
                num_gone[member] += torch.count_nonzero(scores.gone == 0)

    def as_elements(self) -> Ranked:
        """Return what competes: all whole blocks of this rank, and the cut ones whose home it is."""
        members = [
            dataclasses.replace(member, global_shape=(num,), dtype="torch.int64")
            for member, num in zip(self._ranked.roster.members, self._nums, strict=True)
        ]

        def make_scores() -> list[LocalScores]:
            whole = [part for parts in self._whole.values() for part, _ in parts]
            return [*whole, *(scores for scores, _ in self._homes.values())]

        roster = dataclasses.replace(self._ranked.roster, members=tuple(members))
        return dataclasses.replace(
            self._ranked, roster=roster, score=_BlockSum(), make_scores=make_scores, checks=False, regrows=False
        )

    def decide_cut(self, choice: Choice) -> dict[int, list[BoolArray]]:
        """Return what stays of the cut blocks that ranks told this one of."""
        masks, _ = choice.write_masks([scores for scores, _ in self._homes.values()])
        stays = dict(zip(self._homes, (mask.numpy() for mask in masks), strict=True))
        return {member: [stays[member][part] for part in parts] for member, (_, parts) in self._homes.items()}

    def stays(
        self, choice: Choice, answers: Mapping[int, Sequence[Answer]], device: torch.device
    ) -> dict[int, list[torch.Tensor]]:
        """Return by member which blocks of each part stay, on ``device``, of the shards that lie there."""
        here = {member: scores for member, scores in self.scores.items() if scores.device == device}
        found = {}
        masks, _ = choice.write_masks([whole for member in here for whole, _ in self._whole[member]])
        whole = iter(masks)
        for member, scores in here.items():
            stays = [np.empty(part.shape, dtype=np.bool_) for part in self.of(scores)]
            for of_part, (_, places) in zip(stays, self._whole[member], strict=True):
                of_part.reshape(-1)[places] = next(whole).view(-1).numpy()
            if member in answers:
                self._take_over(scores, answers[member], stays)
            found[member] = [*map(torch.from_numpy, stays)]
        there = iter(sent_together([part for parts in found.values() for part in parts], device))
        return {member: [next(there) for _ in parts] for member, parts in found.items()}

    def _take_over(self, scores: LocalScores, answers: Sequence[Answer], stays: Sequence[BoolArray]) -> None:
        """Write what became of cut blocks into what ``stays`` of each part."""
        numbers, order = self._cut_numbers(scores)
        of_cut = np.empty(len(numbers), dtype=np.bool_)
        for low, high, bits in answers:
            at = slice(*np.searchsorted(numbers, [low, high]).tolist())
            of_cut[order[at]] = np.unpackbits(bits, count=at.stop - at.start).view(np.bool_)
        start = 0
        for part, of_part in zip(self.of(scores), stays, strict=True):
            of_part.reshape(-1)[part.cut] = of_cut[start : start + part.num_cut]
            start += part.num_cut
