"""Sums over the tokens of one sample, and over the samples of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distprune.calibration.moments import MomentsOf

_ROWS = 256  # tokens in float64 at a time
_STRIP = 128  # rows of X^T X that are computed together

PRODUCTS, SHIFT, SUMS = "X^T X", "+", "1^T X"  # beside the names of layers


@dataclass
class InputSums:
    """What an input adds up to over samples of this rank: float64, of the features from ``start`` on.

    ``parts``, by what is summed. Of ``"features"``: sums and sums of squares, (features, 2). Of ``"pairs"``: rows of
    X^T X, (features, in), whose lower triangle is not all there, and those towards targets. With ``means`` products are
    about each sample's own mean until :meth:`center`; ``SUMS`` has the sums of all features, see :func:`in_float32`.
    """

    of: MomentsOf
    start: int = 0
    about_mean: bool = False
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    means: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # of each sample: tokens, mean (in,)

    def take(self, x: torch.Tensor, own: torch.Tensor, shift: torch.Tensor | None = None) -> None:
        """Add a sample: ``x`` (tokens, in), of which ``own`` (tokens, features) are taken; or, of features, ``own``.

        ``shift``: as ``own``, what leads to its target.
        """
        if self.of == "features":
            self.add(PRODUCTS, column_sums(own, (torch.positive, torch.square)).float())
            return
        if PRODUCTS not in self.parts:
            self.parts[PRODUCTS] = torch.zeros((own.shape[1], x.shape[1]), dtype=torch.float64, device=x.device)
        wide = x.float()
        if shift is not None:
            self.add(SHIFT, shift.t() @ wide)
        if self.about_mean:
            of_sample = column_sums(x, (torch.positive, torch.abs))
            mean = of_sample[:, 0] / max(len(x), 1)
            self.means.append((len(x), mean))
            self.add(SUMS, in_float32(of_sample[self.start : self.start + own.shape[1]]))
            wide = wide - mean.float()
        add_products(self.parts[PRODUCTS], wide, self.start)

    def add(self, key: str, addend: torch.Tensor) -> None:
        if key not in self.parts:
            self.parts[key] = torch.zeros_like(addend, dtype=torch.float64)
        self.parts[key] += addend

    def center(self, mean: torch.Tensor) -> None:
        """Take the products about ``mean`` (in,), float64, that of all tokens of all ranks."""
        for num, own in self.means:
            scaled = (own - mean.to(own.device)).mul_(num**0.5).float()
            add_products(self.parts[PRODUCTS], scaled[None], self.start)
        self.means.clear()


def column_sums(x: torch.Tensor, functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> torch.Tensor:
    """Return the sums over all rows of what ``functions`` make of ``x`` (tokens, columns), (columns, functions).

    Both are float64.
    """
    total = torch.zeros((x.shape[1], len(functions)), dtype=torch.float64, device=x.device)
    for rows in torch.split(x, _ROWS):
        values = rows.double()
        total += torch.stack([function(values).sum(dim=0) for function in functions], dim=1)
    return total


def in_float32(sums: torch.Tensor) -> torch.Tensor:
    """Return ``sums`` (columns, n), float64, each as two float32 numbers of which it is the sum, (columns, 2 n)."""
    high = sums.float()
    return torch.stack([high, (sums - high).float()], dim=2).flatten(1)


def add_products(total: torch.Tensor, x: torch.Tensor, start: int) -> None:
    """Add to ``total``, rows ``start`` on of X^T X, those of ``x`` (tokens, in), computed in float32.

    Only those on and above the diagonal, and what of the strips' corners is below it: the rest is their mirror image.
    """
    x = x.float()
    for strip in torch.split(total, _STRIP):
        stop = start + len(strip)
        strip[:, start:] += x[:, start:stop].t() @ x[:, start:]
        start = stop
