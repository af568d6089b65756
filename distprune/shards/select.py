"""The elements of a sharded tensor that stay, or change places, evenly spread again: each rank hands over at most its
shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from distprune.collectives.agree import swap_known, together
from distprune.collectives.base import Communicator
from distprune.collectives.tensors import as_bytes, from_bytes
from distprune.shards.device import sent
from distprune.shards.geometry import indices_of, runs_of_splits
from distprune.shards.layouts import splits_of

# What one rank has for another: of every slice, where it is with the sender and where with the receiver.
_Piece = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class KeptIndices:
    """What stays along ``dim``: global indices, each at most once, in any order. (kept,), or (size of dim 0, kept):
    other ones in each slice along dim 0."""

    dim: int
    index: torch.Tensor  # int64


def select(
    comm: Communicator, tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int], selection: KeptIndices
) -> torch.Tensor:
    """Return this rank's part of what stays, as ``tensor`` is laid out, of ``local``, its part of the global ``shape``.

    Every rank of ``comm`` must call it: one round of 64 bytes, and two where ``dim`` is cut, with one of at most the
    shard, among the ranks that hold the parts of one copy.

    Raises:
        Exception: on every rank: what one raised, out of memory say.
    """
    dim, index = selection.dim, selection.index
    is_sliced = index.ndim == 2
    part_dim = dim - is_sliced  # of a slice
    slices: list[torch.Tensor] = []  # what stays of each slice that this rank holds
    num_kept, axes = 0, set[int]()  # the mesh axes that cut dim
    with together(comm):
        own: Sequence[int] | None = ()
        if isinstance(tensor, DTensor):
            own = tensor.device_mesh.get_coordinate()
            splits = splits_of(tensor, dim, [0] * tensor.device_mesh.ndim)
            axes = {split.axis for split in splits if split.num_chunks > 1}
        if own is not None:
            slices = list(index[_held(tensor, 0, shape[0], own)] if is_sliced else index[None])
            num_kept = len(_held(tensor, dim, index.shape[-1], own))
        kept_shape = [*local.shape[:dim], num_kept, *local.shape[dim + 1 :]]
        parts = _parts(local, is_sliced)
        if not axes:
            kept = local.new_empty(kept_shape)
            for part, at, out in zip(parts, slices, _parts(kept, is_sliced), strict=False):
                torch.index_select(part, part_dim, sent(at, part.device), out=out)
            return kept
        sending, coming = _moves(comm, tensor, axes, dim, shape[dim], slices)
        num_bytes = local.element_size() * math.prod((*local.shape[is_sliced:dim], *local.shape[dim + 1 :]))
        to, back = ([num_bytes * sum(len(at) for at, _ in piece) for piece in pieces] for pieces in (sending, coming))

    def make() -> dict[int, torch.Tensor]:
        going = {rank: zip(parts, piece, strict=False) for rank, piece in enumerate(sending) if piece}
        return {
            rank: as_bytes([part.index_select(part_dim, sent(at, part.device)) for part, (at, _) in pieces])
            for rank, pieces in going.items()
        }

    received = swap_known(comm, make, (to, back))
    with together(comm):
        kept = local.new_empty(kept_shape)
        for piece, values in zip(coming, received, strict=True):
            into = [(out, at) for out, (_, at) in zip(_parts(kept, is_sliced), piece, strict=False)]
            like = [out.narrow(part_dim, 0, len(at)) for out, at in into]
            for (out, at), own_values in zip(into, from_bytes(values, like), strict=True):
                out.index_copy_(part_dim, at.to(out.device), own_values.to(out.device))
    return kept


def _parts(tensor: torch.Tensor, is_sliced: bool) -> list[torch.Tensor]:
    return list(tensor.unbind(0)) if is_sliced else [tensor]


def _moves(
    comm: Communicator, tensor: torch.Tensor, axes: Set[int], dim: int, size: int, slices: Sequence[torch.Tensor]
) -> tuple[list[_Piece], list[_Piece]]:
    """Return what this rank hands over to, and gets from, every rank. ``axes`` of the mesh cut ``dim``, of ``size``."""
    sending, coming = [_Piece()] * comm.size, [_Piece()] * comm.size
    assert isinstance(tensor, DTensor)
    mesh, own = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    if own is None:
        return sending, coming
    rank_of = {comm.global_rank(rank): rank for rank in range(comm.size)}

    def piece(source: Sequence[int], target: Sequence[int]) -> _Piece:
        found, held = _Piece(), _held(tensor, dim, size, source)
        for index in slices:
            wanted = index[_held(tensor, dim, len(index), target)]
            is_there = torch.isin(wanted, held)
            found.append((torch.searchsorted(held, wanted[is_there]), is_there.nonzero()[:, 0]))
        return found

    for peer in (mesh == mesh).nonzero().tolist():
        if all(axis in axes or place == own[axis] for axis, place in enumerate(peer)):
            rank = rank_of[int(mesh[tuple(peer)])]
            sending[rank], coming[rank] = piece(own, peer), piece(peer, own)
    return sending, coming


def _held(tensor: torch.Tensor, dim: int, size: int, coordinate: Sequence[int]) -> torch.Tensor:
    """Return which indices of ``dim``, of the global ``size``, are held at ``coordinate`` of the mesh."""
    return indices_of(runs_of_splits(size, splits_of(tensor, dim, coordinate) if isinstance(tensor, DTensor) else ()))
