"""Score, choose, apply: what a user calls."""

from distprune.pruning.masks import Masks, sparsity
from distprune.pruning.overlap import Overlap
from distprune.pruning.prune_model import compute_masks, prune_model, prune_shards
from distprune.pruning.report import ParameterReport, PruneReport

__all__ = [
    "Masks",
    "Overlap",
    "ParameterReport",
    "PruneReport",
    "compute_masks",
    "prune_model",
    "prune_shards",
    "sparsity",
]
