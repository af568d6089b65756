"""Large tensors on their way between ranks: from one to all, put together, and turned from one dim to another."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from distprune.collectives.base import Communicator
from distprune.collectives.process_group import staging_device

__all__ = ["broadcast_tensor", "exchange", "gather_features"]


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
