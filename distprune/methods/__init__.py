"""Scores + pattern + mask: what a user calls."""

from distprune.methods.amount import check_amount
from distprune.methods.prune_model import Method, Scope, prune_model, prune_shards
from distprune.methods.report import ParameterReport, PruneReport

__all__ = ["Method", "ParameterReport", "PruneReport", "Scope", "check_amount", "prune_model", "prune_shards"]
