"""Prune sharded PyTorch models in the layout they are already in.

``import distprune as prune`` reads like ``import torch.nn.utils.prune as prune``.
"""

from distprune.methods import (
    BasePruningMethod,
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    ParameterReport,
    PruneReport,
    PruningContainer,
    RandomStructured,
    RandomUnstructured,
    custom_from_mask,
    global_unstructured,
    identity,
    is_pruned,
    l1_unstructured,
    ln_structured,
    prune_each,
    prune_model,
    prune_shards,
    random_structured,
    random_unstructured,
    remove,
    shard_masks,
)
from distprune.selection import Block, NByM, PerRow, Unstructured
from distprune.shards import Geometry, LocalShard

__all__ = [
    "BasePruningMethod",
    "Block",
    "CustomFromMask",
    "Geometry",
    "Identity",
    "L1Unstructured",
    "LnStructured",
    "LocalShard",
    "NByM",
    "ParameterReport",
    "PerRow",
    "PruneReport",
    "PruningContainer",
    "RandomStructured",
    "RandomUnstructured",
    "Unstructured",
    "custom_from_mask",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "prune_each",
    "prune_model",
    "prune_shards",
    "random_structured",
    "random_unstructured",
    "remove",
    "shard_masks",
]
