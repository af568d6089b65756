"""Prune sharded PyTorch models in the layout they are already in."""

from distprune.methods import ParameterReport, PruneReport, prune_model, prune_shards
from distprune.shards import Geometry, LocalShard

__all__ = ["Geometry", "LocalShard", "ParameterReport", "PruneReport", "prune_model", "prune_shards"]
