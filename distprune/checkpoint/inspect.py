"""How sparse a model on disk is, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from distprune.brief import count, one_line, share, worst
from distprune.checkpoint.hf_directory import TensorEntry, open_directory
from distprune.checkpoint.stored_slices import Progress, Slices, stored_slices
from distprune.shards import local_shard
from distprune.totals import Totals

PATTERNS = ((1, 4), (2, 4), (4, 8))


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

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.sparsity)} of {count(self.num_elements)} weights zero in {self.name}")


@dataclass(frozen=True)
class InspectReport(Totals):
    """All tensors of a model directory, in the order of its files."""

    path: str
    tensors: tuple[TensorReport, ...]

    @property
    @override
    def counted(self) -> tuple[TensorReport, ...]:
        return self.tensors

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.sparsity)} of {count(self.num_elements)} weights zero in {self.path}")

    @override
    def __str__(self) -> str:
        """Return the totals and the five sparsest tensors; all of them are in :meth:`to_dict`."""
        total = f"{share(self.sparsity)} of {count(self.num_elements)} weights are zero"
        found = worst("highest sparsities", self.tensors, lambda of: of.name, lambda of: of.sparsity, share)
        return "\n".join([f"{self.path}: {total}, {len(self.tensors)} tensors", *found])

    def to_dict(self) -> dict[str, Any]:
        """Return everything, sparsities included, as JSON carries it."""
        totals = {name: getattr(self, name) for name in ("num_elements", "num_zeros", "sparsity")}
        tensors = [{**dataclasses.asdict(tensor), "sparsity": tensor.sparsity} for tensor in self.tensors]
        return {"path": self.path, **totals, "tensors": tensors}


def inspect_directory(path: str | Path, *, progress: Progress = None) -> InspectReport:
    """Return the sparsity of every tensor of a Hugging Face directory. Local; reads in bounded pieces.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: as :func:`open_directory`.
        ImportError: the extra ``hf`` is not installed.
    """
    directory = open_directory(path)
    work = [
        (local_shard(entry.name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")), file, entry)
        for file, entry in directory.tensors.values()
    ]
    reports = tuple(_inspect_tensor(entry, slices) for _, entry, slices in stored_slices(work, progress))
    return InspectReport(str(directory.path), reports)


def _inspect_tensor(entry: TensorEntry, slices: Slices) -> TensorReport:
    num_zeros, num_elements = 0, math.prod(entry.shape)
    possible = [(n, m) for n, m in PATTERNS if len(entry.shape) == 2 and num_elements and entry.shape[1] % m == 0]
    for _, values in slices:
        is_zero = values == 0
        num_zeros += int(torch.count_nonzero(is_zero))
        possible = [(n, m) for n, m in possible if bool((is_zero.view(-1, m).sum(dim=1) >= m - n).all())]
    patterns = tuple(f"{n}:{m}" for n, m in possible) if num_zeros < num_elements else ()
    dtype = str(entry.dtype).removeprefix("torch.")
    return TensorReport(entry.name, entry.shape, dtype, num_elements, num_zeros, patterns)
