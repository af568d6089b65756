"""Units leave a model: it becomes smaller in the layout it is in."""

from distprune.removal.plan import Kept
from distprune.removal.rebuild import check_layers, check_units, remove_layers, remove_units

__all__ = ["Kept", "check_layers", "check_units", "remove_layers", "remove_units"]
