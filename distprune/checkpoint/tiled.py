"""A tensor in tiles that lie in several places of memory, as one tensor that is read a part at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

__all__ = ["Tile", "Tiled"]

Tile = tuple[tuple[int, ...], torch.Tensor]  # where it begins in the whole, and its values, of as many dims

_aten: Any = torch.ops.aten


class Tiled(torch.Tensor):
    """The tensor of ``shape`` that ``tiles`` cover, which hold each element once.

    It can be read by stretches of its flat view and by ``torch.take``, which return copies, and by nothing else.

    Noun: a *panel* is the matrix at one index of all dims but the last two; a line is a matrix of one row.
    """

    _panels: list[list[Tile]]  # tiles of two dims, by panel
    _panel_shape: tuple[int, int]

    @staticmethod
    def __new__(cls, shape: Sequence[int], tiles: Sequence[Tile]) -> Tiled:
        """Return the tensor of ``tiles``, whose memory it shares."""
        *outer, num_rows, num_columns = shape if len(shape) > 1 else (1, *shape)
        panels: list[list[Tile]] = [[] for _ in range(math.prod(outer))]
        for start, tile in tiles if len(shape) > 1 else [((0, *start), tile[None]) for start, tile in tiles]:
            for at in itertools.product(*map(range, tile.shape[:-2])):
                panel = 0
                for size, first, index in zip(outer, start[:-2], at, strict=True):
                    panel = panel * size + first + index
                panels[panel].append((start[-2:], tile[at]))
        return cls._of(shape, tiles[0][1].dtype, panels, (num_rows, num_columns))

    @classmethod
    def _of(
        cls, shape: Sequence[int], dtype: torch.dtype, panels: list[list[Tile]], panel_shape: tuple[int, int]
    ) -> Tiled:
        made: Tiled = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made._panels, made._panel_shape = panels, panel_shape
        return made

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch has it as a method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensor, *rest = args
        if func is _aten.view.default and rest == [[-1]]:
            return cls._of((tensor.numel(),), tensor.dtype, tensor._panels, tensor._panel_shape)
        if func is _aten.alias.default and tensor.ndim == 1:
            return tensor._read(0, tensor.numel())
        if func is _aten.slice.Tensor and tensor.ndim == 1 and len(rest) == 3:
            return tensor._read(rest[1], min(rest[2], tensor.numel()))
        if func is _aten.take.default:
            return tensor._taken(rest[0])
        raise NotImplementedError(f"{func} of a tensor in tiles")

    def _read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop``."""
        num_rows, num_columns = self._panel_shape
        first, end = start // num_columns, -(-stop // num_columns)
        rows = torch.empty(max(end - first, 0), num_columns, dtype=self.dtype)
        for panel in range(first // num_rows, -(-end // num_rows)):
            for (row, column), tile in self._panels[panel]:
                at = panel * num_rows + row  # among all rows
                low, high = max(first, at), min(end, at + tile.shape[0])
                if low < high:
                    rows[low - first : high - first, column : column + tile.shape[1]] = tile[low - at : high - at]
        return rows.view(-1)[start - first * num_columns : stop - first * num_columns]

    def _taken(self, offsets: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = self._panel_shape
        values = torch.empty(len(offsets), dtype=self.dtype)
        panel_of, order = (offsets // (num_rows * num_columns)).sort()
        panels, firsts = np.unique(panel_of.numpy(), return_index=True)
        for panel, places in zip(panels.tolist(), order.tensor_split(firsts[1:].tolist()), strict=False):
            within = offsets[places] - panel * num_rows * num_columns
            rows, columns = within // num_columns, within % num_columns
            for (row, column), tile in self._panels[panel]:
                is_here = (rows >= row) & (rows < row + tile.shape[0])
                is_here &= (columns >= column) & (columns < column + tile.shape[1])
                values[places[is_here]] = tile[rows[is_here] - row, columns[is_here] - column]
        return values
