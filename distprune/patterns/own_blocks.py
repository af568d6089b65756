"""The blocks of which a rank holds a part: they compete as elements of a coarser matrix.

A block that shard edges cut is put together at its home, which enters it into the competition (see ``cut_bands``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial

import numpy as np
import numpy.typing as npt
import torch

from distprune.patterns.addends import Grid, ShardAddends, as_elements, competing, empty_table, keys_and_left
from distprune.patterns.base import Choice, Ranked
from distprune.patterns.cut_bands import Answer, CutBands, CutPart
from distprune.patterns.local_blocks import LocalBlocks
from distprune.scores.base import LocalScores
from distprune.shards.device import fetched, sent, sent_together
from distprune.shards.geometry import Geometry, runs_of

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class OwnBlocks:
    """The blocks of which this rank holds a part, and the cut ones whose home it is. To be used within rounds."""

    def __init__(self, ranked: Ranked, size: int) -> None:
        self._ranked, self._size, self._made = ranked, size, cache(LocalBlocks.of)
        self.cut = CutBands(ranked.comm, ranked.roster)
        self.grid: Grid | None = None
        self._nums = [numel // size**2 for numel in ranked.numels]

    def of(self, scores: LocalScores) -> LocalBlocks:
        """Return the blocks of one of this rank's shards, or of a piece of one."""
        return self._made(scores.shard.geometry, scores.shard.as_matrix(), self._size)

    @cached_property
    def scores(self) -> dict[int, LocalScores]:
        """The scores of this rank's shards, by member."""
        return {self._ranked.index[scores.shard.name]: scores for scores in self._ranked.scores}

    @cached_property
    def addends(self) -> dict[int, ShardAddends]:
        return {member: ShardAddends(scores) for member, scores in self._ranked.owned.items()}

    @cached_property
    def _sums(self) -> dict[int, Tensors]:
        """By member, the keys of all blocks, which are left, and the table of cut ones."""
        tensors = [tensor for member, scores in self.scores.items() for tensor in self._sums_of(scores, member)]
        there = fetched([tensor.view(-1).view(torch.uint8) for tensor in tensors])  # of one dtype: one wait
        pairs = zip(there, tensors, strict=True)
        here = (copy.clone().view(tensor.dtype).view(tensor.shape) for copy, tensor in pairs)  # aligned for any dtype
        return {member: (next(here), next(here), next(here)) for member in self.scores}

    def _sums_of(self, scores: LocalScores, member: int) -> Tensors:
        blocks, addends, device = self.of(scores), ShardAddends(scores), scores.device
        keys = torch.empty(blocks.shape, dtype=torch.int64, device=device)
        left = torch.empty(blocks.shape, dtype=torch.bool, device=device)
        cut = [empty_table(scores.score, (0,), device)]
        for at, bands in blocks.chunks(device):
            table = empty_table(scores.score, keys[bands].shape, device)
            addends.add(table, at, partial(blocks.added_up, bands), self.grid, member)
            first, last = bands.start * blocks.shape[1], bands.stop * blocks.shape[1]
            places = blocks.cut[slice(*np.searchsorted(blocks.cut, [first, last]).tolist())] - first
            if len(places):
                cut.append(table.flatten(1)[:, sent(torch.from_numpy(places), device)])
            keys[bands], left[bands] = keys_and_left(table, scores.score, self._size**2)
        return keys, left, torch.cat(cut, 1)

    @cached_property
    def _whole(self) -> dict[int, LocalScores]:
        """Whole blocks, by member."""
        found = {}
        for member, (keys, left, _) in self._sums.items():
            geometry, places = self.of(self.scores[member]).whole_places
            keys, left, owned = keys.view(-1)[places], left.view(-1)[places], self.scores[member].shard.owned
            found[member] = competing(self._ranked, member, keys, left, geometry, owned=owned)
        return found

    @cached_property
    def _homes(self) -> dict[int, tuple[LocalScores, list[IntArray]]]:
        """By member, the cut blocks whose home this rank is, and the places among them of what each rank told."""
        found = {}
        for member, told in self.cut.told().items():
            first = self.cut.first_band(member, self._nums[member])
            numbers, places = np.unique(np.concatenate([numbers for numbers, _ in told]), return_inverse=True)
            parts = np.split(places, np.cumsum([len(numbers) for numbers, _ in told])[:-1])
            table = empty_table(self._ranked.score, (len(numbers),))
            for place, (_, values) in zip(parts, told, strict=True):
                if values is not None:
                    table.index_add_(
                        1, torch.from_numpy(place), torch.from_numpy(values.reshape(len(place), -1).T.copy())
                    )
            keys, left = keys_and_left(table, self._ranked.score, self._size**2)
            geometry = Geometry((self._nums[member],), (runs_of(numbers + first),))
            found[member] = competing(self._ranked, member, keys, left, geometry), parts
        return found

    def cut_part(self, member: int) -> CutPart | None:
        """Return what this rank holds of the cut blocks of ``member``."""
        scores = self.scores.get(member)
        if scores is None or not len(self.of(scores).cut):
            return None
        numbers, order = self._cut_numbers(scores)
        values = self._sums[member][2][:, torch.from_numpy(order)].T

        def items(low: int, high: int) -> tuple[IntArray, torch.Tensor | None]:
            at = slice(*np.searchsorted(numbers, [low, high]).tolist())
            return numbers[at] - low, values[at] if scores.shard.owned else None

        return CutPart(self._nums[member], (int(numbers[0]), int(numbers[-1])), items)

    def _cut_numbers(self, scores: LocalScores) -> tuple[IntArray, IntArray]:
        """Return the numbers of cut blocks, ascending, and of each its place among them as they lie."""
        blocks = self.of(scores)
        numbers = blocks.numbers(blocks.cut)
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order

    def count_gone(self, num_gone: torch.Tensor) -> None:
        """Add the number of blocks that are gone, by member."""
        homes = [(member, scores) for member, (scores, _) in self._homes.items()]
        for member, scores in [*self._whole.items(), *homes]:
            if scores.shard.owned and scores.gone is not None:
                num_gone[member] += torch.count_nonzero(~scores.gone)

    def as_elements(self) -> Ranked:
        """Return what competes: all whole blocks of this rank, and the cut ones whose home it is."""
        return as_elements(
            self._ranked, self._nums, lambda: [*self._whole.values(), *(scores for scores, _ in self._homes.values())]
        )

    def decide_cut(self, choice: Choice) -> dict[int, list[BoolArray]]:
        """Return what stays of the cut blocks that ranks told this one of."""
        masks, _ = choice.write_masks([scores for scores, _ in self._homes.values()])
        stays = dict(zip(self._homes, (mask.numpy() for mask in masks), strict=True))
        return {member: [stays[member][part] for part in parts] for member, (_, parts) in self._homes.items()}

    def stays(
        self, choice: Choice, answers: Mapping[int, Sequence[Answer]], device: torch.device
    ) -> dict[int, torch.Tensor]:
        """Return by member which blocks stay, (line bands, column bands), of the shards on ``device``, and there."""
        here = [member for member, scores in self.scores.items() if scores.device == device]
        masks, _ = choice.write_masks([self._whole[member] for member in here])
        found = []
        for member, mask in zip(here, masks, strict=True):
            blocks = self.of(self.scores[member])
            stays = np.empty(blocks.shape, dtype=np.bool_).reshape(-1)
            stays[blocks.whole_places[1]] = mask.view(-1).numpy()
            numbers, order = self._cut_numbers(self.scores[member])
            for low, high, bits in answers.get(member, ()):
                at = slice(*np.searchsorted(numbers, [low, high]).tolist())
                stays[blocks.cut[order[at]]] = np.unpackbits(bits, count=at.stop - at.start).view(np.bool_)
            found.append(torch.from_numpy(stays.reshape(blocks.shape)))
        return dict(zip(here, sent_together(found, device), strict=True))
