"""What the default run may take of a product of axes: every pair of their values. ``--whole`` runs the product.

What bears the marker ``whole`` is collected with ``--whole`` alone; of a test marked ``sampled`` so many rows are
collected by default (conftest.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
from _pytest.mark.structures import ParameterSet
from allpairspy import AllPairs

from tests.layouts import LAYOUTS, Layout

__all__ = ["Combination", "all_pairs", "in_turn", "only_whole", "over_layouts", "pairs_first", "rotated"]

Combination: TypeAlias = tuple[Any, ...]


def only_whole(*values: Any, id: str | None = None) -> ParameterSet:
    """Return a row of a parametrized test that only ``--whole`` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.whole)


def all_pairs(*axes: Sequence[Any]) -> list[Combination]:
    """Return combinations in which every pair of values of two axes stands; the same ones on every worker."""
    rows = AllPairs([list(range(len(axis))) for axis in axes])
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in rows]


def pairs_first(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Return all combinations: by default those in which every pair stands run, and with ``--whole`` the others."""
    by_default = all_pairs(*axes)
    others = [row for row in itertools.product(*axes) if row not in by_default]
    return [*(pytest.param(*row) for row in by_default), *(only_whole(*row) for row in others)]


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    by %= len(values)
    return [*values[by:], *values[:by]]


def in_turn(keys: Sequence[Any], cases: Sequence[Any], num: int = 1) -> list[ParameterSet]:
    """Return rows (key, cases): each key with ``num`` of ``cases`` in turn, and with ``--whole`` with the others."""
    found = []
    for i, key in enumerate(keys):
        name = "-".join(map(str, key)) if isinstance(key, tuple) else str(key)
        cases_of_key = rotated(cases, i * num)
        found.append(pytest.param(key, cases_of_key[:num], id=name))
        if cases_of_key[num:]:
            found.append(only_whole(key, cases_of_key[num:], id=f"{name}-whole"))
    return found


def over_layouts(*axes: Sequence[Any], layouts: Sequence[Layout] = LAYOUTS) -> list[ParameterSet]:
    """Return rows (layout, number of ranks, combinations of values of ``axes``).

    By default every pair of layout and value stands in them, and of values of two axes; the numbers of ranks that a
    layout has by default take its combinations in turn. With ``--whole`` up to four ranks (or the fewest that a layout
    has) take all, and more of them a third.
    """
    table = all_pairs(layouts, *axes)
    found = []
    for number, layout in enumerate(layouts):
        combinations = [row[1:] for row in table if row[0] is layout]
        sizes = rotated(layout.default_sizes, number)
        for i, size in enumerate(sizes):
            some = combinations[i :: len(sizes)] or [combinations[i % len(combinations)]]
            found.append(pytest.param(layout, size, some, id=f"{layout.name}-{size}"))
    product = list(itertools.product(*axes))
    found += [
        only_whole(layout, size, product[size % step :: step], id=f"{layout.name}-{size}-whole")
        for layout in layouts
        for size in layout.world_sizes
        for step in (1 if size <= max(4, layout.world_sizes[0]) else 3,)
    ]
    return found
