"""What is known of an input once samples and ranks are summed up; see :mod:`distprune.calibration.statistics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from distprune.shards.device import on_host

Needs = Literal["squares", "products"]  # the diagonal of X^T X, for Wanda; all of it, for SparseGPT

_CHUNK, _DEVICE_CHUNK = 1 << 22, 1 << 26  # weights whose product with X^T X is in memory at a time


@dataclass(frozen=True)
class Moments:
    """Of the inputs X (tokens, in) of the layers ``names``, over the tokens of all ranks; of none, as if X^T X were 1.

    Everywhere: ``squares`` (in,), the sums of squares, ``mean`` and ``mean_sizes`` (in,), the means of x and of its
    size; float64. On the ``owner``, the rank that factors, float64: ``products`` (in, in), X^T X; and with targets (see
    :mod:`distprune.calibration.targets`) ``shift`` (in, in), the sum over tokens of (x_dense - x)^T x, and by layer
    ``residuals``, that of x^T (total_dense - total), (in, out).

    A solver's ``prepare`` is given that of the owner, and with it, if it asks, ``gram`` (in, in), float64: W^T W over
    all ranks' rows. Its ``solve`` is given, on every rank that has rows, ``products`` in float32, and in ``prepared``
    what ``prepare`` returned.
    """

    names: tuple[str, ...]
    num_tokens: int
    squares: torch.Tensor
    mean: torch.Tensor
    mean_sizes: torch.Tensor
    owner: int = 0
    is_alone: bool = False  # it has all rows of these layers, which are experts
    has_products: bool = False  # on the owner
    products: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gram: torch.Tensor | None = None
    prepared: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def norms(self) -> torch.Tensor:
        """The norm of each input, (in,), float32."""
        return self.squares.float().sqrt()

    def squared_output(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ||X W^T||^2 of rows ``weight`` (rows, in): from X^T X, or as if features were independent.

        That is what is known without X^T X: their squares about their means, and n mean^2, of which most of their
        correlation comes. It is where the rows are: nobody waits for a device.
        """
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        most = _CHUNK if on_host(weight.device) else _DEVICE_CHUNK
        for some in torch.split(weight, max(1, most // max(weight.shape[1], 1))):
            w = some.float()
            if self.products is not None:
                total += (w @ self.products.float()).mul_(w).sum(dtype=torch.float64)
            else:
                about_mean, of_means = self._as_if_independent
                total += (w.square() @ about_mean + (w @ of_means).square_()).sum(dtype=torch.float64)
        return total

    @cached_property
    def _as_if_independent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squares of features about their means, and n^0.5 times these, both (in,), float32."""
        of_means = self.mean * self.num_tokens**0.5
        return (self.squares - of_means.square()).clamp_(min=0).float(), of_means.float()


def adds_in_float32(x: torch.Tensor) -> bool:
    """Return whether sums over the tokens of ``x`` are taken in float32: there a device needs no copy. Local."""
    return x.element_size() == 2 and not on_host(x.device)


def column_norms(x: torch.Tensor, power: int) -> torch.Tensor:
    """Return the norm of each column of ``x`` (tokens, features), float64. Local."""
    dtype = torch.float32 if adds_in_float32(x) else torch.float64
    norms: torch.Tensor = torch.linalg.vector_norm(x, power, dim=0, dtype=dtype)
    return norms.double()
