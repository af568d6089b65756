"""How sparse a model on disk is, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.checkpoint.hf_directory import HfDirectory, open_directory
from distprune.checkpoint.stored_parameters import find_stored
from distprune.checkpoint.stored_slices import Progress, Slices, stored_slices
from distprune.checkpoint.weight_file import TensorEntry
from distprune.formatting import count, one_line, share, worst, zeros
from distprune.models.matrices import matrix_of_weight
from distprune.shards.layouts import local_shard
from distprune.totals import Counted, Totals

PATTERNS = ((1, 4), (2, 4), (4, 8))


@dataclass(frozen=True, repr=False)
class TensorReport(Counted):
    """One tensor. ``patterns``: the N:M that hold, at most N nonzeros in every M inputs.

    They are looked for along the inputs of weights that are pruned by default, along the last dim of other matrices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    num_zeros: int
    patterns: tuple[str, ...]
    is_prunable: bool | None = None  # by default; None: unknown


@dataclass(frozen=True)
class InspectReport(Totals):
    """All tensors of a model directory, in the order of its files."""

    path: str
    tensors: tuple[TensorReport, ...]

    @property
    @override
    def counted(self) -> tuple[TensorReport, ...]:
        return self.tensors

    @property
    def prunable_zeros(self) -> tuple[int, int, int] | None:
        """The zeros of the weights pruned by default, of how many, of how many in all; ``None``: not known."""
        prunable = [tensor for tensor in self.tensors if tensor.is_prunable]
        if not prunable:
            return None
        return sum(one.num_zeros for one in prunable), sum(one.num_elements for one in prunable), self.num_elements

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.sparsity)} of {count(self.num_elements)} weights zero in {self.path}")

    @override
    def __str__(self) -> str:
        """Return the totals and the five sparsest tensors; all of them are in :meth:`to_dict`."""
        known = self.prunable_zeros
        total = f"sparsity {zeros(*known)}" if known else f"{share(self.sparsity)} of {count(self.num_elements)} zero"
        sparsest = worst("highest sparsities", self.tensors, lambda one: one.name, lambda one: one.sparsity, share)
        return "\n".join([f"{self.path}: {total}, {len(self.tensors)} tensors", *sparsest])

    def to_dict(self) -> dict[str, Any]:
        """Return everything, sparsities included, as JSON carries it."""
        totals = {name: getattr(self, name) for name in ("num_elements", "num_zeros", "sparsity", "prunable_zeros")}
        tensors = [{**dataclasses.asdict(tensor), "sparsity": tensor.sparsity} for tensor in self.tensors]
        return {"path": self.path, **totals, "tensors": tensors}


def inspect_directory(path: str | Path, *, progress: Progress = None) -> InspectReport:
    """Return the sparsity of every tensor of a Hugging Face directory. Local; reads in bounded pieces.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: as :func:`open_directory`.
        ImportError: the extra ``hf`` is not installed.
    """
    directory = open_directory(path)
    prunable = _prunable(directory)
    work = [
        (local_shard(entry.name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")), file, entry)
        for file, entry in directory.tensors.values()
    ]
    reports = (_inspect_tensor(entry, slices, prunable) for _, entry, slices in stored_slices(work, progress))
    return InspectReport(str(directory.path), tuple(reports))


def _prunable(directory: HfDirectory) -> dict[str, list[int]] | None:
    """Return by the names of the tensors that are pruned by default the dims along which their inputs are stored.

    None are of a tensor that is no known matrix. ``None``: the config does not fit the tensors.
    """
    try:
        stored = find_stored(directory)
    except (NotImplementedError, ValueError, OSError):
        return None
    inputs_of: dict[str, list[int]] = {}
    for shard in stored.found.shards:
        inputs = range(0)
        with suppress(NotImplementedError, ValueError):
            matrix = matrix_of_weight(shard.module or nn.Module(), shard.attribute, shard.shape, shard.name)
            inputs = matrix.input_dims(shard.shape)
        for region in stored.stored[shard.name]:
            inputs_of[region.stored] = [place for place, dim in enumerate(region.dims) if dim in inputs]
    return inputs_of


def _inspect_tensor(entry: TensorEntry, slices: Slices, prunable: Mapping[str, Sequence[int]] | None) -> TensorReport:
    """Return what ``slices`` hold. ``prunable``: of tensors the dims of inputs, the last, or those before the last."""
    inputs = (prunable or {}).get(entry.name, [1] if len(entry.shape) == 2 else [])
    num_zeros, num_elements, num_in = 0, math.prod(entry.shape), math.prod(entry.shape[dim] for dim in inputs)
    possible = [(n, m) for n, m in PATTERNS if num_elements and num_in % m == 0]
    is_transposed = bool(inputs) and inputs[-1] + 1 < len(entry.shape)
    for _, values in slices:  # which cut no group: see ROWS_TOGETHER
        is_zero = values == 0
        num_zeros += int(torch.count_nonzero(is_zero))
        along = (is_zero.transpose(-1, -2) if is_transposed else is_zero).reshape(-1)
        possible = [(n, m) for n, m in possible if bool((along.view(-1, m).sum(dim=1) >= m - n).all())]
    patterns = tuple(f"{n}:{m}" for n, m in possible) if num_zeros < num_elements else ()
    dtype = str(entry.dtype).removeprefix("torch.")
    is_prunable = None if prunable is None else entry.name in prunable
    return TensorReport(entry.name, entry.shape, dtype, num_elements, num_zeros, patterns, is_prunable)
