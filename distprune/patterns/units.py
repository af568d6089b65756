"""Units of weights, blocks or channels, that compete with each other wherever shard edges cut them.

Nouns: the units of a parameter are numbered; a unit is *cut* on a rank that holds some of it and not all. Its *home*
(see ``inquiry``) puts its score together and enters it into the competition.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives.agree import sum_together
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares
from distprune.patterns.census import take_census
from distprune.patterns.own_units import OwnUnits
from distprune.patterns.unit_lines import BoolArray, UnitLines
from distprune.patterns.unit_sums import VALUES, ShardUnits, agree_on_scales, unit_order
from distprune.patterns.unstructured import choose_elements
from distprune.scores.base import LocalScores, Score
from distprune.selection.order import Order
from distprune.shards.device import sent, sent_together
from distprune.shards.local_shard import LocalShard


class UnitPattern(Pattern):
    """The lowest ``sparsity`` of the units of all parameters (``scope="global"``), or of each (``"tensor"``).

    The score of a unit is the sum over its weights, or their largest or smallest, as the score says. A unit is gone if
    all its weights are.
    """

    sparsity: Shares
    scope: Scope
    what: ClassVar[str]  # in errors: what is counted

    @abstractmethod
    def num_units(self, shape: Sequence[int]) -> int:
        """Return how many units a parameter of the global ``shape`` has, all of one size."""

    @abstractmethod
    def lines_of(self, shard: LocalShard, size: int) -> UnitLines:
        """Return the units, of ``size`` weights each, of one of this rank's shards or of a piece of one.

        They follow from its layout alone.
        """

    @property
    def side(self) -> int | None:
        """Of square units of a matrix, how many rows and inputs they have. ``None``: units are others."""
        return None

    def numbers_weights(self, shard: LocalShard) -> bool:  # noqa: ARG002
        """Return whether units of one weight each are numbered as the weights of ``shard`` are."""
        return True

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, one for the grid, and those of ``select_lowest``.

        The grid takes 8 bytes a parameter; random scores need none. One more round counts the units that are left, if
        shares are of what is left and something is gone. Three more where ranks hold parts of units: sizes; 32 bytes
        for each cut unit and 8 for each home; and one byte a unit back. Units of one weight compete as weights do: then
        there is no grid.

        Temporaries stay under 64 MiB. Of a shard with many blocks sums are made again when they are read: to choose
        once, and once more to decide.
        """
        comm, score, members = ranked.comm, ranked.score, ranked.roster.members
        ranked.order(range(len(members)))  # raises alike on all ranks
        own = OwnUnits(ranked, self.scope, self.num_units, self.lines_of, self.side)
        of_one_weight = {*own.sizes} == {1} and not score.descending
        gone_before, num_cut = take_census(
            ranked,
            counts_gone=ranked.of_left,
            num_cut=lambda each: not self.numbers_weights(each.shard) if of_one_weight else own.num_cut(each),
        )
        if of_one_weight and not any(num_cut):
            return choose_elements(ranked, self.sparsity, self.scope, gone_before, self.what)
        if of_one_weight:
            num_cut = []  # none is
        if not score.scores_units:
            own.scales = agree_on_scales(ranked, own.sizes, lambda: own.addends, together=self.scope == "global")
        if any(num_cut):
            own.ask()
        num_gone = [0] * len(members)
        if ranked.of_left and any(gone_before):
            num_left = sum_together(comm, (len(members),), own.count_left).tolist()
            num_gone = [num - left for num, left in zip(own.numels, num_left, strict=True)]

        order = unit_order(score)
        selection, keys = own.competing.select(
            self.sparsity,
            num_gone,
            lambda _: order,
            lambda: [*own.entries, *own.large_entries()],
            self.what,
        )
        scales: Sequence[int | None] = own.scales or [None] * len(members)
        thresholds = [_threshold(key, scale, score, order) for key, scale in zip(keys, scales, strict=True)]
        stays = cache(lambda: own.stays(selection))
        answered: Callable[[], Sequence[BoolArray]] = list
        if any(num_cut):
            answered = own.inquiry.answer(lambda: own.answers(stays()))
        of_units = cache(lambda: own.joined(stays(), answered()))
        of_cut = cache(lambda: own.joined_cut(answered()))

        def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
            if own.is_large(scores):
                return own.decide_large(scores, out, selection, of_cut)
            lines, (ids, keep) = own.lines_of(scores), of_units()[ranked.index[scores.shard.name]]
            there = torch.from_numpy(keep[np.searchsorted(ids, lines.ids)])
            return ShardUnits([scores], lines).decide(sent(there, scores.device), [out])[0]

        def decide_all(scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            out_of = {id(each): out for each, out in zip(scores, outs, strict=True)}
            found: dict[int, torch.Tensor] = {}
            of_device: dict[torch.device, list[ShardUnits]] = {}
            for part in own.parts:
                if all(id(each) in out_of for each in part.scores):
                    of_device.setdefault(part.scores[0].device, []).append(part)
            for device, parts in of_device.items():
                keeps = [
                    np.stack([of_units()[ranked.index[each.shard.name]][1] for each in part.scores]) for part in parts
                ]
                for part, keep in zip(parts, sent_together([*map(torch.from_numpy, keeps)], device), strict=True):
                    counts = part.decide(keep, [out_of[id(each)] for each in part.scores])
                    found.update(zip(map(id, part.scores), counts, strict=True))
            return [found[id(e)] if id(e) in found else decide(e, out) for e, out in zip(scores, outs, strict=True)]

        return Choice(thresholds, decide, decide_all)


def _threshold(key: float | int | None, scale: int | None, score: Score, order: Order) -> float | int | None:
    """Return the score for which a key stands. A random key stands for itself."""
    if key is None or scale is None:
        return key
    if score.combined_by != "sum":
        return VALUES.values([int(key)])[0]
    if key in (order.first, order.last):
        return math.copysign(math.inf, key)
    return math.ldexp(int(key), -scale)
