"""Groups and rows on a GPU, each decided by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distprune.kernels.available import kernels
from distprune.kernels.lowest import Keys
from distprune.kernels.table import Piece, tables_of

MOST_IN_GROUP = 32
_LANES = 1024  # of a tile of groups, half of it for large ones: with more, registers spill
_WIDEST = 1 << 13  # of a row that is one tile; a longer one is read again for each bit


def keep_groups(
    pieces: Sequence[Piece], n: int, m: int, keys: Keys, totals: torch.Tensor, *, lanes: int = _LANES
) -> None:
    """Write masks of ``n`` of every ``m`` consecutive elements, which no piece cuts. Local: a launch a kind.

    ``totals`` (tensors, 3), int64: pruned, gone before, NaN.
    """
    groups = max((lanes if m <= 16 else lanes // 2) >> (m - 1).bit_length(), 1)
    constants = {"N": n, "M": m, "GROUPS": groups, **keys.constants}
    for table in tables_of(pieces, groups * m):
        table.run(kernels("rows").keep_n_of_m, totals, keys.gone, keys.last, **constants)


def keep_rows(
    pieces: Sequence[Piece], num_in: int, num_lowest: int, keys: Keys, totals: torch.Tensor, *, widest: int = _WIDEST
) -> None:
    """Write masks without the ``num_lowest`` of every ``num_in`` consecutive elements, as :func:`keep_groups`."""
    width = min(1 << (num_in - 1).bit_length(), widest)
    for table in tables_of(pieces, num_in, row=num_in):
        table.constants["ALIGNED"] &= num_in % 16 == 0
        is_short = table.constants["DTYPE"].primitive_bitwidth == 16 and keys.score == "magnitude" and not keys.wide
        num_bits = 15 if is_short else 31
        constants = {"IS_ONE": num_in <= width, "WIDTH": width, "BITS": num_bits, **keys.constants}
        constants["num_warps"] = min(max(width // 256, 1), 16)
        table.run(kernels("rows").keep_in_rows, totals, keys.gone, keys.last, num_in, num_lowest, **constants)
