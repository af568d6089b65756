"""How sparse a model on disk is, tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.hf_directory import TensorEntry, open_directory
from distprune.checkpoint.stored_slices import open_weights

__all__ = ["InspectReport", "TensorReport", "inspect_directory"]

PATTERNS = ((1, 4), (2, 4), (4, 8))
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorReport:
    """One tensor. ``patterns``: the N:M that hold, at most N nonzeros in every M along the last dim."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    num_zeros: int
    patterns: tuple[str, ...]

    @property
    def sparsity(self) -> float:
        return self.num_zeros / max(self.num_elements, 1)


@dataclass(frozen=True)
class InspectReport:
    """All tensors of a model directory, in the order of its files."""

    path: str
    tensors: tuple[TensorReport, ...]

    @property
    def num_elements(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def num_zeros(self) -> int:
        return sum(tensor.num_zeros for tensor in self.tensors)

    @property
    def sparsity(self) -> float:
        return self.num_zeros / max(self.num_elements, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, sparsities included, as JSON carries it."""
        totals = {name: getattr(self, name) for name in ("num_elements", "num_zeros", "sparsity")}
        tensors = [{**dataclasses.asdict(tensor), "sparsity": tensor.sparsity} for tensor in self.tensors]
        return {"path": self.path, **totals, "tensors": tensors}


def inspect_directory(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> InspectReport:
    """Return the sparsity of every tensor of a Hugging Face directory. Local; reads in bounded pieces.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: as :func:`open_directory`.
        ImportError: the extra ``hf`` is not installed.
    """
    directory = open_directory(path)
    reports = []
    num_total = sum(entry.stop - entry.start for file in directory.weight_files for entry in file.tensors)
    num_done = 0
    for file in directory.weight_files:
        with open_weights(file.path) as handle:
            for entry in file.tensors:
                reports.append(_inspect_tensor(entry, handle.get_slice(entry.name)))
                num_done += entry.stop - entry.start
                if progress is not None:
                    progress(num_done, num_total)
    return InspectReport(str(directory.path), tuple(reports))


def _inspect_tensor(entry: TensorEntry, stored: Any) -> TensorReport:
    num_zeros, num_elements = 0, torch.Size(entry.shape).numel()
    possible = [(n, m) for n, m in PATTERNS if len(entry.shape) == 2 and num_elements and entry.shape[1] % m == 0]
    if not entry.shape:
        num_zeros = int(stored[...] == 0)
    elif num_elements:
        step = max(1, _READ_BYTES * entry.shape[0] // max(entry.stop - entry.start, 1))
        for start in range(0, entry.shape[0], step):
            is_zero = stored[start : start + step] == 0
            num_zeros += int(torch.count_nonzero(is_zero))
            possible = [(n, m) for n, m in possible if _holds(is_zero, n, m)]
    patterns = tuple(f"{n}:{m}" for n, m in possible) if num_zeros < num_elements else ()
    dtype = str(entry.dtype).removeprefix("torch.")
    return TensorReport(entry.name, entry.shape, dtype, num_elements, num_zeros, patterns)


def _holds(is_zero: torch.Tensor, n: int, m: int) -> bool:
    return bool((is_zero.view(-1, m).sum(dim=1) >= m - n).all())
