"""The stated order, by value."""

from __future__ import annotations

import pytest
import torch

from distprune.selection.order import Order, OrderedBy, common_order

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# In order of value; equal ones together.
VALUES = [[-torch.inf], [-3.5], [-1e-7], [-0.0, 0.0], [1e-7], [1.0], [3.5], [torch.inf]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_by_value(dtype: torch.dtype) -> None:
    order = Order("value", dtype)
    keys = [order.keys(torch.tensor(group, dtype=dtype)).tolist() for group in VALUES]
    assert all(len(set(group)) == 1 for group in keys)
    ranked = [group[0] for group in keys]
    assert ranked == sorted(set(ranked))
    assert (ranked[0], ranked[-1]) == (order.first, order.last)
    assert order.values(ranked) == [float(torch.tensor(group[-1], dtype=dtype)) for group in VALUES]


@pytest.mark.parametrize("dtype", FLOATS)
def test_by_magnitude(dtype: torch.dtype) -> None:
    order = Order("magnitude", dtype)
    values = torch.tensor([0.0, -0.0, 1e-7, -1e-7, -2.0, 2.0, torch.inf, -torch.inf], dtype=dtype)
    keys = order.keys(values).tolist()
    assert keys[::2] == keys[1::2] or keys[0] == keys[1]
    assert keys == sorted(keys)
    assert (keys[0], keys[-1]) == (order.first, order.last) == (0, order.last)
    assert order.values([keys[4]]) == [2.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by", ["value", "magnitude"])
def test_nan_has_no_place(dtype: torch.dtype, by: OrderedBy) -> None:
    order = Order(by, dtype)
    for nan in (torch.tensor([torch.nan], dtype=dtype), -torch.tensor([torch.nan], dtype=dtype)):
        assert int(order.keys(nan)) > order.last


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
