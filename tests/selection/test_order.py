"""The stated order, by value."""

from __future__ import annotations

import pytest
import torch

from distprune.selection.order import Order, OrderedBy, common_order

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# In order; equal ones together.
VALUES: dict[OrderedBy, list[list[float]]] = {
    "value": [[-torch.inf], [-3.5], [-1e-7], [-0.0, 0.0], [1e-7], [1.0], [3.5], [torch.inf]],
    "magnitude": [[-0.0, 0.0], [-1e-7, 1e-7], [-2.0, 2.0], [-torch.inf, torch.inf]],
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by", VALUES)
def test_floats(by: OrderedBy, dtype: torch.dtype) -> None:
    """NaN has no place among them."""
    order = Order(by, dtype)
    keys = [order.keys(torch.tensor(group, dtype=dtype)).tolist() for group in VALUES[by]]
    assert all(len(set(group)) == 1 for group in keys)
    ranked = [group[0] for group in keys]
    assert ranked == sorted(set(ranked))
    assert (ranked[0], ranked[-1]) == (order.first, order.last)
    assert order.values(ranked) == [float(torch.tensor(group[-1], dtype=dtype)) for group in VALUES[by]]
    assert (order.keys(torch.tensor([torch.nan, -torch.nan], dtype=dtype)) > order.last).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_may_be_gone(dtype: torch.dtype) -> None:
    order = common_order([("magnitude", dtype)], zeros_gone=True)
    keys = order.keys(torch.tensor([0.0, -0.0, 1e-7, -2.0], dtype=dtype)).tolist()
    assert keys[:2] == [order.gone] * 2
    assert order.first <= keys[2] < keys[3] <= order.last
    assert common_order([("value", dtype)], zeros_gone=True) == Order("value", dtype)


def test_integers_are_their_own_keys() -> None:
    order = common_order([("value", torch.int32)])
    assert order.keys(torch.tensor([-5, 0, 2**31 - 1], dtype=torch.int32)).tolist() == [-5, 0, 2**31 - 1]
    assert (order.gone, order.first, order.last) == (-(2**31), -(2**31) + 1, 2**31 - 1)
    assert int(order.keys(torch.tensor(-(2**31), dtype=torch.int32))) == order.first  # nothing is gone by its score
    assert order.values([-5]) == [-5]


COMMON = [
    ("magnitude", [torch.bfloat16], torch.bfloat16),
    ("magnitude", [torch.float16, torch.bfloat16], torch.float32),
    ("magnitude", [torch.float16, torch.float64], torch.float64),
    ("magnitude", [torch.float8_e4m3fn], torch.float32),
    ("value", [torch.int8], torch.int16),
    ("value", [torch.uint8], torch.int16),
    ("value", [torch.bool], torch.int16),
    ("value", [torch.int8, torch.int64], torch.int64),
    ("value", [torch.uint8, torch.int32], torch.int32),
]


@pytest.mark.parametrize(("by", "dtypes", "common"), COMMON)
def test_common_order(by: OrderedBy, dtypes: list[torch.dtype], common: torch.dtype) -> None:
    assert common_order((by, dtype) for dtype in dtypes) == Order(by, common)


def test_no_common_order() -> None:
    for kinds, why in (
        ([("value", torch.float32), ("value", torch.int32)], "no common order"),
        ([("value", torch.float32), ("magnitude", torch.float32)], "by magnitude and by value"),
        ([("magnitude", torch.int32)], "no common order"),
        ([("value", torch.complex64)], "no common order"),
    ):
        with pytest.raises(TypeError, match=why):
            common_order(kinds)  # type: ignore[arg-type]
