"""Groups and rows, each decided by itself, wherever shard edges cut them."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version
from typing_extensions import override

from distprune.collectives.agree import sum_together
from distprune.kernels.available import has_kernels
from distprune.kernels.table import Piece
from distprune.kernels.within import MOST_IN_ROW, Units, Within
from distprune.patterns.base import Choice, Pattern, Ranked, check_share, shares_of
from distprune.patterns.census import take_census
from distprune.patterns.cut_bands import Answers, CutBands, CutPart, unpacked
from distprune.patterns.local_units import IntArray, RowUnits
from distprune.patterns.on_gpu import keys_of_weights, pieces
from distprune.scores.base import LocalScores
from distprune.selection.highest import keep_highest_per_row
from distprune.selection.order import Order
from distprune.shards.device import batches, chunk_size, fetched, on_host, sent
from distprune.shards.matrix import Matrix

BoolArray = npt.NDArray[np.bool_]


class WithinRows(Pattern):
    """Units of some inputs of one row, each decided by itself. What is gone is pruned first."""

    is_by_row = True

    @abstractmethod
    def kernel(self, matrix: Matrix) -> Units | None:
        """Return how kernels decide the units of ``matrix``; ``None``: they do not."""

    def keep_left(self, keys: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return what stays of ``keys`` (rows, inputs), bool; shares are of what is not ``gone``."""
        return self.keep(keys)

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census; no other where all units are whole on their ranks, but
        one of 16 bytes on GPUs, and one of 8 where kernels write zeros.

        Otherwise three (see ``CutBands``) for every parameter with cut units, or for small ones of 8 MiB a rank. A rank
        sends its own elements of cut units, at most once, to ranks that hold parts of the same parameter.
        """
        units = _UnitRules(ranked, self)
        if ranked.checks:
            _, num_bytes = take_census(ranked, num_cut=units.num_cut_bytes)
            for members in CutBands.batches(ranked.roster, num_bytes):
                units.exchange(members)
        in_place, decide = units if ranked.on_gpu and ranked.score.kernel is not None else None, units.decide
        return Choice([*[None] * len(ranked.numels)], lambda each, out: decide([each], [out])[0], decide, in_place)


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
        if any(isinstance(each, Integral) for each in shares_of(self.sparsity)):
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
    def kernel(self, matrix: Matrix) -> Units | None:
        fits = matrix.num_in <= MOST_IN_ROW
        return ("rows", max(matrix.num_in, 1), round(self._share * matrix.num_in)) if fits else None

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, max(matrix.num_in, 1)

    @override
    def keep_left(self, keys: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
        num_gone, share = gone.sum(1), float(self._share)
        wanted = (share * (keys.shape[1] - num_gone).to(torch.float64)).round_()  # half to even, as round()
        return keep_highest_per_row(keys, num_gone + wanted.to(torch.int64))

    @override
    def keep(self, scores: torch.Tensor) -> torch.Tensor:
        return keep_highest_per_row(scores, round(self._share * scores.shape[1]))


class _UnitRules:
    """How the units of all members are decided, with what the homes of cut ones have answered."""

    def __init__(self, ranked: Ranked, pattern: WithinRows) -> None:
        self._ranked, self._pattern, self._made = ranked, pattern, cache(RowUnits)
        names = [member.name for member in ranked.roster.members]
        # Both raise alike on all ranks.
        self._rules = {name: (pattern.of(name), ranked.order([i])) for i, name in enumerate(names)}
        self._answers: dict[int, Answers] = {}  # by member

    def _length(self, scores: LocalScores) -> int:
        return self._pattern.unit(scores.shard.as_matrix())[1]

    def of(self, scores: LocalScores) -> RowUnits:
        """Return the units of one of this rank's shards, or of a piece of one."""
        return self._made(scores.shard.geometry, scores.shard.as_matrix(), self._length(scores))

    def num_cut_bytes(self, scores: LocalScores) -> int:
        """Return how many bytes the keys of cut units have."""
        return self.of(scores).num_cut * self._rules[scores.shard.name][1].key_dtype.itemsize

    def exchange(self, members: Sequence[int]) -> None:
        """Have cut units of some parameters decided at their homes. Every rank must call it."""
        cut = CutBands(self._ranked.comm, self._ranked.roster)
        cut.bring(members, self._cut_part)
        self._answers |= cut.back(partial(self._decide_told, cut))

    def _cut_part(self, member: int) -> CutPart | None:
        scores = self._ranked.local.get(member)
        if scores is None or not (units := self.of(scores)).num_cut:
            return None
        numbers, at = units.cut(scores.device)
        keys = self._keys(scores, at) if scores.shard.owned else None
        matrix = scores.shard.as_matrix()
        return CutPart(matrix.num_rows, matrix.num_in, numbers, keys)

    def _decide_told(self, cut: CutBands) -> list[BoolArray]:
        """Return what stays of each that ranks told, which are all parts of some cut units. Local."""
        told, of_member, answers = cut.told(), defaultdict[int, list[int]](list), dict[int, BoolArray]()
        for i, (member, *_) in enumerate(told):
            of_member[member].append(i)
        for member, which in of_member.items():
            scores = self._ranked.local[member]
            name, length = scores.shard.name, self._length(scores)
            pattern, order = self._rules[name]
            parts = [np.unique(told[i][1] // length, return_counts=True) for i in which]
            units = np.unique(np.concatenate([part for part, _ in parts]))
            keys = np.zeros((len(units), length), f"i{order.key_dtype.itemsize}")
            num_told, places = np.zeros(len(units), np.int64), dict[int, IntArray]()
            for i, (part, nums) in zip(which, parts, strict=True):
                _, numbers, values = told[i]
                rows = np.searchsorted(units, part)
                places[i] = numbers + np.repeat((rows - part) * length, nums)
                if values is not None:
                    keys.reshape(-1)[places[i]] = values.view(keys.dtype)[: len(numbers)]
                    num_told[rows] += nums
            if (num_told != length).any():
                raise ValueError(f"ranks do not hold all of the groups or rows of {name!r} that they hold parts of")
            stays = self._keep(pattern, order, torch.from_numpy(keys)).numpy().reshape(-1)
            answers |= {i: stays[place] for i, place in places.items()}
        return [answers[i] for i in range(len(told))]

    def _keys(self, scores: LocalScores, at: slice | torch.Tensor) -> torch.Tensor:
        """Return the keys ``at``; where weights regrow, the bits of keys of what is gone are inverted."""
        keys = scores.keys_at(self._rules[scores.shard.name][1], at)
        if self._ranked.regrows and (gone := scores.is_gone(at)) is not None:
            return torch.where(gone, ~keys, keys)
        return keys

    def _keep(self, pattern: WithinRows, order: Order, keys: torch.Tensor) -> torch.Tensor:
        """Return what stays of whole units, bool, of the shape of ``keys`` (units, inputs)."""
        if self._ranked.regrows:
            return keep_highest_per_row(torch.maximum(keys, ~keys), (keys < 0).sum(1))
        if on_host(keys.device) and keys.numpy().min() >= order.first:  # a quarter of torch's time
            return pattern.keep(keys)
        gone = keys < order.first
        stays = pattern.keep_left(keys, gone) if self._ranked.of_left else pattern.keep(keys)
        return torch.gt(stays, gone, out=stays)

    def decide(self, scores: Sequence[LocalScores], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write what stays of each, and return its counts: see :class:`Choice`. Small ones of a kind go together."""
        (known, launches, totals), kinds = self._on_gpu(scores, outs), defaultdict[Any, list[int]](list)
        for launch in launches:
            launch.write()
        counts = dict(zip(known, totals, strict=True))
        for i, each in enumerate(scores):
            if i not in counts:
                kinds[(*self._rules[each.shard.name], self._length(each), each.device)].append(i)
        for (pattern, order, length, device), members in kinds.items():
            zeros = torch.zeros((len(members), 3), dtype=torch.int64, device=device)
            counts |= zip(members, zeros.unbind(), strict=True)  # in its memory
            table: Any = zeros.numpy() if on_host(device) else zeros
            pieces = (
                ((i, row, at), num) for row, i in enumerate(members) for at, num in self.of(scores[i]).whole(device)
            )
            for batch in batches(pieces, chunk_size(device) if on_host(device) else 1):
                parts = [self._keys(scores[i], at) for i, _, at in batch]
                keys = parts[0] if len(parts) == 1 else torch.cat(parts)
                stays = self._keep(pattern, order, keys.view(-1, length)).view(-1)
                for (i, _, at), part in zip(batch, torch.split(stays, [*map(len, parts)]), strict=True):
                    outs[i][at] = part
                if not _are_ordinary(order, keys):
                    for (_, row, _), part in zip(batch, parts, strict=True):
                        self._count(order, part, table[row])
            for row, i in enumerate(members):
                if (answers := self._answers.get(self._ranked.index[scores[i].shard.name])) is not None:
                    _, at = self.of(scores[i]).cut(device)
                    outs[i][at] = sent(torch.from_numpy(unpacked(answers)), device)
                    self._count(order, self._keys(scores[i], at), table[row])
                table[row, 0] = len(outs[i]) - _num_true(outs[i])
        return [counts[i] for i in range(len(scores))]

    def _count(self, order: Order, keys: torch.Tensor, counts: Any) -> None:
        """Add how many of ``keys`` are of what is gone, and how many are NaN."""
        keys = torch.maximum(keys, ~keys) if self._ranked.regrows else keys
        counts[1] += _num_true(keys < order.first)
        counts[2] += _num_true(keys > order.last)

    def _on_gpu(
        self, scores: Sequence[LocalScores], outs: Sequence[torch.Tensor | None]
    ) -> tuple[list[int], list[Within], torch.Tensor]:
        """Return the places of those that kernels decide, the launches, and what they count of each.

        Masks are written into ``outs``; where there are none, zeros are written.
        """
        known, has_kernel = dict[int, Units](), self._ranked.score.kernel is not None
        for i, each in enumerate(scores if has_kernel and has_kernels(*(each.device for each in scores)) else ()):
            kernel = self._rules[each.shard.name][0].kernel(each.shard.as_matrix())
            if kernel is not None and self.of(each).is_dense:
                known[i] = kernel
        dense, members = [scores[i] for i in known], dict[Units, list[Piece]]()
        keys = keys_of_weights(self._ranked, dense, [self._rules[each.shard.name][1] for each in dense])
        # Where some are marked, the numbers of rows and groups differ.
        if keys is None or keys.marked in ("masked", "left"):
            return [], [], torch.empty((0, 3), dtype=torch.int64, device="cpu")
        totals = torch.zeros((len(known), 3), dtype=torch.int64, device=dense[0].device)
        for row, (i, units) in enumerate(known.items()):
            members.setdefault(units, []).extend(pieces(scores[i], keys, row, outs[i]))
        return [*known], [Within(parts, units, keys, totals) for units, parts in members.items()], totals

    def zero(self) -> bool:
        """Write zeros where kernels decide all units of all ranks: a round of 16 bytes, and then one of 8.

        Weights are read once before they are written to: if one is NaN, on any rank, nothing is.
        """
        comm, scores, kinds = self._ranked.comm, self._ranked.scores, list[Within]()
        num_nans = torch.ones(1, dtype=torch.int64, device=scores[0].device)

        def look(num_others: torch.Tensor) -> None:
            places, kinds[:], self._totals = self._on_gpu(scores, [None] * len(scores))
            num_others[0] = len(places) < len(scores)
            for kind in kinds:
                kind.count_nans()
                if comm.size > 1:  # what fails, fails here: it is compiled, and writes nothing yet
                    kind.write(num_nans)

        if sum_together(comm, (1,), look)[0]:
            return False
        torch.sum(self._totals[:, 2:], 0, out=num_nans)
        if comm.size > 1:
            comm.reduce_(num_nans)
        for kind in kinds:
            kind.write(num_nans)
        increment_version([each.shard.local for each in scores])  # no kernel does
        return True

    def counts(self) -> torch.Tensor:
        """Return the counts of each shard that was written to. Local, one wait."""
        return fetched([self._totals])[0]


def _num_true(flags: torch.Tensor) -> Any:
    """Return how many of ``flags`` are True, without waiting for a device."""
    return np.count_nonzero(flags.numpy()) if on_host(flags.device) else torch.count_nonzero(flags)


def _are_ordinary(order: Order, keys: torch.Tensor) -> bool:
    """Return whether none of ``keys`` is known to be of what is gone, or NaN. It does not wait for a device."""
    return on_host(keys.device) and bool(keys.numpy().min() >= order.first and keys.numpy().max() <= order.last)
