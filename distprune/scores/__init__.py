"""How much each element matters. Higher = keep."""

from distprune.scores.magnitude import Magnitude
from distprune.scores.random import Random

__all__ = ["Magnitude", "Random"]
