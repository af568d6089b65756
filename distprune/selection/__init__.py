"""Which k: the exact choice of the lowest among competitors that no rank holds together."""

from distprune.selection.competition import Competition
from distprune.selection.eligible import Eligible, NonZero
from distprune.selection.kth_value import Selection, select_lowest
from distprune.selection.order import Order, common_order
from distprune.selection.scan import Entry, Scores
from distprune.selection.within_rows import keep_highest_per_group, keep_highest_per_row

__all__ = [
    "Competition",
    "Eligible",
    "Entry",
    "NonZero",
    "Order",
    "Scores",
    "Selection",
    "common_order",
    "keep_highest_per_group",
    "keep_highest_per_row",
    "select_lowest",
]
