"""What kernels on a GPU choose from: the weights themselves, where a score is one that kernels know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.autograd.graph import increment_version

from distprune.collectives.agree import sum_together, together
from distprune.kernels.available import num_programs
from distprune.kernels.lowest import BLOCK, Keys, Lowest, Mark
from distprune.kernels.table import Piece, Table, pieces_of, tables_of
from distprune.patterns.base import Ranked
from distprune.patterns.census import Competing
from distprune.scores.base import LocalScores
from distprune.selection.order import Order
from distprune.selection.radix import Competition, last_scores
from distprune.shards.device import batches, fetched

_CHUNK = 1 << 22  # elements whose keys are computed at a time: with temporaries, under 64 MiB
_MOST = (1 << 31) - 1
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def keys_of_weights(ranked: Ranked, scores: Sequence[LocalScores], orders: Sequence[Order]) -> Keys | None:
    """Return how kernels make keys of all of ``scores``, which are on one GPU; ``None``: they do not. Local.

    Of scores that kernels do not know they read what was computed, float32, beside the weights.
    """
    name, marks, weights = ranked.score.kernel, {*map(_mark, scores)}, [each.shard.local for each in scores]
    mark, is_known = marks.pop() if len(marks) == 1 else None, name is not None
    if not is_known and mark != "left" and {order.value_dtype for order in orders} == {torch.float32}:
        name = "value" if orders[0].ordered_by == "value" else "gradient"
    if name is None or mark is None:
        return None
    wide = name == "magnitude" and any(w.dtype is not o.value_dtype for w, o in zip(weights, orders, strict=True))
    gone = orders[0].gone if name == "value" else 0 if name == "magnitude" and mark == "zeros" else -1
    keys = Keys(name, gone, orders[0].last, mark, wide, checks_weights=is_known and not ranked.of_left)
    gradients, masks = (
        [tensor for tensor in given if tensor is not None]
        for given in zip(*[_given(each, keys) for each in scores], strict=True)
    )
    are_floats = all(tensor.dtype in _FLOATS for tensor in (*weights, *gradients))
    return keys if are_floats and all(tensor.is_contiguous() for tensor in (*weights, *gradients, *masks)) else None


def _mark(scores: LocalScores) -> Mark | None:
    """Return how kernels know what was pruned before; ``None``: they do not."""
    if scores.regrows:
        return "left" if "left" in scores.evidence else None
    if scores.gone is None:
        return "unmarked"
    return "zeros" if scores.gone is scores.shard.local else "masked" if scores.gone.dtype is torch.bool else None


def _given(scores: LocalScores, keys: Keys) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient, and the mask of what was pruned before, or was not."""
    mask = scores.evidence["left"] if keys.marked == "left" else scores.gone if keys.marked == "masked" else None
    return scores.evidence["gradient"] if scores.score.kernel in ("gradient", "taylor") else None, mask


def pieces(scores: LocalScores, keys: Keys, tensor: int, out: torch.Tensor | None, **place: Any) -> list[Piece]:
    """Return the pieces of one shard: row ``tensor`` of the totals; ``place``: where in its competition."""
    shard, (gradient, mask) = scores.shard, _given(scores, keys)
    seeds = scores.score.seeds(shard.name) if keys.score == "random" else (0, 0)
    whole = Piece(shard.local, tensor, other=gradient, out=out, mask=mask, seeds=seeds, owned=shard.owned, **place)
    return pieces_of(shard.geometry, whole)


def runs_on_gpu(ranked: Ranked, competitions: Sequence[Competition]) -> bool:
    """Return whether kernels choose of what lies on GPUs, on all ranks alike. Local."""
    orders = {competition.order for competition in competitions}
    are_known = len(orders) == 1 or ranked.score.kernel is not None
    return are_known and all(order.key_dtype.itemsize <= 4 for order in orders)


