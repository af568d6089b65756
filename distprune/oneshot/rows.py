"""The whole rows of a linear map that this rank works on.

Noun: the *rows* of a map are outputs; a row is all inputs' weights of one output, (in,). What one-shot
methods do to a row needs all of it and, but for counts, nothing of the other rows. So a map that is cut
along its outputs (or along the experts) is worked on where it lies; one that is cut along its inputs
(Conv1D under FSDP2, a row-wise map of tensor parallelism) is turned first, and turned back when done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from distprune.collectives import Communicator, exchange
from distprune.models import LinearMap
from distprune.shards import Geometry, LocalShard, Runs, StridedShard, chunk_runs, local_shard

__all__ = ["Rows", "whole_rows"]


@dataclass(frozen=True)
class Rows:
    """Rows of one map on this rank. ``weight`` (rows, in) is written to in place.

    ``runs`` says which rows of the ``num_out``; ``owned`` whether this rank counts them, replicas once; ``name`` is the
    map's in the model.
    """

    weight: torch.Tensor
    runs: Runs
    num_out: int
    owned: bool
    name: str = ""

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    def shard(self, values: torch.Tensor) -> LocalShard:
        """Return ``values`` (rows, columns) as this rank's part of a matrix (num_out, columns)."""
        num_columns = values.shape[1]
        geometry = Geometry((self.num_out, num_columns), (self.runs, ((0, num_columns),)))
        return LocalShard(self.name, values, geometry, self.owned, num_replicas=1)


@dataclass
class _Turned:
    """A parameter's local part once no dim of it cuts a row, and the way back."""

    local: torch.Tensor
    dim_runs: list[Runs]
    moves: list[tuple[int, list[int]]]  # (mesh axis, lengths along the inputs), in the order in which they were made


@contextmanager
def whole_rows(
    comm: Communicator, maps: Mapping[str, LinearMap], owned: Mapping[str, bool], prefix: str = ""
) -> Iterator[dict[str, Rows]]:
    """Yield this rank's rows of every map by name; what is written into them is in the parameters afterwards.

    ``owned`` is by parameter path; ``prefix`` is put before names to make them those in the model. A map of which
    this rank holds nothing has no rows (an expert that is elsewhere, too). Every rank must call it. A parameter cut
    along its inputs is turned to be cut along its outputs: one round, in which a rank hands over at most its shard, and
    one more when it is turned back; the others are views, and nothing is communicated. If the body raises, nothing is
    turned back.

    Raises:
        NotImplementedError: a placement this library does not know, or inputs cut twice in an order it
            does not know.
    """
    turned: dict[str, _Turned] = {}
    found: dict[str, Rows] = {}
    for name, linear in maps.items():
        path = linear.parameter_path
        if path not in turned:
            turned[path] = _turn(comm, path, linear)
        part = turned[path]
        experts, out_dim = part.dim_runs[0], _out_dim(linear)
        local = part.local
        if linear.expert is not None:
            place = [e for start, stop in experts for e in range(start, stop)]
            is_here = linear.expert in place
            local = local[place.index(linear.expert)] if is_here else local.new_empty((0, 0))
        weight = local.t() if linear.transposed else local
        runs = part.dim_runs[out_dim]
        if weight.numel() == 0:
            weight, runs = weight.new_empty((0, linear.num_in)), ()
        found[name] = Rows(weight, runs, linear.num_out, owned[path] and weight.numel() > 0, f"{prefix}{name}")
    yield found
    for linear in maps.values():
        if (last := turned.pop(linear.parameter_path, None)) is not None and last.moves:
            _turn_back(comm, linear, last)


def _out_dim(linear: LinearMap) -> int:
    return (0 if linear.expert is None else 1) + linear.transposed


def _in_dim(linear: LinearMap) -> int:
    return (0 if linear.expert is None else 1) + (not linear.transposed)


def _turn(comm: Communicator, path: str, linear: LinearMap) -> _Turned:
    parameter = linear.parameter.detach()
    shard = local_shard(path, parameter)
    part = _Turned(shard.local, list(shard.geometry.dim_runs), [])
    in_dim, out_dim = _in_dim(linear), _out_dim(linear)
    if not isinstance(parameter, DTensor):
        return part
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    axes = _cutting(path, parameter, in_dim)
    if not axes or coordinate is None:
        return part
    size, levels = linear.num_in, []
    for axis in axes:
        num_ranks = mesh.size(axis)
        sizes = [sum(b - a for a, b in chunk_runs(((0, size),), num_ranks, r)) for r in range(num_ranks)]
        levels.append((axis, sizes))
        size = sizes[coordinate[axis]]
    local = shard.local.reshape([sum(b - a for a, b in runs) for runs in part.dim_runs])
    for axis, sizes in reversed(levels):  # what was cut last is put together first
        local = exchange(comm, mesh.get_group(axis), local, in_dim, sizes, out_dim)
        part.dim_runs[out_dim] = chunk_runs(part.dim_runs[out_dim], mesh.size(axis), coordinate[axis])
        part.moves.append((axis, sizes))
    part.dim_runs[in_dim] = ((0, linear.num_in),)
    part.local = local
    return part


def _turn_back(comm: Communicator, linear: LinearMap, part: _Turned) -> None:
    parameter = linear.parameter.detach()
    assert isinstance(parameter, DTensor)
    mesh, original = parameter.device_mesh, local_shard(linear.parameter_path, parameter)
    in_dim, out_dim = _in_dim(linear), _out_dim(linear)
    levels = [sum(b - a for a, b in original.geometry.dim_runs[out_dim])]  # outputs held before each move
    coordinate = list(mesh.get_coordinate() or ())
    sizes_of_move = []
    for axis, _ in part.moves:
        num_ranks = mesh.size(axis)
        sizes = [sum(b - a for a, b in chunk_runs(((0, levels[-1]),), num_ranks, r)) for r in range(num_ranks)]
        sizes_of_move.append(sizes)
        levels.append(sizes[coordinate[axis]])
    local = part.local
    for (axis, _), sizes in zip(reversed(part.moves), reversed(sizes_of_move), strict=True):
        local = exchange(comm, mesh.get_group(axis), local, out_dim, sizes, in_dim)
    original.local.copy_(local.view(original.local.shape))


def _cutting(path: str, parameter: DTensor, dim: int) -> list[int]:
    """Return the mesh axes that cut ``dim``, in the order in which they do."""
    mesh = parameter.device_mesh
    cuts = [
        (axis, int(placement.split_factor) if isinstance(placement, StridedShard) else 1)
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim and mesh.size(axis) > 1
    ]
    axes = [axis for axis, _ in cuts]
    strides = [stride for _, stride in cuts]
    if all(stride == 1 for stride in strides):
        return axes
    # FSDP2 on top of tensor parallelism: the later axes have cut first.
    if set(strides[1:]) <= {1} and strides[0] == math.prod(mesh.size(axis) for axis in axes[1:]):
        return [*axes[1:], axes[0]]
    raise NotImplementedError(f"the inputs of {path!r} are cut in an order this library does not know")
