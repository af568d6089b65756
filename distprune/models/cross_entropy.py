"""The cross-entropy of many tokens, in chunks: logits in float32 are as large as a model's activations."""

from __future__ import annotations

import torch
from torch import nn

_CHUNK = 1 << 24  # logits that are in float32 at a time


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Return the cross-entropy of ``logits`` (tokens, vocabulary) for ``targets`` (tokens,), summed over tokens. Local.

    Float32 by token, added in float64, 0-D where the logits are. ``gradient``: where its gradient is written, like
    ``logits``.
    """
    loss = torch.zeros((), dtype=torch.float64, device=logits.device)
    step = token_chunk(logits.shape[-1])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        wanted = targets[rows, None]
        log_probabilities = nn.functional.log_softmax(logits[rows].float(), dim=1)
        loss -= log_probabilities.gather(1, wanted).sum(dtype=torch.float64)
        if gradient is not None:
            ones = torch.ones_like(wanted, dtype=torch.float32)
            gradient[rows] = log_probabilities.exp_().scatter_add_(1, wanted, -ones)
    return loss


def token_chunk(vocabulary: int) -> int:
    """Return of how many tokens logits are worked on at a time."""
    return max(1, _CHUNK // vocabulary)
