"""Where local elements lie in their parameter, as boxes: products of ranges of indices. No communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from distprune.shards.geometry import Geometry
from distprune.shards.matrix import LocalMatrix, Matrix

Box = tuple[tuple[int, int], ...]


def boxes(start: int, stop: int, shape: Sequence[int], most: int | None = None) -> Iterator[Box]:
    """Yield the boxes that elements ``start`` to ``stop`` of an array of ``shape`` fill one after the other. Local.

    ``most``: elements of a box.
    """
    while start < stop:
        left, inner, dim = min(most or stop, stop - start), 1, len(shape) - 1
        while dim > 0 and start % (inner * shape[dim]) == 0 and left >= inner * shape[dim]:
            inner, dim = inner * shape[dim], dim - 1
        before, index = divmod(start // inner, shape[dim])
        num = min(left // inner, shape[dim] - index)
        outer = (int(i) for i in np.unravel_index(before, shape[:dim]))
        yield (*((i, i + 1) for i in outer), (index, index + num), *((0, size) for size in shape[dim + 1 :]))
        start += num * inner


def local_matrices(geometry: Geometry, matrix: Matrix) -> list[tuple[int, LocalMatrix]]:
    """Return the rows and columns of local elements: of all, or of each box of a flattened parameter (FSDP1). Local.

    Before each stands the local offset at which it begins.
    """
    whole = LocalMatrix.of(geometry, matrix)
    if whole is not None:
        return [(0, whole)]
    sizes = (matrix.num_in, matrix.num_out) if matrix.transposed else (matrix.num_out, matrix.num_in)
    shape, parts, begin = (matrix.num_matrices, *sizes), list[tuple[int, LocalMatrix]](), 0
    for start, stop in geometry.dim_runs[0]:
        for box in boxes(start, stop, shape):
            part = Geometry(shape, tuple((bounds,) for bounds in box))
            local = LocalMatrix.of(part, matrix)
            assert local is not None
            parts.append((begin, local))
            begin += part.local_numel
    return parts
