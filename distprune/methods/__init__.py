"""Scores + pattern + mask: what a user calls."""

from distprune.methods.amount import check_amount
from distprune.methods.base import BasePruningMethod, PruningContainer
from distprune.methods.decide import Method, Scope
from distprune.methods.functions import (
    custom_from_mask,
    global_unstructured,
    identity,
    is_pruned,
    l1_pattern,
    l1_unstructured,
    ln_structured,
    prune_each,
    random_pattern,
    random_structured,
    random_unstructured,
    remove,
    shard_masks,
)
from distprune.methods.patterns import L1Pattern, RandomPattern
from distprune.methods.prune_model import prune_model, prune_shards
from distprune.methods.report import ParameterReport, PruneReport
from distprune.methods.structured import LnStructured, RandomStructured
from distprune.methods.unstructured import CustomFromMask, Identity, L1Unstructured, RandomUnstructured

__all__ = [
    "BasePruningMethod",
    "CustomFromMask",
    "Identity",
    "L1Pattern",
    "L1Unstructured",
    "LnStructured",
    "Method",
    "ParameterReport",
    "PruneReport",
    "PruningContainer",
    "RandomPattern",
    "RandomStructured",
    "RandomUnstructured",
    "Scope",
    "check_amount",
    "custom_from_mask",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_pattern",
    "l1_unstructured",
    "ln_structured",
    "prune_each",
    "prune_model",
    "prune_shards",
    "random_pattern",
    "random_structured",
    "random_unstructured",
    "remove",
    "shard_masks",
]
