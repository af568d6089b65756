"""The exact k lowest of competitors that are spread over ranks."""

from distprune.selection.competition import Competition
from distprune.selection.decide import decide_together
from distprune.selection.highest import keep_groups_of_bits, keep_highest_per_group, keep_highest_per_row
from distprune.selection.kth_value import Selection, raise_nans, select_lowest
from distprune.selection.order import Order, OrderedBy, common_order
from distprune.selection.put import MaskPut, Put, put_size
from distprune.selection.scan import Entry, Keyed, count_beyond

__all__ = [
    "Competition",
    "Entry",
    "Keyed",
    "MaskPut",
    "Order",
    "OrderedBy",
    "Put",
    "Selection",
    "common_order",
    "count_beyond",
    "decide_together",
    "keep_groups_of_bits",
    "keep_highest_per_group",
    "keep_highest_per_row",
    "put_size",
    "raise_nans",
    "select_lowest",
]
