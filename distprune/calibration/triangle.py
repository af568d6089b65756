"""Half of a symmetric matrix, as it travels."""

from __future__ import annotations

import torch

_TILE = 64  # rows and columns of a matrix that are mirrored at a time


def pack_triangle(symmetric: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the upper triangle of (d, d) as (d // 2 + 1, d): the lower rows' part fills the upper rows' corner.

    What is below the diagonal is not looked at. ``out``: where to.
    """
    num_rows = symmetric.shape[0] // 2 + 1
    packed = symmetric[:num_rows].clone() if out is None else out.copy_(symmetric[:num_rows])
    rest = symmetric[num_rows:, num_rows:]
    corner = packed[1 : 1 + len(rest), : len(rest)]
    corner.copy_(corner.triu(1) + rest.triu().t())
    return packed


def triangle_shape(size: int) -> tuple[int, int]:
    """Return the shape of the packed triangle of a matrix (``size``, ``size``)."""
    return size // 2 + 1, size


def unpack_triangle(packed: torch.Tensor) -> torch.Tensor:
    """Return, rounded to float32, the symmetric matrix (d, d) that :func:`pack_triangle` packed."""
    num_rows, size = packed.shape
    num_rest = size - num_rows
    whole = torch.empty(size, size, dtype=torch.float32, device=packed.device)
    whole[:num_rows] = packed
    whole[num_rows:, num_rows:] = packed[1 : 1 + num_rest, :num_rest].t()
    # Tile by tile, the lower triangle from the upper: transposing all at once is ten times slower on a CPU.
    for start in range(0, size, _TILE):
        stop = start + _TILE
        tile = whole[start:stop, start:stop]
        mirrored = tile.triu(1).t()
        tile.triu_().add_(mirrored)
        whole[stop:, start:stop] = whole[start:stop, stop:].t()
    return whole
