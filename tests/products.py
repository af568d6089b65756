"""Which parameters a forward multiplies by, read off the calls of torch's products: nothing of the library is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

__all__ = ["Products"]

# By function, the places of both factors among its arguments.
_FACTORS: dict[Any, tuple[int, int]] = {
    F.linear: (0, 1),
    torch.matmul: (0, 1),
    torch.Tensor.matmul: (0, 1),
    torch.Tensor.__matmul__: (0, 1),
    torch.mm: (0, 1),
    torch.bmm: (0, 1),
    torch.addmm: (1, 2),
    torch.baddbmm: (1, 2),
}


@dataclass
class Products(TorchFunctionMode):
    """``square_sums`` of what each matrix is given, (in,), by (parameter, its place in it); ``in_dim`` by parameter."""

    parameters: Mapping[str, torch.Tensor]
    square_sums: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    in_dim: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        # Of names that share a parameter the first.
        named = reversed(list(self.parameters.items()))
        self._names = {p.untyped_storage().data_ptr(): name for name, p in named}

    def matrix(self, parameter: torch.Tensor, name: str, offset: int) -> torch.Tensor:
        """Return the matrix (out, in) of parameter ``name``, or of one shaped like it, at a place in it."""
        matrix = parameter.detach().transpose(self.in_dim[name], -1)
        return matrix[offset // (matrix.shape[1] * matrix.shape[2])] if matrix.ndim == 3 else matrix

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTORS:
            first, second = (args[i] for i in _FACTORS[func])
            with torch._C.DisableTorchFunction():
                self._see(first, second, is_linear=func is F.linear)
        return func(*args, **(kwargs or {}))

    def _see(self, first: torch.Tensor, second: torch.Tensor, is_linear: bool) -> None:
        for weight, x, in_dim, feature_dim in (
            (second, first, -1 if is_linear else -2, -1),
            (first, second, -1, -2),
        ):
            name = self._names.get(weight.untyped_storage().data_ptr())
            if name is None or weight.ndim < 2:
                continue
            parameter = self.parameters[name]
            stride = weight.stride(in_dim)
            self.in_dim[name] = next(d for d in range(parameter.ndim) if parameter.stride(d) == stride)
            if weight.ndim == 2:
                self._add(name, int(weight.storage_offset()), x.transpose(feature_dim, -1))
                continue
            for i, matrix in enumerate(weight):
                self._add(name, int(matrix.storage_offset()), x[i].transpose(feature_dim, -1))

    def _add(self, name: str, offset: int, x: torch.Tensor) -> None:
        key = (name, offset)
        total = x.detach().double().square().reshape(-1, x.shape[-1]).sum(0)
        self.square_sums[key] = self.square_sums.get(key, torch.zeros(())) + total
