"""With data, block by block: what the linear layers of a decoder are given, on any number of ranks."""

from distprune.calibration.available import available_bytes
from distprune.calibration.batches import Batches, WindowBatches
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.data import (
    calibration_windows,
    check_fit,
    load_samples,
    own_samples,
    spread,
    token_digest,
)
from distprune.calibration.listening import listening
from distprune.calibration.moments import Moments, MomentsOf
from distprune.calibration.order import BlockOrder, learn_order
from distprune.calibration.own_words import SELF, TOP_K, own_words, samples_of, texts_of, writing_bytes
from distprune.calibration.past_blocks import past_blocks
from distprune.calibration.sample_group import Axis, SampleGroup, find_sample_group, shared_axis
from distprune.calibration.sensitivity import Sensitivity, measure_sensitivities
from distprune.calibration.statistics import EXPERT_MEMORY, InputStatistics
from distprune.calibration.targets import Targets
from distprune.calibration.text import first_tokens
from distprune.calibration.token_ids import TokenIds, as_line, as_windows
from distprune.calibration.triangle import pack_triangle, triangle_shape, unpack_triangle
from distprune.calibration.visit import Visitor, visit_blocks, walking
from distprune.calibration.walk import Walk, with_hidden
from distprune.calibration.window_gradients import Measured, WindowGradients

__all__ = [
    "EXPERT_MEMORY",
    "SELF",
    "TOP_K",
    "Axis",
    "Batches",
    "BlockOrder",
    "InputStatistics",
    "Measured",
    "Moments",
    "MomentsOf",
    "SampleGroup",
    "Sensitivity",
    "Targets",
    "TokenIds",
    "Visitor",
    "Walk",
    "WindowBatches",
    "WindowGradients",
    "as_line",
    "as_windows",
    "available_bytes",
    "calibration_windows",
    "catch_inputs",
    "check_fit",
    "find_sample_group",
    "first_tokens",
    "learn_order",
    "listening",
    "load_samples",
    "measure_sensitivities",
    "own_samples",
    "own_words",
    "pack_triangle",
    "past_blocks",
    "samples_of",
    "shared_axis",
    "spread",
    "texts_of",
    "token_digest",
    "triangle_shape",
    "unpack_triangle",
    "visit_blocks",
    "walking",
    "with_hidden",
    "writing_bytes",
]
