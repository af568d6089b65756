"""One-shot pruning of a decoder, block after block: solvers, and the driver that runs them over the ranks."""

from distprune.oneshot.prune_blocks import OneShotMethod, prune_blocks
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.oneshot.solver import Solved, Solver, Solving
from distprune.oneshot.sparsegpt import SparseGPT

__all__ = [
    "BlockReport",
    "OneShotMethod",
    "OneShotReport",
    "Solved",
    "Solver",
    "Solving",
    "SparseGPT",
    "prune_blocks",
]
