"""``torch.nn.utils.prune``, its classes and functions, on modules in any layout."""

from distprune.pruning.torch_api.base import BasePruningMethod, PruningContainer
from distprune.pruning.torch_api.functions import (
    custom_from_mask,
    global_unstructured,
    identity,
    is_pruned,
    l1_pattern,
    l1_unstructured,
    ln_structured,
    prune_each,
    put_masks,
    random_pattern,
    random_structured,
    random_unstructured,
    remove,
)
from distprune.pruning.torch_api.methods import (
    CustomFromMask,
    Identity,
    L1Pattern,
    L1Unstructured,
    LnStructured,
    RandomPattern,
    RandomStructured,
    RandomUnstructured,
)
from distprune.pruning.torch_api.shard_masks import shard_masks

__all__ = [
    "BasePruningMethod",
    "CustomFromMask",
    "Identity",
    "L1Pattern",
    "L1Unstructured",
    "LnStructured",
    "PruningContainer",
    "RandomPattern",
    "RandomStructured",
    "RandomUnstructured",
    "custom_from_mask",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_pattern",
    "l1_unstructured",
    "ln_structured",
    "prune_each",
    "put_masks",
    "random_pattern",
    "random_structured",
    "random_unstructured",
    "remove",
    "shard_masks",
]
