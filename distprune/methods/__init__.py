"""Scores + pattern + mask: what a user calls."""

from distprune.methods.prune_model import Method, Scope, prune_model, prune_shards
from distprune.methods.report import ParameterReport, PruneReport

__all__ = ["Method", "ParameterReport", "PruneReport", "Scope", "prune_model", "prune_shards"]
