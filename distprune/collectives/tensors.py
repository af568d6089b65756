"""Large tensors on their way between ranks: from one to all, put together, looked up, turned from dim to dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distprune.collectives.base import Communicator
from distprune.collectives.communicator import staging_device

_PIECE_BYTES = 64 << 20  # of a tensor that is broadcast, staged at a time


def as_bytes(tensors: Sequence[torch.Tensor], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return ``tensors`` joined as they travel, uint8 on ``device``. Local; those of one device are copied at once."""
    pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len({piece.device for piece in pieces}) == 1:
        return torch.cat(pieces).to(device)
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(piece.to(device) for piece in pieces)])


def from_bytes(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that :func:`as_bytes` joined, of the shapes and dtypes of ``like``, where they are. Local."""
    pieces = torch.split(joined, [tensor.nbytes for tensor in like]) if like else ()
    # A copy is aligned for any dtype.
    return [piece.clone().view(one.dtype).view(one.shape) for piece, one in zip(pieces, like, strict=True)]


def broadcast_tensor(comm: Communicator, values: torch.Tensor, source: int) -> torch.Tensor:
    """Return what rank ``source`` passed as ``values``, where they are (one round, the tensor's bytes).

    Every rank of ``comm`` must call it with the same shape and dtype. What the others pass, contiguous, is overwritten
    and returned. It travels in pieces, so that no more than 64 MiB of it are staged where the backend works elsewhere.
    """
    values = values.detach().contiguous()
    buffer = values.view(-1).view(torch.uint8)
    with comm.round(buffer.numel()):
        for piece in torch.split(buffer, _PIECE_BYTES):
            if piece.numel():
                comm._broadcast_in_place(piece, source)
    return values


def exchange(
    comm: Communicator, group: dist.ProcessGroup, local: torch.Tensor, whole_dim: int, sizes: list[int], cut_dim: int
) -> torch.Tensor:
    """Return the local part with ``whole_dim`` put together and ``cut_dim`` cut instead, both over ``group``.

    ``sizes[r]`` is rank r's length along ``whole_dim`` before; every rank holds all of ``cut_dim``, of which
    it gets the chunk that ``torch.chunk`` would give it (the last ones shorter or empty). Every rank of
    ``group`` must call it. It hands over at most its shard and is handed at most as much: one round,
    counted in the traffic of ``comm``; nothing is gathered.
    """
    num_ranks, rank = len(sizes), dist.get_rank(group)
    step = -(-local.shape[cut_dim] // num_ranks)
    bounds = [min(r * step, local.shape[cut_dim]) for r in range(num_ranks + 1)]
    pieces = [local.narrow(cut_dim, a, b - a).reshape(-1) for a, b in itertools.pairwise(bounds)]
    shape = list(local.shape)
    shape[cut_dim] = bounds[rank + 1] - bounds[rank]
    shapes = [torch.Size([*shape[:whole_dim], size, *shape[whole_dim + 1 :]]) for size in sizes]
    numels = [s.numel() for s in shapes]
    sent = torch.cat(pieces).to(staging_device(group))
    received = sent.new_empty(sum(numels))
    with comm.round(max(sent.nbytes, received.nbytes)):
        dist.all_to_all_single(received, sent, numels, [piece.numel() for piece in pieces], group=group)
    parts = torch.split(received.to(local.device), numels)
    return torch.cat([part.view(s) for part, s in zip(parts, shapes, strict=True)], dim=whole_dim)


def gather_features(comm: Communicator, group: dist.ProcessGroup, local: torch.Tensor, num_in: int) -> torch.Tensor:
    """Return (tokens, ``num_in``): the ranks' ``local`` side by side, each the chunk that ``torch.chunk`` gives it.

    For activations, which tensor parallelism cuts along their features; never for parameters. Every rank
    of ``group`` must call it, with as many tokens and the same dtype: one round, counted in the traffic of
    ``comm``, of the result's bytes (every part padded to the largest).
    """
    num_ranks = dist.get_world_size(group)
    sent = local.new_zeros((local.shape[0], -(-num_in // num_ranks)))
    sent[:, : local.shape[1]] = local
    staged = sent.view(torch.uint8).to(staging_device(group))  # bytes: not every backend knows every dtype
    parts = staged.new_empty((num_ranks, *staged.shape))
    with comm.round(parts.numel()):
        if staged.numel():
            dist.all_gather(list(parts), staged, group=group)
    # Only the last chunks are shorter, so that what they are padded with is at the end.
    joined = parts.transpose(0, 1).reshape(local.shape[0], num_ranks * staged.shape[1])
    return joined.to(local.device).view(local.dtype)[:, :num_in]


def placed_like(values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return ``values``, a gradient of ``like``, with its placements: it may still be a sum over the ranks of a mesh.

    For the backward pass of a model, whose own communication it belongs to: it is not counted. Only of a ``DTensor``
    does it communicate; every rank of its mesh must call it then.
    """
    if isinstance(values, DTensor) and isinstance(like, DTensor):
        return values.redistribute(placements=like.placements)
    return values
