"""Which k: the exact choice of the lowest among competitors that no rank holds together."""

from distprune.selection.competition import Competition
from distprune.selection.eligible import Eligible, NonZero
from distprune.selection.kth_value import Selection, select_lowest
from distprune.selection.order import Order, common_order
from distprune.selection.patterns import Block, NByM, Pattern, PerRow, Unstructured, check_divides, check_pattern
from distprune.selection.scan import Entry, Scores
from distprune.selection.within_rows import keep_highest_per_group, keep_highest_per_row

__all__ = [
    "Block",
    "Competition",
    "Eligible",
    "Entry",
    "NByM",
    "NonZero",
    "Order",
    "Pattern",
    "PerRow",
    "Scores",
    "Selection",
    "Unstructured",
    "check_divides",
    "check_pattern",
    "common_order",
    "keep_highest_per_group",
    "keep_highest_per_row",
    "select_lowest",
]
