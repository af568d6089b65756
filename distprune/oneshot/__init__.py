"""One-shot pruning of a decoder, block after block: solvers, and the driver that runs them over the ranks."""

from distprune.oneshot.admm import ADMM
from distprune.oneshot.prune_blocks import UPDATING, OneShotMethod, prune_blocks
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.oneshot.solver import Solved, Solver, Solving
from distprune.oneshot.sparsegpt import SparseGPT

__all__ = [
    "ADMM",
    "UPDATING",
    "BlockReport",
    "OneShotMethod",
    "OneShotReport",
    "Solved",
    "Solver",
    "Solving",
    "SparseGPT",
    "prune_blocks",
]
