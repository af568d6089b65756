"""Prune sharded PyTorch models in the layout they are already in.

``import distprune as prune`` reads like ``import torch.nn.utils.prune as prune``.
"""

from distprune.calibration.data import calibration_windows
from distprune.calibration.own_words import own_words
from distprune.checkpoint.hf_load import load
from distprune.checkpoint.hf_save import save
from distprune.evaluation import perplexity
from distprune.masks.adapters import merge_adapters
from distprune.masks.plain_keys import dense_state_dict
from distprune.oneshot.admm import ADMM
from distprune.oneshot.allocation import allocate
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import OneShotReport
from distprune.oneshot.solver import Solver
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.patterns.base import Pattern
from distprune.patterns.block import Block
from distprune.patterns.channels import Channels
from distprune.patterns.n_by_m import NByM
from distprune.patterns.unstructured import Unstructured
from distprune.patterns.within_rows import PerRow
from distprune.pruning.masks import Masks, Overlap, sparsity
from distprune.pruning.prune_model import compute_masks, prune_model, prune_shards
from distprune.pruning.report import ParameterReport, PruneReport
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
    shard_masks,
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
from distprune.removal.shrink_model import Shrunk, shrink_model
from distprune.scores.as_score import Gradient, Magnitude, Movement, Taylor, Wanda
from distprune.scores.base import Score
from distprune.scores.channel_norm import ChannelNorm
from distprune.scores.random import Random
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership
from distprune.training.hold import Hold, hold_zeros
from distprune.training.regrowth import Regrow
from distprune.training.report import TrainingReport
from distprune.training.schedules import at_once, constant, cubic, erk, stepwise
from distprune.training.sparse_training import SparseTraining
from distprune.training.straight_through import StraightThrough
from distprune.version import __version__

__all__ = ["Masks", "Overlap", "ParameterReport", "PruneReport", "compute_masks", "prune_model", "prune_shards"]
__all__ += ["Block", "Channels", "NByM", "Pattern", "PerRow", "Unstructured"]
__all__ += ["ChannelNorm", "Gradient", "Magnitude", "Movement", "Random", "Score", "Taylor", "Wanda"]
__all__ += ["ADMM", "OneShotReport", "Solver", "SparseGPT", "allocate", "prune_blocks"]
__all__ += ["calibration_windows", "own_words", "perplexity", "sparsity"]
__all__ += ["Hold", "Regrow", "SparseTraining", "StraightThrough", "TrainingReport", "erk", "hold_zeros"]
__all__ += ["at_once", "constant", "cubic", "stepwise"]
__all__ += ["Shrunk", "shrink_model"]
__all__ += ["__version__", "dense_state_dict", "load", "merge_adapters", "save", "shard_masks"]
__all__ += ["Geometry", "LocalShard", "Ownership"]
__all__ += ["BasePruningMethod", "CustomFromMask", "Identity", "PruningContainer"]
__all__ += ["L1Pattern", "L1Unstructured", "LnStructured", "RandomPattern", "RandomStructured", "RandomUnstructured"]
__all__ += ["identity", "l1_unstructured", "ln_structured", "random_structured", "random_unstructured"]
__all__ += ["custom_from_mask", "global_unstructured", "is_pruned", "l1_pattern", "prune_each", "random_pattern"]
__all__ += ["remove"]
