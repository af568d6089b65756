"""Wanda: the size of a weight times the norm of its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Score


@final
@dataclass(frozen=True)
class Wanda(Score):
    """|W_ij| * ||X_j||_2 (arXiv 2306.11695, section 3). Evidence ``input_norm``: ||X_j||_2, float32, per weight.

    >>> report = prune_blocks(llama, samples, method=Wanda(), pattern=PerRow(0.5))  # or 0.5, method="wanda"
    >>> report.sparsity
    0.5
    """

    needs = ("input_norm",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight.abs().float() * elements["input_norm"]
