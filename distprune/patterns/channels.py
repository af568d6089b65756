"""Channels that compete with each other: slices along one dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from typing_extensions import override

from distprune.patterns.base import Pattern, Scope, Shares, check_share
from distprune.patterns.inquiry import home_of
from distprune.patterns.unit_lines import UnitLines
from distprune.patterns.units import UnitPattern
from distprune.shards.geometry import Geometry, indices_of
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import Matrix


@final
@dataclass(frozen=True)
class Channels(UnitPattern):
    """The lowest ``sparsity`` (a fraction, or a number) of the channels along ``dim``: slices of one index each.

    >>> layer = torch.nn.Linear(8, 4)
    >>> report = prune_model(layer, pattern=Channels(1, dim=0))  # one channel; Channels(0.25, dim=0): a quarter of them
    >>> report.num_pruned
    8

    The score of a channel is the sum over its elements, or their largest or smallest, as the score says. The channels
    of each parameter compete (``scope="tensor"``), or those of all (``"global"``). A channel is gone if all its
    elements are.

    Raises:
        TypeError: ``dim`` is not an int, or ``sparsity`` not a number.
        ValueError: ``sparsity`` is out of range.
    """

    needs_matrix = False
    what = " (channels)"

    sparsity: Shares
    dim: int
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"dim must be an int, not {self.dim!r}")
        check_share(self.sparsity, scope=self.scope)

    @override
    def __str__(self) -> str:
        return f"channels:{self.dim}"

    @override
    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        return Channels(share, self.dim), Channels(0, self.dim)

    @override
    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) <= 1:
            raise ValueError(
                "Structured pruning can only be applied to multidimensional tensors. "
                f"Found tensor of shape {tuple(shape)} with {len(shape)} dims"
            )
        if not -len(shape) <= self.dim < len(shape):
            raise IndexError(f"Invalid index {self.dim} for tensor of size {tuple(shape)}")

    @override
    def num_units(self, shape: Sequence[int]) -> int:
        return shape[self.dim]

    @override
    def lines_of(self, shard: LocalShard, size: int) -> UnitLines:
        shape, geometry, first = shard.shape, shard.geometry, None
        if len(geometry.global_shape) < len(shape):  # flattened
            geometry, first = Geometry.whole(shape), 0
        ids, unit = np.unique(indices_of(geometry.dim_runs[self.dim]).numpy(), return_inverse=True)
        channels = torch.from_numpy(unit)
        later = self.dim % len(shape) + 1
        before, after = math.prod(geometry.local_shape[: later - 1]), math.prod(geometry.local_shape[later:])
        if after == 1:  # a line is along the dim
            lines = channels.new_zeros(before), channels[None], first
        else:
            lines = channels, channels.new_zeros(()).expand(before, after), first
        num_elements = np.full(len(ids), before * after) if first is None else None
        num = shape[self.dim]
        return UnitLines(
            (shard.geometry, shard.local.device),
            ids,
            lines,
            size,
            num_elements,
            lambda which, num_ranks: home_of(which, 0, num, num_ranks),
        )

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, 1  # the score of a channel is put together from all ranks, wherever it is cut
