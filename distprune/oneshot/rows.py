"""The whole rows of a linear layer that this rank works on.

Noun: the *rows* of a layer are outputs; a row is all inputs' weights of one output, (in,). What one-shot
methods do to a row needs all of it and, but for counts, nothing of the other rows. So a layer that is cut
along its outputs (or along the experts) is worked on where it lies; one that is cut along its inputs
(Conv1D under FSDP2, a row-wise layer of tensor parallelism) is turned first, and turned back when done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distprune.collectives.base import Communicator
from distprune.collectives.tensors import exchange
from distprune.models.linear_layers import LinearLayer, expert_place
from distprune.shards.device import on_host
from distprune.shards.geometry import Geometry, Runs, Split, chunk_runs, in_order
from distprune.shards.layouts import local_shard, splits_of
from distprune.shards.local_shard import LocalShard, Ownership

_ON_HOST, _ON_DEVICE = 1 << 20, 1 << 26  # weights that are worked on at a time; a solver has some ten copies of them


@dataclass(frozen=True)
class Rows:
    """Rows of one layer on this rank. ``weight`` (rows, in) is written to in place.

    ``runs`` says which rows of the ``num_out``; ``owned`` whether this rank counts them, replicas once; ``name`` is the
    layer's in the model.
    """

    weight: torch.Tensor
    runs: Runs
    num_out: int
    owned: bool
    name: str

    def shard(self, values: torch.Tensor) -> LocalShard:
        """Return ``values`` (rows, columns) as this rank's part of a matrix (num_out, columns)."""
        num_columns = values.shape[1]
        geometry = Geometry((self.num_out, num_columns), (self.runs, ((0, num_columns),)))
        return LocalShard(self.name, values, geometry, Ownership(self.owned))


@dataclass
class _Turned:
    """A parameter's local part once no dim of it cuts a row, and the way back."""

    shard: LocalShard  # as the parameter is laid out
    local: torch.Tensor
    dim_runs: list[Runs]
    moves: list[tuple[dist.ProcessGroup, list[int]]]  # in turn: the group, and its ranks' lengths along the outputs


def row_parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of the same rows of ``tensors``, all (rows, in): as many as are worked on at a time. Local."""
    num_rows, num_in = tensors[0].shape
    most = _ON_HOST if on_host(tensors[0].device) else _ON_DEVICE
    if num_rows:
        yield from zip(*(torch.split(tensor, max(1, most // max(num_in, 1))) for tensor in tensors), strict=True)


@contextmanager
def whole_rows(
    comm: Communicator, linears: Mapping[str, LinearLayer], owned: Mapping[str, bool], prefix: str = ""
) -> Iterator[dict[str, Rows]]:
    """Yield this rank's rows of every layer by name; what is written into them is in the parameters afterwards.

    ``owned`` is by parameter; ``prefix`` is put before names to make them those in the model. A layer of which
    this rank holds nothing has no rows (an expert that is elsewhere, too). Every rank must call it. For a parameter cut
    along its inputs, one round for each mesh axis that cuts them, in which a rank hands over at most its shard, and as
    many back; the others are views. If the body raises, nothing is turned back.

    Raises:
        NotImplementedError: a placement this library does not know, or inputs cut twice in an order it
            does not know.
    """
    turned: dict[str, _Turned] = {}
    rows: dict[str, Rows] = {}
    for name, linear in linears.items():
        path = linear.parameter_path
        if path not in turned:
            turned[path] = _turn(comm, path, linear)
        part = turned[path]
        local = part.local
        if linear.expert is not None:
            place = expert_place(part.dim_runs[0], linear.expert)
            local = local.new_empty((0, 0)) if place is None else local[place]
        weight = local.t() if linear.transposed else local
        runs = part.dim_runs[_dims(linear)[0]]
        if weight.numel() == 0:
            weight, runs = weight.new_empty((0, linear.num_in)), ()
        counts = owned[f"{prefix}{path}"] and weight.numel() > 0
        rows[name] = Rows(weight, runs, linear.num_out, counts, f"{prefix}{name}")
    yield rows
    for linear in linears.values():
        if (last := turned.pop(linear.parameter_path, None)) is not None and last.moves:
            _turn_back(comm, linear, last)


def _dims(linear: LinearLayer) -> tuple[int, int]:
    """Return which dims of the parameter are the outputs and the inputs."""
    first = 0 if linear.expert is None else 1
    return (first + 1, first) if linear.transposed else (first, first + 1)


def _turn(comm: Communicator, path: str, linear: LinearLayer) -> _Turned:
    parameter = linear.parameter.detach()
    shard = local_shard(path, parameter)
    part = _Turned(shard, shard.local, list(shard.geometry.dim_runs), [])
    out_dim, in_dim = _dims(linear)
    if not isinstance(parameter, DTensor):
        return part
    coordinate = parameter.device_mesh.get_coordinate() or ()
    splits = [split for split in in_order(splits_of(parameter, in_dim, coordinate)) if split.num_chunks > 1]
    if any(split.stride > 1 for split in splits):
        raise NotImplementedError(f"the inputs of {path!r} are cut in an order this library does not know")
    if not splits:
        return part
    in_runs: Runs = ((0, linear.num_in),)
    part.dim_runs[in_dim], in_sizes = in_runs, []
    for split in splits:
        sizes, in_runs = _chunks(in_runs, split)
        in_sizes.append(sizes)
    part.local = shard.local.reshape(shard.geometry.local_shape)
    for split, sizes in zip(reversed(splits), reversed(in_sizes), strict=True):  # what was cut last is joined first
        group = parameter.device_mesh.get_group(split.axis)
        out_sizes, part.dim_runs[out_dim] = _chunks(part.dim_runs[out_dim], split)
        part.local = exchange(comm, group, part.local, in_dim, sizes, out_dim)
        part.moves.append((group, out_sizes))
    return part


def _turn_back(comm: Communicator, linear: LinearLayer, part: _Turned) -> None:
    out_dim, in_dim = _dims(linear)
    for group, out_sizes in reversed(part.moves):
        part.local = exchange(comm, group, part.local, out_dim, out_sizes, in_dim)
    part.shard.local.copy_(part.local.view(part.shard.local.shape))


def _chunks(runs: Runs, split: Split) -> tuple[list[int], Runs]:
    """Return the sizes of all chunks of what ``runs`` cover, and this rank's chunk."""
    chunks = [chunk_runs(runs, split.num_chunks, index) for index in range(split.num_chunks)]
    return [sum(stop - start for start, stop in chunk) for chunk in chunks], chunks[split.index]
