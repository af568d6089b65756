"""Groups and rows, each decided by itself, wherever shard edges cut them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.kernels.available import has_kernels
from distprune.patterns.base import Choice, Pattern, Ranked, check_share, shares_of
from distprune.patterns.census import take_census
from distprune.patterns.cut_bands import Answer, CutBands, CutPart, Told
from distprune.patterns.local_units import IntArray, LocalUnits
from distprune.patterns.on_gpu import keys_of_weights, write_masks
from distprune.scores.base import LocalScores
from distprune.selection.highest import keep_highest_per_row
from distprune.selection.host import joined_keys
from distprune.selection.order import Order
from distprune.shards.device import SMALL, batches, count_true, on_host, sent
from distprune.shards.matrix import Matrix

BoolArray = npt.NDArray[np.bool_]


class WithinRows(Pattern):
    """Units of some inputs of one row, each decided by itself. What is gone is pruned first."""

    is_by_row = True

    @abstractmethod
    def kernel(self, matrix: Matrix) -> tuple[str, int, int] | None:
        """Return what decides the units of ``matrix`` on a GPU, as :func:`distprune.patterns.on_gpu.write_masks`."""

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
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, self.unit_length(matrix)

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census; no other where all units are whole on their ranks.

        Otherwise three (see ``CutBands``) for every parameter with cut units, or for small ones of 8 MiB a rank. A rank
        sends its own elements of cut units, at most once, to ranks that hold parts of the same parameter.
        """
        own = [self.of(member.name) for member in ranked.roster.members]  # raises alike on all ranks
        rows = [_UnitRule(ranked, pattern, ranked.order([i])) for i, pattern in enumerate(own)]  # so does this
        units = cache(LocalUnits.of)  # of equal shapes alike
        answers: dict[int, list[Answer]] = {}

        def no_counts(scores: LocalScores) -> torch.Tensor:
            return torch.zeros(3, dtype=torch.int64, device=scores.device)

        def units_of(scores: LocalScores) -> LocalUnits:
            matrix = scores.shard.as_matrix()
            return units(scores.shard.geometry, matrix, self.unit_length(matrix))

        def part_of(member: int) -> CutPart | None:
            scores = held.get(member)
            if scores is None or not (there := units_of(scores)).num_cut:
                return None

            def items(low: int, high: int) -> tuple[IntArray, torch.Tensor | None]:
                numbers, at = there.cut_between(low, high, scores.device)
                return numbers, rows[member].keys(scores, at, no_counts(scores)) if scores.shard.owned else None

            return CutPart(scores.shard.as_matrix().num_rows, there.rows, items)

        def decided(cut: CutBands) -> dict[int, list[BoolArray]]:
            told = cut.told()
            lengths = {member: self.unit_length(held[member].shard.as_matrix()) for member in told}
            return {
                member: rows[member].decide_told(held[member].shard.name, lengths[member], told[member])
                for member in told
            }

        if ranked.checks:
            _, num_cut = take_census(ranked, num_cut=lambda scores: units_of(scores).num_cut)
            num_bytes = [num * each.order.key_dtype.itemsize for num, each in zip(num_cut, rows, strict=True)]
            held = {ranked.index[scores.shard.name]: scores for scores in ranked.scores} if any(num_cut) else {}
            for members in CutBands.batches(ranked.roster, num_bytes):
                cut = CutBands(ranked.comm, ranked.roster)
                cut.bring(members, part_of)
                answers.update(cut.back(partial(decided, cut)))

        def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
            member, there = ranked.index[scores.shard.name], units_of(scores)
            counts, memory = no_counts(scores), None
            for at in there.chunks(scores.device):
                keys = memory = rows[member].keys(scores, at, counts, memory)
                keys = keys.view(-1, self.unit_length(there.matrix))
                if isinstance(at, slice):
                    rows[member].keep(keys, out[at].view(keys.shape))
                else:
                    out[at] = rows[member].keep(keys).view(-1)
            for low, high, bits in answers.get(member, ()):
                numbers, at = there.cut_between(low, high, scores.device)
                stays = np.unpackbits(bits, count=len(numbers)).view(np.bool_)
                out[at] = sent(torch.from_numpy(stays), scores.device)
                rows[member].keys(scores, at, counts)
            counts[0] = len(out) - count_true(out)
            return counts

        def decide_small(
            scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]
        ) -> Iterator[tuple[int, torch.Tensor]]:
            """Yield the places of small shards, those of one kind decided together, and what ``decide`` returns."""
            kinds: dict[tuple[WithinRows, Order, int], list[int]] = {}
            for i, each in enumerate(scores):
                member, there = ranked.index[each.shard.name], units_of(each)
                is_small = on_host(each.device) and len(outs[i]) <= SMALL
                if is_small and there.is_dense and not ranked.regrows:
                    kind = own[member], rows[member].order, self.unit_length(there.matrix)
                    kinds.setdefault(kind, []).append(i)
            for (pattern, order, length), places in kinds.items():
                for which in batches(places, [len(outs[i]) for i in places]):
                    numels = [len(outs[i]) for i in which]
                    keys = np.empty(sum(numels), f"i{order.key_dtype.itemsize}")
                    joined_keys(order, [scores[i] for i in which], numels, keys)
                    rule = _UnitRule(ranked, pattern, order)
                    stays = rule.keep(torch.from_numpy(keys).view(-1, length)).numpy().reshape(-1)
                    firsts, counts = np.cumsum([0, *numels[:-1]]), np.zeros((3, len(which)), np.int64)
                    for row, flags in enumerate((~stays, keys < order.first, keys > order.last)):
                        counts[row] = np.add.reduceat(flags, firsts, dtype=np.int64)
                    for i, first, of_shard in zip(which, firsts.tolist(), torch.from_numpy(counts.T), strict=True):
                        outs[i].numpy()[:] = stays[first : first + len(outs[i])]
                        yield i, of_shard

        def decide_on_gpu(scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
            """Return, by place, what ``decide`` returns of shards that kernels decide."""
            members = [ranked.index[each.shard.name] for each in scores]
            kinds = [own[i].kernel(each.shard.as_matrix()) for i, each in zip(members, scores, strict=True)]
            plain = [i for i, each in enumerate(scores) if kinds[i] is not None and units_of(each).is_dense]
            keys = keys_of_weights(ranked, [scores[i] for i in plain], [rows[members[i]].order for i in plain])
            if keys is None or keys.marked in ("masked", "left"):  # the numbers of rows and groups differ
                return {}
            units = [kind for kind in (kinds[i] for i in plain) if kind is not None]
            counts = write_masks([scores[i] for i in plain], units, keys, [outs[i] for i in plain])
            return dict(zip(plain, counts, strict=True))

        def decide_all(scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            on_gpu = has_kernels(*(each.device for each in scores))
            found = decide_on_gpu(scores, outs) if on_gpu else dict(decide_small(scores, outs))
            return [found[i] if i in found else decide(scores[i], outs[i]) for i in range(len(scores))]

        return Choice([None] * len(rows), decide, decide_all)


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
    def kernel(self, matrix: Matrix) -> tuple[str, int, int] | None:
        return "rows", max(matrix.num_in, 1), round(self._share * matrix.num_in)

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


@dataclass(frozen=True)
class _UnitRule:
    """How the units of one parameter are decided: by ``pattern``, which is its own."""

    ranked: Ranked
    pattern: WithinRows
    order: Order

    def keys(
        self, scores: LocalScores, at: slice | torch.Tensor, counts: torch.Tensor, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the keys ``at``, in ``memory`` if given; what is gone and NaN is added to ``counts``. Local.

        Where weights regrow, the bits of keys of what is gone are inverted.
        """
        keys = scores.keys_at(self.order, at, memory)
        if (is_gone := self._gone(keys)) is not None:
            counts[1] += count_true(is_gone)
        if not on_host(keys.device) or (len(keys) and keys.numpy().max() > self.order.last):
            counts[2] += count_true(keys > self.order.last)
        if self.ranked.regrows and (gone := scores.is_gone(at)) is not None:
            return torch.where(gone, ~keys, keys)
        return keys

    def _gone(self, keys: torch.Tensor) -> torch.Tensor | None:
        """Return which of ``keys`` are of what is gone; ``None``, on the host, where none is."""
        if on_host(keys.device) and (not keys.numel() or keys.numpy().min() >= self.order.first):
            return None  # a quarter of torch's time
        return keys < self.order.first

    def keep(self, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return what stays of whole units, bool, of the shape of ``keys`` (units, inputs); or in ``out``. Local."""
        if self.ranked.regrows:
            return keep_highest_per_row(torch.maximum(keys, ~keys), (keys < 0).sum(1), out)
        if (is_gone := self._gone(keys)) is None:
            return self.pattern.keep(keys, out)
        stays = self.pattern.keep_left(keys, is_gone, out) if self.ranked.of_left else self.pattern.keep(keys, out)
        return torch.gt(stays, is_gone, out=stays)

    def decide_told(self, name: str, length: int, told: Sequence[Told]) -> list[BoolArray]:
        """Return what stays of each of ``told``, which are all that ranks hold of some cut units of ``name``. Local."""
        firsts = [numbers // length for numbers, _ in told]
        units = np.unique(np.concatenate([unit[np.diff(unit, prepend=-1) > 0] for unit in firsts]))
        keys = np.zeros(len(units) * length, np.dtype(f"i{self.order.key_dtype.itemsize}"))
        num_told, places = np.zeros(len(units), np.int64), []
        for unit, (numbers, values) in zip(firsts, told, strict=True):
            are_all = units[-1] - units[0] == len(units) - 1  # as a rule, of rows
            place = unit - units[0] if are_all else np.searchsorted(units, unit)
            places.append(numbers + (place - unit) * length)
            if values is not None:
                keys[places[-1]] = values.view(keys.dtype)[: len(numbers)]
                num_told += np.bincount(place, minlength=len(units))
        if (num_told != length).any():
            raise ValueError(f"ranks do not hold all of the groups or rows of {name!r} that they hold parts of")
        stays: BoolArray = self.keep(torch.from_numpy(keys).view(-1, length)).numpy().reshape(-1)
        return [stays[place] for place in places]
