"""A parameter as a matrix: which elements are the inputs of one output. No communication.

Nouns: a *row* is the weights of one output, over all inputs. N:M groups and rows run along the inputs. By
default dim 0 is the outputs, and the other dims, flattened, are the inputs: (out, in) of a linear layer,
(out, in * kh * kw) of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards.geometry import Geometry

IntArray = npt.NDArray[np.int64]
Ints = TypeVar("Ints", IntArray, torch.Tensor)


@dataclass(frozen=True)
class Matrix:
    """``num_matrices`` matrices (out, in), one after the other; ``transposed``: each is kept as (in, out)."""

    num_out: int
    num_in: int
    transposed: bool = False
    num_matrices: int = 1

    @staticmethod
    def of_shape(shape: Sequence[int]) -> Matrix:
        """Return the default: dim 0 is the outputs, the other dims are the inputs."""
        return Matrix(shape[0], math.prod(shape[1:]))

    @property
    def num_rows(self) -> int:
        """Rows of all matrices together."""
        return self.num_matrices * self.num_out

    def input_dims(self, shape: Sequence[int]) -> range:
        """Return the dims of a parameter of ``shape``, of two dims or more, along which its inputs lie."""
        if self.transposed:
            return range(len(shape) - 2, len(shape) - 1)
        return range(next(d for d in range(1, len(shape)) if math.prod(shape[:d]) == self.num_rows), len(shape))


@dataclass(frozen=True)
class LocalMatrix:
    """Local elements that are all combinations of some rows and columns: the indices of both, in local order."""

    rows: IntArray
    columns: IntArray
    num_local_out: int | None  # where each matrix is kept as (in, out)

    @staticmethod
    def of(geometry: Geometry, matrix: Matrix) -> LocalMatrix:
        """Return the rows and columns that ``geometry`` holds, of two dims or more."""
        shape = geometry.global_shape
        inputs = matrix.input_dims(shape)
        columns = _indices(geometry, inputs.start, inputs.stop)
        if matrix.transposed:
            outs = _indices(geometry, len(shape) - 1, len(shape))
            batches = _indices(geometry, 0, inputs.start)
            rows = (batches[:, None] * matrix.num_out + outs[None, :]).reshape(-1)
            return LocalMatrix(rows, columns, len(outs))
        return LocalMatrix(_indices(geometry, 0, inputs.start), columns, None)

    def offsets(self, rows: Ints, columns: Ints) -> Ints:
        """Return the local offsets (rows, columns) of local rows and columns."""
        if self.num_local_out is None:
            return rows[:, None] * len(self.columns) + columns[None, :]
        size = max(self.num_local_out, 1)
        starts = rows // size * (len(self.columns) * size) + rows % size
        return starts[:, None] + columns[None, :] * size


def _indices(geometry: Geometry, first: int, last: int) -> IntArray:
    """Return the flat indices, within dims ``first`` to ``last``, of what is held of them."""
    if first == last:
        return np.zeros(1, dtype=np.int64)
    part = Geometry(geometry.global_shape[first:last], geometry.dim_runs[first:last])
    return part.flat_indices(0, part.local_numel).numpy()
