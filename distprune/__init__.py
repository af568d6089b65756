"""Prune sharded PyTorch models in the layout they are already in.

``import distprune as prune`` reads like ``import torch.nn.utils.prune as prune``.
"""

from distprune.calibration import calibration_windows, own_words
from distprune.checkpoint import load, save
from distprune.evaluation import perplexity
from distprune.masks import dense_state_dict, merge_adapters
from distprune.oneshot import ADMM, OneShotReport, Solver, SparseGPT, allocate, prune_blocks
from distprune.patterns import Block, Channels, NByM, Pattern, PerRow, Unstructured
from distprune.pruning import (
    Masks,
    Overlap,
    ParameterReport,
    PruneReport,
    compute_masks,
    prune_model,
    prune_shards,
    sparsity,
)
from distprune.pruning.torch_api.base import BasePruningMethod, CustomFromMask, PruningContainer
from distprune.pruning.torch_api.functions import (
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
)
from distprune.pruning.torch_api.helpers import (
    _compute_norm as _compute_norm,
    _compute_nparams_toprune as _compute_nparams_toprune,
    _validate_pruning_amount as _validate_pruning_amount,
    _validate_pruning_amount_init as _validate_pruning_amount_init,
    _validate_pruning_dim as _validate_pruning_dim,
    _validate_structured_pruning as _validate_structured_pruning,
)
from distprune.pruning.torch_api.methods import (
    Identity,
    L1Pattern,
    L1Unstructured,
    LnStructured,
    RandomPattern,
    RandomStructured,
    RandomUnstructured,
)
from distprune.pruning.torch_api.shard_masks import shard_masks
from distprune.removal import Shrunk, shrink_model
from distprune.scores import ChannelNorm, Gradient, Magnitude, Movement, Random, Score, Taylor, Wanda
from distprune.shards import Geometry, LocalShard, Ownership
from distprune.training import (
    Hold,
    Regrow,
    SparseTraining,
    StraightThrough,
    TrainingReport,
    at_once,
    constant,
    cubic,
    erk,
    hold_zeros,
    stepwise,
)
from distprune.version import __version__

__all__ = [
    "ADMM",
    "BasePruningMethod",
    "Block",
    "ChannelNorm",
    "Channels",
    "CustomFromMask",
    "Geometry",
    "Gradient",
    "Hold",
    "Identity",
    "L1Pattern",
    "L1Unstructured",
    "LnStructured",
    "LocalShard",
    "Magnitude",
    "Masks",
    "Movement",
    "NByM",
    "OneShotReport",
    "Overlap",
    "Ownership",
    "ParameterReport",
    "Pattern",
    "PerRow",
    "PruneReport",
    "PruningContainer",
    "Random",
    "RandomPattern",
    "RandomStructured",
    "RandomUnstructured",
    "Regrow",
    "Score",
    "Shrunk",
    "Solver",
    "SparseGPT",
    "SparseTraining",
    "StraightThrough",
    "Taylor",
    "TrainingReport",
    "Unstructured",
    "Wanda",
    "__version__",
    "allocate",
    "at_once",
    "calibration_windows",
    "compute_masks",
    "constant",
    "cubic",
    "custom_from_mask",
    "dense_state_dict",
    "erk",
    "global_unstructured",
    "hold_zeros",
    "identity",
    "is_pruned",
    "l1_pattern",
    "l1_unstructured",
    "ln_structured",
    "load",
    "merge_adapters",
    "own_words",
    "perplexity",
    "prune_blocks",
    "prune_each",
    "prune_model",
    "prune_shards",
    "random_pattern",
    "random_structured",
    "random_unstructured",
    "remove",
    "save",
    "shard_masks",
    "shrink_model",
    "sparsity",
    "stepwise",
]
