"""One-shot pruning of a decoder, block after block: solvers, and the driver that runs them over the ranks."""

from distprune.oneshot.admm import ADMM
from distprune.oneshot.allocation import Allocation, allocate
from distprune.oneshot.memory_plan import MemoryPlan, fitted, plan_walk
from distprune.oneshot.model_shape import shape_of
from distprune.oneshot.plan import (
    BlockRefit,
    OneShotMethod,
    Permute,
    Sequential,
    TargetsOf,
    default_sequential,
    default_targets,
    permuted_for,
    refit_of,
    share_of_targets,
    updates_weights,
)
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.oneshot.solver import Pruning, Solved, Solver, Stage
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.oneshot.walk_costs import WalkRequest

__all__ = [
    "ADMM",
    "Allocation",
    "BlockRefit",
    "BlockReport",
    "MemoryPlan",
    "OneShotMethod",
    "OneShotReport",
    "Permute",
    "Pruning",
    "Sequential",
    "Solved",
    "Solver",
    "SparseGPT",
    "Stage",
    "TargetsOf",
    "WalkRequest",
    "allocate",
    "default_sequential",
    "default_targets",
    "fitted",
    "permuted_for",
    "plan_walk",
    "prune_blocks",
    "refit_of",
    "shape_of",
    "share_of_targets",
    "updates_weights",
]
