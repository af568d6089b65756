"""A checkpoint of a thousand ranks' model, of which only the headers are there, and what one rank plans of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.hf_directory import HfDirectory, open_together, sample_together
from distprune.checkpoint.hf_load import slices_to_read
from distprune.checkpoint.regions import Region
from distprune.checkpoint.stored_parameters import find_stored
from distprune.checkpoint.weight_file import header_of, mapped_tensors, planned
from distprune.jobs.streamed import FileWriter
from distprune.pruning.agreement import NamedWeights
from distprune.pruning.prune_model import Request
from distprune.pruning.streamed import StreamedPruning
from tests.fake_ranks import EqualRanks

__all__ = ["PLANS"]

_OF_A_FILE = 50  # parameters


@cache
def _stored(num_parameters: int, shape: tuple[int, ...]) -> Path:
    """Return the directory of a checkpoint of so many tensors."""
    folder = Path(_folder().name) / f"{num_parameters} of {shape}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = [f"p{i}" for i in range(num_parameters)]
    weight_map: dict[str, str] = {}
    for first in range(0, num_parameters, _OF_A_FILE):
        path = folder / f"model-{first}.safetensors"
        file = planned(path, [(name, torch.float32, shape) for name in names[first:][:_OF_A_FILE]])
        path.write_bytes(header_of(file.tensors))
        os.truncate(path, file.tensors[-1].stop)
        weight_map |= {entry.name: path.name for entry in file.tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _opened(model: nn.Module, comm: EqualRanks) -> HfDirectory:
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    directory = open_together(comm, _stored(len(shapes), shapes[0]))
    sample_together(comm, directory)
    return directory


def plan_to_read(model: nn.Module, comm: EqualRanks) -> int:
    """Open a checkpoint of ``model`` and find what this rank reads of it; return how many slices."""
    directory = _opened(model, comm)
    regions = {name: [Region.whole(name, name, entry.shape)] for name, (_, entry) in directory.tensors.items()}
    return sum(map(len, slices_to_read(model, directory, regions)))


def plan_to_stream(model: nn.Module, comm: EqualRanks) -> int:
    """Open a checkpoint of ``model`` and find what this rank writes of it, pruned; return how many pieces."""
    directory = _opened(model, comm)
    stored = find_stored(directory, include="*")
    files: Any = SimpleNamespace(comm=comm)
    tensors = mapped_tensors(directory.weight_files)
    request = Request(NamedWeights(stored.found), None, "magnitude", "2:4", None, 0, None)
    pruning = StreamedPruning(comm, request, stored.values(tensors))
    writer = FileWriter(files, directory, stored, pruning, tensors)
    return sum(len([*writer.work(writer.plan(file, file.path))]) for file in directory.weight_files)


# What is counted and timed, by name.
PLANS: dict[str, Callable[[nn.Module, EqualRanks], int]] = {
    "plan to read": plan_to_read,
    "plan to stream": plan_to_stream,
}
