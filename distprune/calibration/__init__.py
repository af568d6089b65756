"""With data, block by block: what the linear maps of a decoder are given, on any number of ranks."""

from distprune.calibration.data import Samples, load_samples, spread
from distprune.calibration.linear_maps import LinearMap, linear_maps
from distprune.calibration.statistics import InputStatistics, Moments, MomentsOf
from distprune.calibration.walk import Walk, catch_inputs

__all__ = [
    "InputStatistics",
    "LinearMap",
    "Moments",
    "MomentsOf",
    "Samples",
    "Walk",
    "catch_inputs",
    "linear_maps",
    "load_samples",
    "spread",
]
