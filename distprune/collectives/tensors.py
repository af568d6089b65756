"""Large tensors on their way between ranks: from one to all, put together, looked up, turned from dim to dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distprune.collectives.base import Communicator
from distprune.collectives.process_group import staging_device

__all__ = ["broadcast_tensor", "exchange", "gather_features", "gather_pairwise", "lookup_rows", "whole_tensor"]


def broadcast_tensor(comm: Communicator, values: torch.Tensor, source: int) -> torch.Tensor:
    """Return what rank ``source`` passed as ``values``, on the CPU (one round, the tensor's bytes).

    Every rank of ``comm`` must call it with the same shape and dtype; what the others pass is not read.
    """
    values = values.detach().to("cpu", copy=comm.rank != source).contiguous()
    buffer = values.view(-1).view(torch.uint8)
    comm._count(buffer.numel())
    if buffer.numel():
        comm._broadcast_in_place(buffer, source)
    return values


def exchange(
    comm: Communicator,
    group: dist.ProcessGroup,
    local: torch.Tensor,
    whole_dim: int,
    sizes: list[int],
    cut_dim: int,
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
    shapes = [[*shape[:whole_dim], size, *shape[whole_dim + 1 :]] for size in sizes]
    numels = [torch.Size(s).numel() for s in shapes]
    device = staging_device(group)
    sent = torch.cat(pieces).to(device)
    received = sent.new_empty(sum(numels))
    comm._count(max(sent.numel(), received.numel()) * sent.element_size())
    dist.all_to_all_single(received, sent, numels, [piece.numel() for piece in pieces], group=group)
    parts = torch.split(received.to(local.device), numels)
    return torch.cat([part.view(s) for part, s in zip(parts, shapes, strict=True)], dim=whole_dim)


def gather_features(
    comm: Communicator, group: dist.ProcessGroup, local: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Return (tokens, sum of ``sizes``): the ranks' ``local`` (tokens, ``sizes[r]``) side by side.

    For activations, which tensor parallelism cuts along their features; never for parameters. Every rank
    of ``group`` must call it, with as many tokens and the same dtype: one round, counted in the traffic of
    ``comm``, of the result's bytes (every part padded to the largest).
    """
    width = max(sizes)
    sent = local.new_zeros((local.shape[0], width))
    sent[:, : local.shape[1]] = local
    staged = sent.view(torch.uint8).to(staging_device(group))  # bytes: not every backend knows every dtype
    parts = [torch.empty_like(staged) for _ in sizes]
    comm._count(staged.numel() * len(sizes))
    if staged.numel():
        dist.all_gather(parts, staged, group=group)
    received = [part.to(local.device).view(local.dtype) for part in parts]
    return torch.cat([part[:, :size] for part, size in zip(received, sizes, strict=True)], dim=1)


def gather_pairwise(group: dist.ProcessGroup, wholes: Sequence[torch.Tensor]) -> None:
    """Fill each of ``wholes``, of which this rank has written its own of as many equal stretches as ranks.

    They are contiguous and 1-D. Every rank of ``group``, which must be gloo's, must call it with equally many, of
    equal sizes: one message to and from every other rank for each of them, of a stretch, all under way at once. Of
    tensors of some MB it takes half as long as gloo's all-gather.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    stretches = [whole.chunk(num_ranks) for whole in wholes if whole.numel()]
    others = [other for other in range(num_ranks) if other != rank]
    under_way = [dist.irecv(of[other], group=group, group_src=other) for other in others for of in stretches]
    under_way += [dist.isend(of[rank], group=group, group_dst=other) for other in others for of in stretches]
    for message in under_way:
        if message is not None:
            message.wait()


def lookup_rows(
    comm: Communicator, group: dist.ProcessGroup, local: torch.Tensor, num_rows: int, indices: torch.Tensor
) -> torch.Tensor:
    """Return rows ``indices`` of a matrix (``num_rows``, columns), on the device of ``local``.

    ``local`` is this rank's chunk of its rows, as ``torch.chunk`` cuts them over ``group``; ``indices`` are
    different and ascending, and may be other ones, and another number, on every rank. Every rank of ``group`` must
    call it: three rounds, counted in the traffic of ``comm``, of 8 bytes a rank, 8 bytes an index, and the rows.

    Raises:
        IndexError: on this rank alone, before anything is sent: an index out of range.
    """
    if len(indices) and not 0 <= int(indices[0]) <= int(indices[-1]) < num_rows:
        raise IndexError(f"rows {int(indices[0])} to {int(indices[-1])} of a matrix of {num_rows} rows")
    num_ranks, rank, device = dist.get_world_size(group), dist.get_rank(group), staging_device(group)
    step = -(-num_rows // num_ranks)
    indices = indices.to(device)
    ends = torch.searchsorted(indices, torch.arange(1, num_ranks + 1, device=device) * step)
    asked = ends.diff(prepend=ends.new_zeros(1))
    answered = torch.empty_like(asked)
    comm._count(asked.numel() * asked.element_size())
    dist.all_to_all_single(answered, asked, group=group)
    num_asked, num_answered = asked.tolist(), answered.tolist()
    wanted = indices.new_empty(sum(num_answered))
    comm._count(8 * max(sum(num_asked), sum(num_answered)))
    dist.all_to_all_single(wanted, indices, num_answered, num_asked, group=group)
    rows = local[(wanted - rank * step).to(local.device)].contiguous()
    staged = rows.view(torch.uint8).to(device)  # bytes: not every backend knows every dtype
    found = staged.new_empty((sum(num_asked), staged.shape[1]))
    comm._count(max(staged.numel(), found.numel()))
    dist.all_to_all_single(found, staged, num_asked, num_answered, group=group)
    return found.to(local.device).view(local.dtype)


def whole_tensor(comm: Communicator, sharded: DTensor) -> torch.Tensor:
    """Return the whole of a small ``sharded`` tensor, a norm's weight say; never for what grows with the model.

    Every rank of its mesh must call it: one round, counted in the traffic of ``comm``, of the tensor's bytes; none of
    what is whole everywhere.
    """
    if not all(placement.is_replicate() for placement in sharded.placements):
        comm._count(sharded.numel() * sharded.element_size())
    return sharded.full_tensor().detach()
