"""Sums over the tokens of this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
FEATURES, PRODUCTS, DENSE = "1^T X", "X^T X", "X_dense^T X"  # beside the names of layers


@dataclass
class InputSums:
    """What an input adds up to over samples of this rank, by what is summed: float64, (this rank's features, ...).

    ``FEATURES``: of x, |x| and x^2, (features, 3). ``PRODUCTS`` and ``DENSE``: rows of what they are called, (features,
    in). By the name of a layer: x^T (total_dense - total), (features, out).
    """

    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, own: torch.Tensor, whole: torch.Tensor | None = None, dense: torch.Tensor | None = None) -> None:
        """Add tokens: ``own`` (tokens, features) of the ``whole`` (tokens, in), where products are taken.

        ``dense``: as ``own``, in the dense stream.
        """
        wide = own.float()
        columns = [values.sum(dim=0, dtype=torch.float64) for values in (wide, wide.abs(), wide.square())]
        self.add(FEATURES, torch.stack(columns, dim=1))
        if whole is not None:
            self.add(PRODUCTS, product(own, whole))
        if whole is not None and dense is not None:
            self.add(DENSE, product(dense, whole))

    def add(self, key: str, addend: torch.Tensor) -> None:
        if key in self.parts:
            self.parts[key] += addend
        else:
            self.parts[key] = addend.double()


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x^T y of (tokens, n) and (tokens, m), float32, in which products of 16-bit numbers are exact. Local."""
    is_exact = x.dtype == y.dtype and x.dtype in (torch.bfloat16, torch.float16)
    if is_exact and x.is_cuda and len(x) and _HAS_OUT_DTYPE:
        return torch.mm(x.t(), y, out_dtype=torch.float32)
    return x.float().t() @ y.float()
