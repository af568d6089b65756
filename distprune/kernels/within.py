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


def count_nans(pieces: Sequence[Piece], keys: Keys, num_nans: torch.Tensor, block: int = 1024) -> None:
    """Add to ``num_nans`` how many elements are NaN. Local."""
    for table in tables_of([piece for piece in pieces if piece.owned], block):
        table.run(kernels("tiles").count_nans, num_nans, keys.last, BLOCK=block, **keys.constants)


def keep_groups(
    pieces: Sequence[Piece], n: int, m: int, keys: Keys, num_nans: torch.Tensor, totals: torch.Tensor, *,
    writes_mask: bool, lanes: int = _LANES,
) -> None:  # fmt: skip
    """Keep ``n`` of every ``m`` consecutive elements, which no piece cuts, unless ``num_nans``. Local: a launch a kind.

    ``totals`` (tensors, 3), int64: pruned, gone before, NaN.
    """
    groups = max((lanes if m <= 16 else lanes // 2) >> (m - 1).bit_length(), 1)
    for table in tables_of(pieces, groups * m):
        table.run(
            kernels("rows").keep_n_of_m, num_nans, totals, keys.gone, keys.last, N=n, M=m, GROUPS=groups,
            WRITES_MASK=writes_mask, **keys.constants,
        )  # fmt: skip


def keep_rows(
    pieces: Sequence[Piece], num_in: int, num_lowest: int, keys: Keys, num_nans: torch.Tensor, totals: torch.Tensor, *,
    writes_mask: bool, widest: int = _WIDEST,
) -> None:  # fmt: skip
    """Prune the ``num_lowest`` of every ``num_in`` consecutive elements, as :func:`keep_groups`."""
    width = min(1 << (num_in - 1).bit_length(), widest)
    for table in tables_of(pieces, num_in, row=num_in):
        table.constants["ALIGNED"] &= num_in % 16 == 0
        num_bits = 15 if keys.score == "magnitude" and not keys.wide and table.itemsize == 2 else 31
        table.run(
            kernels("rows").keep_in_rows, num_nans, totals, keys.gone, keys.last, num_in, num_lowest,
            IS_ONE=num_in <= width, WIDTH=width, BITS=num_bits, WRITES_MASK=writes_mask,
            num_warps=min(max(width // 256, 1), 16),
            **keys.constants,
        )  # fmt: skip
