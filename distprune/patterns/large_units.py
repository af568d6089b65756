"""The blocks of large shards: their sums are not kept, but made again whenever they are read. No communication.

Nouns: a shard is kept as lines of a matrix, or of several. A *band* is the lines, or the columns, that blocks side by
side have here; it is whole, or cut. A *window* is some bands that follow each other, with all of their blocks. An edge
of a flattened parameter (FSDP1) may part a band: such *rims* are windows of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from distprune.patterns.unit_lines import UnitLines
from distprune.patterns.unit_sums import Addends, ShardUnits, UnitKeys
from distprune.scores.base import LocalScores
from distprune.selection.order import Order
from distprune.shards.device import chunk_size, on_host
from distprune.shards.geometry import Geometry, Runs, indices_of, runs_of
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import LocalMatrix

_UNITS = 1 << 17  # of a window, or of one band
_CHUNKS, _SHARE = 4, 2  # of a window: so many chunks on the host, and a half of a device's, since sums take more words


# (tables, numbers on the CPU, of which addends) -> units as they compete, by table
AsKeys = Callable[[torch.Tensor, Callable[[], torch.Tensor], Addends], Sequence[UnitKeys]]


class LargeUnits(Addends):
    """The blocks of ``size`` x ``size`` of a part of a shard, lines of matrices (see :func:`as_kept`).

    The whole ones compete, by their numbers; see ``Keyed``. ``begin``: where the part begins in the shard. ``lines_of``
    returns the lines of a window. ``scales`` returns that of the grid, or nothing where scores are of units.
    """

    def __init__(
        self,
        scores: LocalScores,
        begin: int,
        size: int,
        lines_of: Callable[[LocalShard], UnitLines],
        scales: Callable[[], Sequence[int]],
        as_keys: AsKeys,
    ) -> None:
        super().__init__([scores])
        self.begin, self._size, self._lines_of, self._scales, self._as_keys = begin, size, lines_of, scales, as_keys
        self._held: torch.Tensor | None = None
        geometry, self._is_turned = scores.shard.geometry, scores.shard.as_matrix().transposed
        self._bands = [_Bands(runs, size) for runs in geometry.dim_runs[-2:]]
        self._matrices = indices_of(geometry.dim_runs[0]).tolist() if len(geometry.dim_runs) > 2 else [0]
        nums = [num // size for num in geometry.global_shape[-2:]]
        runs = [runs_of(bands.ids[bands.whole]) for bands in self._bands]
        self._strides = [1, nums[0]] if self._is_turned else [nums[1], 1]  # by dim, of the numbers of blocks
        self._num_in_matrix = nums[0] * nums[1]
        order = (1, 0) if self._is_turned else (0, 1)
        lead = geometry.global_shape[:-2], geometry.dim_runs[:-2]
        self.geometry = Geometry((*lead[0], *(nums[i] for i in order)), (*lead[1], *(runs[i] for i in order)))

    @property
    def addends(self) -> Addends:
        return self

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_cut(self) -> int:
        """How many blocks are cut."""
        lines, columns = self._bands
        num = len(lines.ids) * len(columns.ids) - len(lines.whole) * len(columns.whole)
        return len(self._matrices) * num

    def windows(self) -> Iterator[Window]:
        """Yield windows that are contiguous parts of the shard."""
        bands, (height, width) = self._bands[0], self._first.shard.geometry.local_shape[-2:]
        for i, first in itertools.product(range(len(self._matrices)), range(0, len(bands.ids), step := self._step(0))):
            last = min(first + step, len(bands.ids))
            begin = self.begin + (i * height + bands.starts[first]) * width
            keys = None
            if self._held is not None:
                at = slice(*np.searchsorted(bands.whole, [first, last]).tolist())
                held = self._held.view(len(self._matrices), *self.geometry.local_shape[-2:])[i]
                keys = (held[:, at] if self._is_turned else held[at]).reshape(-1)
            yield Window(begin, self._window(i, 0, first, last), keys)

    def hold(self, order: Order) -> None:
        """Hold the keys of all whole blocks from now on."""
        self._held = self._read(order, slice(0, self.geometry.local_numel))

    def keys(self, order: Order, memory: Any = None) -> Iterator[Any]:  # noqa: ARG002
        numel, step = self.geometry.local_numel, max(1, self._most // self._size**2)
        for start in range(0, numel, step):
            at = slice(start, min(start + step, numel))
            keys = self._read(order, at) if self._held is None else self._held[at]
            yield keys.numpy() if on_host(self.device) else keys

    def _read(self, order: Order, at: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the keys of a range of whole blocks."""
        num, dim = at.stop - at.start, 1 if self._is_turned else 0
        keys = torch.empty(num, dtype=order.key_dtype, device=self.device) if out is None else out[:num]
        whole, in_band, step = self._bands[dim].whole, len(self._bands[1 - dim].whole), self._step(dim)
        place = at.start
        while place < at.stop:
            i, (first, skip) = place // (len(whole) * in_band), divmod(place % (len(whole) * in_band), in_band)
            last = min(first + step, len(whole), first - (place - skip - at.stop) // in_band)
            stop = min(place + (last - first) * in_band - skip, at.stop)
            window = self._window(i, dim, whole[first], whole[last - 1] + 1)
            table = window.table(self._scales())[0, window.lines.whole]
            (own,) = self._as_keys(
                table[None, skip:][:, : stop - place], partial(self.geometry.flat_indices, place, stop), self
            )
            keys[place - at.start : stop - at.start] = own.all_keys(order)
            place = stop
        return keys

    def _step(self, dim: int) -> int:
        """Return how many bands along ``dim`` a window has."""
        across = self._first.shard.geometry.local_shape[-2:][1 - dim]
        return max(1, min(_UNITS // len(self._bands[1 - dim].ids), self._most // (self._size * across)))

    @property
    def _most(self) -> int:
        """How many elements a window has, if it is of several bands."""
        return chunk_size(self.device) * _CHUNKS if on_host(self.device) else chunk_size(self.device) // _SHARE

    def _window(self, i: int, dim: int, first: int, last: int) -> ShardUnits:
        """Return the blocks of the bands ``first`` to ``last`` along ``dim``, of this rank's matrix ``i``."""
        scores, bands = self._first, self._bands[dim]
        geometry, start, stop = scores.shard.geometry, bands.starts[first], bands.starts[last]
        number, place = int(bands.ids[first]), len(geometry.dim_runs) - 2 + dim

        def view(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.narrow(place, start, stop - start)
            return (tensor.narrow(0, i, 1) if place - dim else tensor).contiguous()

        def part(matrix: int, shift: int) -> Geometry:
            runs = [*geometry.dim_runs]
            runs[0] = ((matrix, matrix + 1),) if place - dim else runs[0]
            runs[place] = tuple((low - shift, high - shift) for low, high in bands.runs(start, stop))
            return Geometry(geometry.global_shape, tuple(runs))

        of_window = scores.viewed(part(self._matrices[i], 0), view)
        lines = self._lines_of(of_window.shard.having(geometry=part(0, number * self._size)))  # windows share theirs
        window = ShardUnits([of_window], lines, self._matrices[i] * self._num_in_matrix + number * self._strides[dim])
        window.odd_chunks = self.odd_chunks
        return window


@dataclass(frozen=True)
class Window:
    """The blocks of a contiguous part of a shard, which begins at ``begin`` in it. ``keys``: of the whole ones."""

    begin: int
    units: ShardUnits
    keys: torch.Tensor | None


@dataclass(frozen=True)
class Rim:
    """The blocks of a rim, which begins at ``begin`` in the shard that was given."""

    begin: int
    units: ShardUnits

    @property
    def addends(self) -> Addends:
        return self.units

    @property
    def num_cut(self) -> int:
        return self.units.lines.num_cut

    def windows(self) -> Iterator[Window]:
        yield Window(self.begin, self.units, None)


class _Bands:
    """The bands along one dim, of which a shard holds ``runs``. ``starts``: of each, and the end; ``whole``: which."""

    def __init__(self, runs: Runs, size: int) -> None:
        self._runs = runs
        indices = indices_of(runs).numpy()
        self.ids, first, num = np.unique(indices // size, return_index=True, return_counts=True)
        self.starts: list[int] = [*first.tolist(), len(indices)]
        self.whole = np.flatnonzero(num == size)

    def runs(self, start: int, stop: int) -> Runs:
        """Return the runs from local index ``start`` to ``stop``."""
        passed, found = 0, []
        for low, high in self._runs:
            first, last = max(start - passed, 0), min(stop - passed, high - low)
            if first < last:
                found.append((low + first, low + last))
            passed += high - low
        return tuple(found)


def as_kept(scores: LocalScores, size: int) -> Iterator[tuple[int, LocalScores, bool]]:
    """Yield where each part of ``scores`` begins, its scores, as lines of matrices, and whether it is a rim.

    No block of ``size`` x ``size`` is in two parts. A rim stays a part of the flattened parameter.
    """
    matrix, geometry = scores.shard.as_matrix(), scores.shard.geometry
    num_lines, width = (matrix.num_in, matrix.num_out) if matrix.transposed else (matrix.num_rows, matrix.num_in)
    has_several = matrix.transposed and matrix.num_matrices > 1
    shape = (matrix.num_matrices, num_lines, width) if has_several else (num_lines, width)
    if (local := LocalMatrix.of(geometry, matrix)) is not None:
        dims = [local.rows, local.columns]
        if local.num_local_out is not None:
            dims = [local.columns, local.rows[: local.num_local_out] % matrix.num_out]
        if has_several:
            dims.insert(0, local.rows[:: local.num_local_out] // matrix.num_out)
        whole = Geometry(shape, tuple(map(runs_of, dims)))
        yield 0, scores.viewed(whole, lambda tensor: tensor.reshape(whole.local_shape)), False
        return
    passed, in_band, in_matrix = 0, size * width, num_lines * width
    for low, high in geometry.dim_runs[0]:
        first, last = -(-low // in_band) * in_band, high // in_band * in_band
        edges = {low, high, first, last} if first < last else {low, high}
        if has_several:
            edges |= {*range(-(-first // in_matrix) * in_matrix, last, in_matrix)}
        for start, stop in itertools.pairwise(sorted(edges)):
            part, is_rim = Geometry(geometry.global_shape, (((start, stop),),)), not first <= start < stop <= last
            if not is_rim:
                line = start % in_matrix // width
                runs = ((line, line + (stop - start) // width),), ((0, width),)
                number = start // in_matrix
                part = Geometry(shape, (((number, number + 1),), *runs) if has_several else runs)
            view = partial(_viewed, at=slice(passed + start - low, passed + stop - low), shape=part.local_shape)
            yield passed + start - low, scores.viewed(part, view), is_rim
        passed += high - low


def _viewed(tensor: torch.Tensor, at: slice, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[at].view(shape)
