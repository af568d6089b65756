"""One-shot pruning of a decoder, block after block: solvers, and the driver that runs them over the ranks."""

from distprune.oneshot.admm import ADMM
from distprune.oneshot.prune_blocks import OneShotMethod, Sequential, TargetsOf, prune_blocks, updates_weights
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.oneshot.solver import Solved, Solver, Solving, Stage
from distprune.oneshot.sparsegpt import SparseGPT

__all__ = [
    "ADMM",
    "BlockReport",
    "OneShotMethod",
    "OneShotReport",
    "Sequential",
    "Solved",
    "Solver",
    "Solving",
    "SparseGPT",
    "Stage",
    "TargetsOf",
    "prune_blocks",
    "updates_weights",
]
