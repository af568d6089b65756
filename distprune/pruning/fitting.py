"""Whether a pattern fits a parameter, and how that is a matrix. No communication."""

from __future__ import annotations

from torch import nn

from distprune.models.weights import matrix_of_weight
from distprune.patterns.base import Pattern
from distprune.shards.local_shard import LocalShard


def fitted(pattern: Pattern, shard: LocalShard, name: str) -> LocalShard:
    """Return the shard with its matrix, if ``pattern`` needs it.

    Of rows spread by hand, dim 0 is the rows unless the shard has a matrix.

    Raises:
        ValueError: the parameter, called ``name``, has fewer than two dims, its matrix another size, or the pattern's
            groups, blocks or channels do not fit it.
        NotImplementedError: which of its dims are the inputs is not known.
    """
    pattern.check_shape(shard.shape)
    if not pattern.needs_matrix:
        return shard
    matrix = shard.matrix
    if matrix is None and shard.module is None and len(shard.shape) > 1:
        matrix = shard.as_matrix()
    elif matrix is None:
        matrix = matrix_of_weight(shard.module or nn.Module(), shard.attribute, shard.shape, name)
    if matrix.num_rows * matrix.num_in != shard.geometry.global_numel:
        raise ValueError(f"{name!r} of shape {shard.shape} has not as many elements as its {matrix}")
    pattern.check_fits(name, matrix)
    return shard.having(matrix=matrix)
