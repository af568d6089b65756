"""A mask on a parameter, in place: pruned weights are zero, everything else stays as it was."""

from __future__ import annotations

import torch

from distprune.shards import chunk_size

__all__ = ["zero_where_pruned"]


@torch.no_grad()
def zero_where_pruned(local: torch.Tensor, mask: torch.Tensor) -> None:
    """Write 0 (never -0) into ``local`` wherever ``mask`` (bool, same local shape) is False, chunk by chunk."""
    if local.numel() == 0:
        return
    if local.is_contiguous():
        local, mask = local.view(-1), mask.view(-1)
    elif local.ndim == 0:
        local, mask = local.unsqueeze(0), mask.unsqueeze(0)
    step = max(1, chunk_size(local.device) * local.shape[0] // local.numel())
    for start in range(0, local.shape[0], step):
        local[start : start + step].masked_fill_(~mask[start : start + step], 0)
