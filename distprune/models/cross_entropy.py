"""The cross-entropy of many tokens, in chunks: logits in float32 are as large as a model's activations."""

from __future__ import annotations

import torch
from torch import nn

_CHUNK = 256  # tokens whose logits are in float32 at a time


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, gradient: torch.Tensor | None = None) -> float:
    """Return the cross-entropy of ``logits`` (tokens, vocabulary) for ``targets`` (tokens,), summed over tokens. Local.

    Float32 by token, added in float64. ``gradient``: where its gradient is written, like ``logits``.
    """
    loss = 0.0
    for start in range(0, len(logits), _CHUNK):
        rows = slice(start, start + _CHUNK)
        of_targets = targets[rows, None]
        log_probabilities = nn.functional.log_softmax(logits[rows].float(), dim=1)
        loss -= float(log_probabilities.gather(1, of_targets).sum(dtype=torch.float64))
        if gradient is not None:
            ones = torch.ones_like(of_targets, dtype=torch.float32)
            gradient[rows] = log_probabilities.exp_().scatter_add_(1, of_targets, -ones)
    return loss
