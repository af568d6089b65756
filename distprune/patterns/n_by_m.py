"""N:M groups, each decided by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.hints import as_int
from distprune.kernels.within import MOST_IN_GROUP, Units
from distprune.patterns.base import Pattern
from distprune.patterns.unstructured import Unstructured
from distprune.patterns.within_rows import WithinRows
from distprune.selection.highest import keep_highest_per_group
from distprune.shards.matrix import Matrix


@final
@dataclass(frozen=True)
class NByM(WithinRows):
    """``n`` of every ``m`` consecutive inputs of a row are kept. What is gone counts as pruned.

    A row of a convolution is (in, kh, kw) flattened, so a group runs along the kernel and on into the next input
    channel. Kernels that use 2:4 in convolutions want groups along the input channels: those of 1 x 1 are alike.

    >>> layer = torch.nn.Linear(8, 4)
    >>> prune_model(layer, pattern=NByM(2, 4)).sparsity  # or pattern="2:4"
    0.5

    Raises:
        TypeError: ``n`` or ``m`` is not an int.
        ValueError: not 0 < ``n`` < ``m``.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        vars(self).update(n=as_int("n", self.n), m=as_int("m", self.m))
        if not 0 < self.n < self.m:
            raise ValueError(f"{self.n}:{self.m} is not a pattern: n of every m are kept, 0 < n < m")

    @override
    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @override
    def check_fits(self, name: str, matrix: Matrix) -> None:
        if matrix.num_in % self.m:
            raise ValueError(f"{self} does not fit {name!r}: its {matrix.num_in} inputs are not a multiple of {self.m}")

    @property
    @override
    def width(self) -> int:
        return self.m

    @override
    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        return Unstructured(share, "tensor"), self

    @override
    def kernel(self, matrix: Matrix) -> Units | None:
        return ("groups", self.n, self.m) if self.m <= MOST_IN_GROUP else None

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, self.m

    @override
    def keep(self, scores: torch.Tensor) -> torch.Tensor:
        return keep_highest_per_group(scores, self.n, self.m)
