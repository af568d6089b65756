"""What the default run takes of the contracts is neither empty nor one-sided: every pair stands in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract import SCRIPTS, own_cases
from tests.layouts import LAYOUTS
from tests.pruning.test_patterns import CASES as PATTERNS, KINDS as PATTERN_KINDS
from tests.sampling import all_pairs, over_layouts
from tests.test_contract import DTYPES, KINDS, SCOPES, SCORES
from tests.test_contract_reparametrized import VALUES

CONTRACTS: dict[str, tuple[Sequence[Any], ...]] = {
    "plain": (SCORES, SCOPES, DTYPES, KINDS),
    "reparametrized": (SCRIPTS, VALUES),
    "patterns": (PATTERNS, PATTERN_KINDS),
    "own": (range(len(own_cases())),),
}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_pair_is_run_by_default(contract: str) -> None:
    axes = CONTRACTS[contract]
    rows: list[Any] = [row.values for row in over_layouts(*axes) if not row.marks]
    assert sorted((layout.name, size) for layout, size, _ in rows) == sorted(
        (layout.name, size) for layout in LAYOUTS for size in layout.default_sizes
    )
    assert {size for _, size, _ in rows} == {1, 2, 3, 4, 8}
    met = {(layout.name, *map(str, some)) for layout, _, combinations in rows for some in combinations}
    named = [[layout.name for layout in LAYOUTS], *([str(value) for value in axis] for axis in axes)]
    for (i, first), (j, second) in itertools.combinations(enumerate(named), 2):
        assert {(row[i], row[j]) for row in met} == set(itertools.product(first, second))
    for value in itertools.chain(*axes):
        sizes = {size for _, size, combinations in rows if any(value in some for some in combinations)}
        assert min(sizes) < 3 < max(sizes), value
        assert len(sizes) > 2, value


def test_whole_runs_the_product() -> None:
    rows = [row for row in over_layouts(SCORES, SCOPES) if row.marks]
    assert len(rows) == sum(len(layout.world_sizes) for layout in LAYOUTS)
    product = list(itertools.product(SCORES, SCOPES))
    values: list[Any] = [row.values for row in rows]
    for layout, size, some in values:
        takes_all = size <= 4 or size == layout.world_sizes[0]
        assert some == product if takes_all else len(product) // 3 <= len(some) and {*some} < {*product}
    assert {mark.name for row in rows for mark in row.marks} == {"whole"}


def test_pairs_do_not_change_from_run_to_run() -> None:
    assert all_pairs("ab", "xy", "12") == [("a", "x", "1"), ("b", "y", "1"), ("b", "x", "2"), ("a", "y", "2")]