@final
class ElementsOnGpu:
    """The choice of elements that lie on GPUs, one of each rank. Every rank must make one.

    Communicates 16 bytes, 64 more where ranks differ in what kernels can read, and what :meth:`Lowest.find` does.
    ``thresholds``: by member, once it was written.
    """

    def __init__(self, ranked: Ranked, competing: Competing, competitions: Sequence[Competition]) -> None:
        self._ranked, self._competing, self._competitions = ranked, competing, competitions
        self.thresholds: list[float | int | None] = [None] * len(ranked.numels)
        num_others = int(sum_together(ranked.comm, (1,), self._look)[0])
        if 0 < num_others < ranked.comm.size:  # a rank's memory is scattered: keys are computed on all
            with together(ranked.comm):
                self._prepare(None)
        self._lowest.find(lambda: self._tables or self._chunks(ranked.scores, None), may_fail=not self.reads_weights)

    def _look(self, num_others: torch.Tensor) -> None:
        scores = self._ranked.scores
        read = keys_of_weights(self._ranked, scores, [self._order(each) for each in scores])
        self._prepare(read)
        num_others[0] = read is None

    def _prepare(self, read: Keys | None) -> None:
        """Take this rank's sample, by keys that kernels ``read`` or by computed ones. Local."""
        scores, order = self._ranked.scores, self._competitions[0].order
        num_lowest = [each.num_lowest for each in self._competitions]
        num_positions = [each.num_positions for each in self._competitions]
        self.reads_weights = read is not None and self._ranked.score.kernel is not None
        self._keys = read or Keys("keys", order.gone, order.last if order.has_nans else _MOST)
        self._lowest = Lowest(self._ranked.comm, scores[0].device, num_lowest, num_positions, self._keys)
        self._totals = torch.zeros((len(scores), 3), dtype=torch.int64, device=scores[0].device)
        num = 0 if self.reads_weights else min(_CHUNK, sum(each.shard.geometry.local_numel for each in scores))
        self._memory = torch.empty(num, dtype=torch.int32 if read is None else torch.float32, device=scores[0].device)
        self._tables = tables_of(self._pieces(scores, None), BLOCK) if self.reads_weights else []
        self._made: dict[int, list[Table]] = {}  # of what is computed at a time
        self._lowest.sample(self._tables or self._chunks(scores, None), in_place=self.reads_weights)

    def _order(self, scores: LocalScores) -> Order:
        return self._competitions[self._competing.place(scores)[0]].order

    def _pieces(self, scores: Sequence[LocalScores], outs: Sequence[torch.Tensor] | None) -> list[Piece]:
        found: list[Piece] = []
        for i, each in enumerate(scores):
            competition, first = self._competing.place(each)
            out = None if outs is None else outs[i]
            found += pieces(each, self._keys, i, out, competition=competition, zeroth=first)
        return found

    def _chunks(self, scores: Sequence[LocalScores], outs: Sequence[torch.Tensor] | None) -> Iterator[Table]:
        """Yield tables of what is computed, so many elements at a time, in one memory."""
        numels, are_keys = [each.shard.geometry.local_numel for each in scores], self._keys.score == "keys"
        starts = [(i, start) for i, num in enumerate(numels) for start in range(0, num, _CHUNK)]
        items = (((i, start, num := min(_CHUNK, numels[i] - start)), num) for i, start in starts)
        for number, batch in enumerate(batches(items, _CHUNK)):
            end, found = 0, list[Piece]()
            for i, start, num in batch:
                each, at, end = scores[i], slice(start, start + num), end + num
                computed = self._memory[end - num : end]
                computed.copy_(each.keys_at(self._order(each), at) if are_keys else each.values(at).detach())
                if number not in self._made:
                    piece = Piece(computed, i, *self._competing.place(each), owned=each.shard.owned)
                    if not are_keys:
                        given = Piece(each.shard.local, mask=_given(each, self._keys)[1]).cut(at)
                        piece = dataclasses.replace(piece, values=given.values, mask=given.mask, other=computed)
                    piece.out = None if outs is None else outs[i][at]
                    found += pieces_of(each.shard.geometry, piece, start)
            if number not in self._made:
                programs = max(num_programs(self._memory.device) // 8, 1)
                self._made[number] = tables_of(found, BLOCK, programs=programs)
            yield from self._made[number]

    def write_masks(self, scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write what stays of ``scores``, and return the counts of each: pruned, gone before, NaN. Local, one wait."""
        self._totals.zero_()
        self._made = {}
        made = tables_of(self._pieces(scores, outs), BLOCK) if self.reads_weights else self._chunks(scores, outs)
        for table in made:
            self._lowest.write(table, self._totals, writes_mask=True)
        return [*self.counts()[: len(scores)]]

    def zero(self) -> bool:
        """Write zeros into the weights, if none is NaN on any rank. Local, no wait."""
        self._totals.zero_()
        for table in self._tables:
            self._lowest.write(table, self._totals, writes_mask=False)
        increment_version([scores.shard.local for scores in self._ranked.scores])  # no kernel does
        return True

    def counts(self) -> torch.Tensor:
        """Return the counts of what was written last, and note the thresholds. Local, one wait."""
        totals, states = fetched([self._totals, self._lowest.states])
        orders, keys = [competition.order for competition in self._competitions], states[:, 2].tolist()
        are_new = [num > 0 and key != self._keys.gone for num, key in zip(states[:, 0].tolist(), keys, strict=True)]
        self.thresholds[:] = self._competing.by_member(last_scores(orders, keys, are_new))
        return totals
