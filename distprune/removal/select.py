"""The elements of a sharded tensor that stay, evenly spread again: each rank hands over at most its shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from distprune.collectives import Communicator, swap_together, together
from distprune.shards import runs_of_splits, splits_of

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """What stays along ``dim``: global indices, ascending. (kept,), or (size of dim 0, kept): other ones in each slice
    along dim 0."""

    dim: int
    index: torch.Tensor  # int64


@dataclass(frozen=True)
class _Piece:
    """What one rank has for another: of every slice, where it is with the sender and where with the receiver."""

    places: list[tuple[torch.Tensor, torch.Tensor]]  # by slice

    def beside(self, parts: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
        """Return the places of every slice beside it; none where there is nothing to hand over."""
        return list(zip(parts, self.places, strict=True)) if self.places else []

    def numel(self, slice_size: int) -> int:
        return slice_size * sum(len(sent) for sent, _ in self.places)


def select(
    comm: Communicator, tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int], selection: Selection
) -> torch.Tensor:
    """Return this rank's part of what stays, as ``tensor`` is laid out, of ``local``, its part of the global ``shape``.

    Every rank of ``comm`` must call it. Local, unless ``dim`` is cut: then one round of at most the shard, among the
    ranks that hold the parts of one copy.

    Raises:
        Exception: on every rank: what one raised, out of memory say.
    """
    dim, index = selection.dim, selection.index
    if not isinstance(tensor, DTensor):
        return _take(local, dim, index)
    mesh = tensor.device_mesh
    axes = {split.axis for split in splits_of(tensor, dim, [0] * mesh.ndim) if split.num_chunks > 1}
    own = mesh.get_coordinate()
    slices = index if index.ndim == 2 else index[None]
    if index.ndim == 2 and own is not None:
        slices = index[_indices(tensor, 0, shape[0], own)]
    if not axes:
        return local if own is None else _take(local, dim, index if index.ndim == 1 else slices)
    rank_of = {comm.global_rank(rank): rank for rank in range(comm.size)}
    sending, coming = [_Piece([])] * comm.size, [_Piece([])] * comm.size
    num_kept = 0
    if own is not None:
        num_kept = len(_indices(tensor, dim, slices.shape[1], own))
        for peer in (mesh.mesh == mesh.mesh).nonzero().tolist():
            if all(axis in axes or place == own[axis] for axis, place in enumerate(peer)):
                rank = rank_of[int(mesh.mesh[tuple(peer)])]
                sending[rank] = _piece(tensor, dim, shape[dim], slices, own, peer)
                coming[rank] = _piece(tensor, dim, shape[dim], slices, peer, own)
    parts = list(local.unbind(0)) if index.ndim == 2 else [local]
    part_dim = dim - (index.ndim == 2)
    width = _slice_size(parts, part_dim) * local.element_size()

    def make() -> list[torch.Tensor]:
        return [
            _bytes([p.index_select(part_dim, at.to(p.device)) for p, (at, _) in of.beside(parts)]) for of in sending
        ]

    sizes = [of.numel(width) for of in sending], [of.numel(width) for of in coming]
    received = swap_together(comm, make, sizes)
    kept = local.new_empty([*local.shape[:dim], num_kept, *local.shape[dim + 1 :]])
    with together(comm):
        kept_parts = list(kept.unbind(0)) if index.ndim == 2 else [kept]
        for of, piece in zip(coming, received, strict=True):
            begin = 0
            for part, (_, at) in of.beside(kept_parts):
                end = begin + len(at) * width
                values = piece[begin:end].clone().view(local.dtype)  # aligned
                values = values.view([*part.shape[:part_dim], len(at), *part.shape[part_dim + 1 :]])
                part.index_copy_(part_dim, at.to(part.device), values.to(part.device))
                begin = end
    return kept


def _indices(tensor: DTensor, dim: int, size: int, coordinate: Sequence[int]) -> torch.Tensor:
    """Return which indices of ``dim``, of the global ``size``, are held at ``coordinate``."""
    runs = runs_of_splits(size, splits_of(tensor, dim, coordinate))
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in runs)])


def _piece(
    tensor: DTensor, dim: int, size: int, slices: torch.Tensor, source: Sequence[int], target: Sequence[int]
) -> _Piece:
    held = _indices(tensor, dim, size, source)
    wanted = _indices(tensor, dim, slices.shape[1], target)
    places = []
    for index in slices:
        is_there = torch.isin(index[wanted], held)
        places.append((torch.searchsorted(held, index[wanted][is_there]), is_there.nonzero()[:, 0]))
    return _Piece(places)


def _take(local: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    index = index.to(local.device)
    if index.ndim == 1:
        return local.index_select(dim, index)
    kept = local.new_empty([*local.shape[:dim], index.shape[1], *local.shape[dim + 1 :]])
    for part, of, own in zip(kept, local, index, strict=True):
        torch.index_select(of, dim - 1, own, out=part)
    return kept


def _slice_size(parts: Sequence[torch.Tensor], dim: int) -> int:
    """Return how many elements one index along ``dim`` has."""
    shape = parts[0].shape if parts else ()
    return math.prod(size for at, size in enumerate(shape) if at != dim)


def _bytes(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(
        [torch.empty(0, dtype=torch.uint8), *(p.contiguous().view(-1).view(torch.uint8).cpu() for p in parts)]
    )
