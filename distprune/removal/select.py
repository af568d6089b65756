"""The elements of a sharded tensor that stay, evenly spread again: each rank hands over at most its shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from distprune.collectives import Communicator, as_bytes, from_bytes, swap_known, together
from distprune.shards import runs_of_splits, splits_of

__all__ = ["KeptIndices", "select"]


@dataclass(frozen=True)
class KeptIndices:
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


@dataclass(frozen=True)
class _Moves:
    """What this rank hands over to, and gets from, every rank; and how many indices it holds then."""

    sending: list[_Piece]
    coming: list[_Piece]
    num_kept: int


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
    with together(comm):
        moves = _moves(comm, tensor, shape, selection)
        if moves is None:
            is_held = not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
            return _take(local, dim, _own_index(tensor, shape, index)) if is_held else local
        parts = list(local.unbind(0)) if index.ndim == 2 else [local]
        part_dim = dim - (index.ndim == 2)
        width = _slice_size(parts, part_dim) * local.element_size()
        sizes = [of.numel(width) for of in moves.sending], [of.numel(width) for of in moves.coming]

    def make() -> list[torch.Tensor]:
        return [
            as_bytes([p.index_select(part_dim, at.to(p.device)) for p, (at, _) in of.beside(parts)])
            for of in moves.sending
        ]

    received = swap_known(comm, make, sizes)
    with together(comm):
        kept = local.new_empty([*local.shape[:dim], moves.num_kept, *local.shape[dim + 1 :]])
        kept_parts = list(kept.unbind(0)) if index.ndim == 2 else [kept]
        for of, piece in zip(moves.coming, received, strict=True):
            pairs = of.beside(kept_parts)
            like = [part.narrow(part_dim, 0, len(at)) for part, (_, at) in pairs]
            for (part, (_, at)), values in zip(pairs, from_bytes(piece, like), strict=True):
                part.index_copy_(part_dim, at.to(part.device), values.to(part.device))
    return kept


def _moves(comm: Communicator, tensor: torch.Tensor, shape: Sequence[int], selection: KeptIndices) -> _Moves | None:
    """Return what travels; ``None``: nothing does, because ``dim`` is not cut."""
    dim = selection.dim
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    axes = {split.axis for split in splits_of(tensor, dim, [0] * mesh.ndim) if split.num_chunks > 1}
    if not axes:
        return None
    own, sending, coming = mesh.get_coordinate(), [_Piece([])] * comm.size, [_Piece([])] * comm.size
    if own is None:
        return _Moves(sending, coming, 0)
    index = _own_index(tensor, shape, selection.index)
    slices = index if index.ndim == 2 else index[None]
    rank_of = {comm.global_rank(rank): rank for rank in range(comm.size)}
    for peer in (mesh.mesh == mesh.mesh).nonzero().tolist():
        if all(axis in axes or place == own[axis] for axis, place in enumerate(peer)):
            rank = rank_of[int(mesh.mesh[tuple(peer)])]
            sending[rank] = _piece(tensor, dim, shape[dim], slices, own, peer)
            coming[rank] = _piece(tensor, dim, shape[dim], slices, peer, own)
    return _Moves(sending, coming, len(_indices(tensor, dim, slices.shape[1], own)))


def _own_index(tensor: torch.Tensor, shape: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """Return of ``index`` what is for the slices along dim 0 that this rank holds; all of it where they are alike."""
    if index.ndim == 1 or not isinstance(tensor, DTensor):
        return index
    own = tensor.device_mesh.get_coordinate()
    return index[:0] if own is None else index[_indices(tensor, 0, shape[0], own)]


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
