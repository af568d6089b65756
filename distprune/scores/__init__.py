"""How much each element, or each channel, matters. Higher = keep."""

from distprune.scores.channel_norm import ChannelPart, Norm, channel_norms, check_norm, unpruned_channels
from distprune.scores.exact_sum import grid_scale, on_grid
from distprune.scores.magnitude import Magnitude
from distprune.scores.random import Random, random_channels

__all__ = [
    "ChannelPart",
    "Magnitude",
    "Norm",
    "Random",
    "channel_norms",
    "check_norm",
    "grid_scale",
    "on_grid",
    "random_channels",
    "unpruned_channels",
]
