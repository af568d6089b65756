"""Blocks of weights that compete with each other: ``size`` x ``size`` of a matrix, numbered row-major."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from typing_extensions import override

from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.inquiry import home_of
from distprune.patterns.unit_lines import UnitLines
from distprune.patterns.units import UnitPattern
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import LocalMatrix, Matrix


@final
@dataclass(frozen=True)
class Block(UnitPattern):
    """The lowest ``sparsity`` (a fraction, or a number) of the blocks of ``size`` x ``size`` weights.

    >>> layer = torch.nn.Linear(4, 4)
    >>> report = prune_model(layer, pattern=Block(2, 0.25))  # or 0.25, pattern="block:2"
    >>> report.num_pruned
    4

    The score of a block is the sum over its weights that are left. The blocks of all parameters compete
    (``scope="global"``), or those of each (``"tensor"``). A block is gone if all its weights are.

    Raises:
        TypeError: ``size`` is not an int, or ``sparsity`` not a number.
        ValueError: ``size`` is less than 1, or ``sparsity`` out of range.
    """

    what = " (blocks)"

    size: int
    sparsity: Shares
    scope: Scope = "global"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int):
            raise TypeError(f"size must be an int, not {self.size!r}")
        if self.size < 1:
            raise ValueError(f"size={self.size} is less than 1; a block has 1 x 1 weights or more")
        check_share(self.sparsity, scope=self.scope)

    @override
    def __str__(self) -> str:
        return f"block:{self.size}"

    @property
    @override
    def width(self) -> int:
        return self.size

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return self.size, self.size

    @override
    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        return Block(self.size, share, "tensor"), Block(self.size, 0, "tensor")

    @override
    def check_fits(self, name: str, matrix: Matrix) -> None:
        if matrix.num_in % self.size or matrix.num_out % self.size:
            raise ValueError(
                f"blocks of {self.size} x {self.size} do not fit {name!r}: its {matrix.num_out} outputs and "
                f"{matrix.num_in} inputs must be multiples of {self.size}"
            )

    @override
    def num_units(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // self.size**2

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """As ``UnitPattern.choose``; of scores that are summed alone."""
        if ranked.score.combined_by != "sum":
            kind = ranked.score.combined_by
            raise NotImplementedError(f"blocks are ranked by sums; {ranked.score!r} takes a {kind}imum")
        return super().choose(ranked)

    @property
    @override
    def side(self) -> int:
        return self.size

    @override
    def numbers_weights(self, shard: LocalShard) -> bool:
        return not shard.as_matrix().transposed

    @override
    def lines_of(self, shard: LocalShard, size: int) -> UnitLines:
        matrix, num_rows = shard.as_matrix(), shard.as_matrix().num_rows
        num_across = max(matrix.num_in // self.size, 1)
        local, first = _lines(shard.geometry, matrix)
        rows, row, num_of_rows = np.unique(local.rows // self.size, return_inverse=True, return_counts=True)
        columns, column, num_of_columns = np.unique(local.columns // self.size, return_inverse=True, return_counts=True)
        of_rows, of_columns = torch.from_numpy(row * len(columns)), torch.from_numpy(column)
        if local.num_local_out is None:
            lines = of_rows, of_columns[None], first
        else:
            lines = of_columns, of_rows.view(-1, local.num_local_out), first
        return UnitLines(
            (shard.geometry, shard.local.device),
            (rows[:, None] * num_across + columns).reshape(-1),
            lines,
            size,
            (num_of_rows[:, None] * num_of_columns).reshape(-1) if first is None else None,
            lambda ids, num_ranks: home_of(ids // num_across * self.size, 0, num_rows, num_ranks),
        )


def _lines(geometry: Geometry, matrix: Matrix) -> tuple[LocalMatrix, int | None]:
    """Return the lines that local elements fill, and ``first`` of :class:`UnitLines`.

    Of a stretch of the flattened parameter: all the rows that it touches, of which it may hold only parts.
    """
    if not geometry.local_numel:
        return LocalMatrix(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), None), None
    if (local := LocalMatrix.of(geometry, matrix)) is not None:
        return local, None
    ends = geometry.flat_indices_at(torch.tensor([0, geometry.local_numel - 1], dtype=torch.int64, device="cpu"))
    if matrix.transposed:
        low, high = (ends // matrix.num_out).tolist()  # lines, of all matrices
        first, last = low // matrix.num_in, high // matrix.num_in
        columns = np.arange(matrix.num_in)
        if first == last:
            columns = columns[low % matrix.num_in : high % matrix.num_in + 1]
        rows = np.arange(first * matrix.num_out, (last + 1) * matrix.num_out)
        return LocalMatrix(rows, columns, matrix.num_out), (first * matrix.num_in + int(columns[0])) * matrix.num_out
    low, high = matrix.place(ends)[0].tolist()
    return LocalMatrix(np.arange(low, high + 1), np.arange(matrix.num_in), None), low * matrix.num_in
