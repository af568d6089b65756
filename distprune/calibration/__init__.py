"""With data, block by block: what the linear maps of a decoder are given, on any number of ranks."""

from distprune.calibration.data import Samples, load_samples, spread
from distprune.calibration.linear_maps import LinearMap, linear_maps
from distprune.calibration.report import BlockReport, MapReport, OneShotReport
from distprune.calibration.sequential import OneShotMethod, prune_blocks
from distprune.calibration.statistics import InputStatistics, Moments, MomentsOf
from distprune.calibration.walk import Walk, catch_inputs

__all__ = [
    "BlockReport",
    "InputStatistics",
    "LinearMap",
    "MapReport",
    "Moments",
    "MomentsOf",
    "OneShotMethod",
    "OneShotReport",
    "Samples",
    "Walk",
    "catch_inputs",
    "linear_maps",
    "load_samples",
    "prune_blocks",
    "spread",
]
