"""A tensor in tiles that lie in several places of memory, as one tensor that is read a part at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from typing_extensions import override

Tile = tuple[tuple[int, ...], torch.Tensor]  # where it begins in the whole, and its values, of as many dims

_aten: Any = torch.ops.aten


class Tiled(torch.Tensor):
    """The tensor of ``shape`` that ``tiles`` cover, which hold each element once.

    It can be read by stretches of its flat view and by ``torch.take``, which return copies, and by nothing else. It is
    read as a matrix, whose columns are the last dim.
    """

    _tiles: list[tuple[int, int, torch.Tensor]]  # first row, first column and values (2D), by rows
    _num_columns: int
    _height: int  # of the highest tile

    @staticmethod
    def __new__(cls, shape: Sequence[int], tiles: Sequence[Tile]) -> Tiled:
        """Return the tensor of ``tiles``, whose memory it shares."""
        made: Tiled = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=tiles[0][1].dtype)
        found = []
        for start, tile in tiles:
            for at in itertools.product(*map(range, tile.shape[:-2])):
                row = 0
                for size, first, index in zip(shape[:-1], start[:-1], (*at, 0), strict=False):
                    row = row * size + first + index
                found.append((row, start[-1], tile[at] if tile.ndim > 1 else tile[None]))
        made._tiles = sorted(found, key=itemgetter(0))
        made._num_columns, made._height = shape[-1], max(len(tile) for _, _, tile in found)
        return made

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch has it as a method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensor, *rest = args
        if func is _aten.view.default and rest == [[-1]]:
            flat = torch.Tensor._make_wrapper_subclass(cls, (tensor.numel(),), dtype=tensor.dtype)
            vars(flat).update(vars(tensor))
            return flat
        if func is _aten.alias.default and tensor.ndim == 1:
            return tensor._read(0, tensor.numel())
        if func is _aten.slice.Tensor and tensor.ndim == 1 and len(rest) == 3:
            return tensor._read(rest[1], min(rest[2], tensor.numel()))
        if func is _aten.take.default:
            return tensor._taken(rest[0])
        raise NotImplementedError(f"{func} of a tensor in tiles")

    def _read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop``."""
        first, end = start // self._num_columns, -(-stop // self._num_columns)
        rows = torch.empty(max(end - first, 0), self._num_columns, dtype=self.dtype, device="cpu")
        after = bisect.bisect_right(self._tiles, first - self._height, key=itemgetter(0))
        for row, column, tile in self._tiles[after : bisect.bisect_left(self._tiles, end, key=itemgetter(0))]:
            low, high = max(first, row), min(end, row + len(tile))
            if low < high:
                rows[low - first : high - first, column : column + tile.shape[1]] = tile[low - row : high - row]
        return rows.view(-1)[start - first * self._num_columns : stop - first * self._num_columns]

    def _taken(self, offsets: torch.Tensor) -> torch.Tensor:
        values = torch.empty(len(offsets), dtype=self.dtype, device="cpu")
        rows, order = (offsets // self._num_columns).sort()
        columns = offsets[order] % self._num_columns
        ends = [(row, row + len(tile)) for row, _, tile in self._tiles]
        bounds = torch.searchsorted(rows, torch.tensor(ends, dtype=torch.int64, device="cpu"))
        for (row, column, tile), (low, high) in zip(self._tiles, bounds.tolist(), strict=True):
            is_here = (columns[low:high] >= column) & (columns[low:high] < column + tile.shape[1])
            at = rows[low:high][is_here] - row, columns[low:high][is_here] - column
            values[order[low:high][is_here]] = tile[at]
        return values
