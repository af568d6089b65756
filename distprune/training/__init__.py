"""Training with zeros that stay zero, in any layout and with any optimizer."""

from distprune.training.hold import Hold, hold_zeros
from distprune.training.regrowth import Regrow
from distprune.training.report import TrainingReport, Update
from distprune.training.schedules import Schedule, at_once, constant, cubic, stepwise
from distprune.training.shares import erk
from distprune.training.sparse_training import SparseTraining
from distprune.training.straight_through import StraightThrough

__all__ = [
    "Hold",
    "Regrow",
    "Schedule",
    "SparseTraining",
    "StraightThrough",
    "TrainingReport",
    "Update",
    "at_once",
    "constant",
    "cubic",
    "erk",
    "hold_zeros",
    "stepwise",
]
