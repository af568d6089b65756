"""What is known of an input once samples and ranks are summed up; see :mod:`distprune.calibration.statistics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from distprune.calibration.owner_ranks import OwnerRank

MomentsOf = Literal["features", "pairs"]  # the diagonal, for Wanda; all of X^T X, for SparseGPT

EVERYWHERE = OwnerRank(0, spread=True)
_CHUNK = 1 << 22  # weights whose product with X^T X is in memory at a time


@dataclass(frozen=True)
class Moments:
    """Of the inputs of ``names``, which are the same, over all ranks' tokens.

    ``values`` (float32) is (in,) for ``"features"`` and (in, in), symmetric, for ``"pairs"``; zeros if
    ``num_tokens`` is 0, as for an expert that nothing was routed to. Where one rank, the ``owner``, processes this
    input alone, ``"pairs"`` are empty on every other rank. With ``"features"`` comes ``feature_sums`` (in,), float32.

    With targets (see :mod:`distprune.calibration.targets`) either or both of these, float32, come with ``"pairs"``:
    ``shift`` (in, in) is the sum over tokens of (x_dense - x)^T x; ``residuals`` has by layer the sum of
    x^T (total_dense - total), (in, out).

    Where they are asked for ``sums`` (in, 3), float64, come with ``"pairs"``: of the features, of their sizes, and of
    their squares about the mean. So does, for layers with a bias, ``centered`` (in, in), float32: X^T X about the mean.
    ``gram`` (in, in), float64, from the driver for a solver that asks for it (see ``Solver.weighed``).
    """

    names: tuple[str, ...]
    num_tokens: int
    values: torch.Tensor
    feature_sums: torch.Tensor | None = None
    owner: OwnerRank = EVERYWHERE
    shift: torch.Tensor | None = None
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sums: torch.Tensor | None = None
    centered: torch.Tensor | None = None
    gram: torch.Tensor | None = None

    @property
    def square_sums(self) -> torch.Tensor:
        """Sum of squares of each input feature, (in,)."""
        return self.values if self.values.ndim == 1 else self.values.diagonal()

    def squared_output(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ||X W^T||^2 of rows ``weight`` (rows, in), in float32: from X^T X, or as if features were independent.

        That is what is known without X^T X: their squares about their means, and n mean^2, of which most of their
        correlation comes. Without tokens the inputs count as white: X^T X = 1. It is where the rows are: nobody waits
        for a device.
        """
        if not self.num_tokens:
            return weight.float().square().sum(dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        for some in torch.split(weight, max(1, _CHUNK // max(weight.shape[1], 1))):
            w = some.float()
            if self.feature_sums is None:
                total += (w @ self.values).mul_(w).sum(dtype=torch.float64)
            else:
                of_means = self.feature_sums / self.num_tokens**0.5
                about_mean = (self.values - of_means.square()).clamp_(min=0)
                total += (w.square() @ about_mean + (w @ of_means).square_()).sum(dtype=torch.float64)
        return total
