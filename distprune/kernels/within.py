"""Groups and rows on a GPU, each decided by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from distprune.kernels.available import kernels
from distprune.kernels.lowest import Keys
from distprune.kernels.table import Piece, tables_of

MOST_IN_GROUP = 32
MOST_IN_ROW = (1 << 21) - 1  # three such numbers are counted in 64 bits
Units = tuple[str, int, int]  # ("groups", n, m), or ("rows", inputs, how many go)
_LANES = 1024  # of a tile of groups, half of it for large ones: with more, registers spill
_WIDEST = 1 << 13  # of a row that is one tile, of 1,024 threads; a longer one is read again for each bit
_BLOCK = 1024


@final
class Within:
    """Units of one kind, which no piece cuts: ``n`` of every ``m`` consecutive elements stay, or all but some of a row.

    ``totals`` (tensors, 3), int64, on the device: pruned, gone before, NaN. Local: a launch for all tensors of a dtype.
    """

    def __init__(
        self, pieces: Sequence[Piece], units: Units, keys: Keys, totals: torch.Tensor, *, lanes: int = _LANES,
        widest: int = _WIDEST,
    ) -> None:  # fmt: skip
        kind, first, second = units
        # Tables have only the addresses of pieces: they are kept.
        self._keys, self._totals, self._pieces, self._is_groups = keys, totals, pieces, kind == "groups"
        self._numbers: tuple[int, ...] = () if self._is_groups else (first, second)
        if self._is_groups:
            groups = max((lanes if second <= 16 else lanes // 2) >> (second - 1).bit_length(), 1)
            self._tables = tables_of(pieces, groups * second)
            self._constants: dict[str, Any] = {"N": first, "M": second, "GROUPS": groups}
        else:
            width = min(1 << (first - 1).bit_length(), widest)
            self._tables = tables_of(pieces, first, row=first)
            self._constants = {"IS_ONE": first <= width, "WIDTH": width, "num_warps": max(width // 256, 1)}

    def count_nans(self) -> None:
        """Count what is NaN of each tensor."""
        for table in self._tables:
            table.run(kernels("rows").count_nans, self._totals, self._keys.last, keys=self._keys.kind, BLOCK=_BLOCK)

    def write(self, num_nans: torch.Tensor | None = None) -> None:
        """Write masks of what stays; with ``num_nans``, on the device, zeros into the weights, if that is 0."""
        keys, guard = self._keys, self._totals.new_zeros(1) if num_nans is None else num_nans
        kernel = kernels("rows").keep_n_of_m if self._is_groups else kernels("rows").keep_in_rows
        constants = {"WRITES_MASK": num_nans is None, "keys": {**keys.kind, "checks_weights": False}, **self._constants}
        for table in self._tables:
            if not self._is_groups:
                is_short = table.kind.dtype.primitive_bitwidth == 16 and keys.score == "magnitude"
                constants["BITS"] = 15 if is_short and not keys.wide else 31
            table.run(kernel, self._totals, guard, keys.gone, keys.last, *self._numbers, **constants)
