"""One-shot pruning of a decoder, block after block: solvers, and the driver that runs them over the ranks."""

from distprune.oneshot.admm import ADMM
from distprune.oneshot.allocation import Allocation, allocate
from distprune.oneshot.plan import (
    OneShotMethod,
    Sequential,
    TargetsOf,
    default_targets,
    share_of_targets,
    updates_weights,
)
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.oneshot.solver import Pruning, Solved, Solver, Stage
from distprune.oneshot.sparsegpt import SparseGPT

__all__ = [
    "ADMM",
    "Allocation",
    "BlockReport",
    "OneShotMethod",
    "OneShotReport",
    "Pruning",
    "Sequential",
    "Solved",
    "Solver",
    "SparseGPT",
    "Stage",
    "TargetsOf",
    "allocate",
    "default_targets",
    "prune_blocks",
    "share_of_targets",
    "updates_weights",
]
