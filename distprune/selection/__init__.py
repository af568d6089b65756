"""The exact k lowest of competitors that are spread over ranks."""

from distprune.selection.competition import Competition
from distprune.selection.kth_value import (
    PUT_NUMEL,
    Chosen,
    Counts,
    Put,
    Selection,
    put_whole,
    raise_nans,
    select_lowest,
)
from distprune.selection.order import Order, OrderedBy, common_order
from distprune.selection.scan import Entry, Keyed, count_beyond
from distprune.selection.within_rows import keep_groups_of_bits, keep_highest_per_group, keep_highest_per_row

__all__ = [
    "PUT_NUMEL",
    "Chosen",
    "Competition",
    "Counts",
    "Entry",
    "Keyed",
    "Order",
    "OrderedBy",
    "Put",
    "Selection",
    "common_order",
    "count_beyond",
    "keep_groups_of_bits",
    "keep_highest_per_group",
    "keep_highest_per_row",
    "put_whole",
    "raise_nans",
    "select_lowest",
]
