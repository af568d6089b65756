"""With data, block by block: what the linear maps of a decoder are given, on any number of ranks."""

from distprune.calibration.data import Samples, load_samples, spread
from distprune.calibration.report import BlockReport, MapReport, OneShotReport
from distprune.calibration.sequential import OneShotMethod, prune_blocks
from distprune.calibration.statistics import InputStatistics, Moments, MomentsOf
from distprune.calibration.walk import Walk, catch_inputs

__all__ = [
    "BlockReport",
    "InputStatistics",
    "MapReport",
    "Moments",
    "MomentsOf",
    "OneShotMethod",
    "OneShotReport",
    "Samples",
    "Walk",
    "catch_inputs",
    "load_samples",
    "prune_blocks",
    "spread",
]
