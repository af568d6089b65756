"""The stated order of scores, as integers.

Nouns: a *key* is an integer that sorts as the score does; -0.0 and 0.0 share one, infinities are
ordinary, NaN has none. What was pruned before is *gone*: it has a key of its own, below all others. Keys
are what is counted, compared and sent; scores are not looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards.device import on_host

OrderedBy = Literal["magnitude", "value"]

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NATIVE_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Order:
    """How values of ``value_dtype`` become keys of ``key_dtype`` in [first, last].

    ``"magnitude"`` orders by |value| (its bits without the sign), ``"value"`` by the value.
    ``zeros_gone``: zeros were pruned before (of magnitudes only).
    """

    ordered_by: OrderedBy
    value_dtype: torch.dtype
    zeros_gone: bool = False
    # What follows from these.
    has_nans: bool = field(init=False, compare=False)
    key_dtype: torch.dtype = field(init=False, compare=False)
    last: int = field(init=False, compare=False)  # the key of +inf, or the largest integer; a NaN's is above
    first: int = field(init=False, compare=False)  # the lowest that competes
    gone: int = field(init=False, compare=False)  # the key of what was pruned before
    num_bits: int = field(init=False, compare=False)  # of unsigned keys, those of NaNs included

    def __post_init__(self) -> None:
        has_nans = self.value_dtype.is_floating_point
        key_dtype = _INTEGER_OF_SIZE[self.value_dtype.itemsize] if has_nans else self.value_dtype
        most = last = torch.iinfo(key_dtype).max
        if has_nans:  # infinity has every bit of the exponent and none of the fraction
            last = most + 1 - int(1 / torch.finfo(self.value_dtype).eps)
        if self.ordered_by == "magnitude":
            first = int(self.zeros_gone)
        else:
            most, first = last + has_nans, -last if has_nans else torch.iinfo(key_dtype).min + 1
        num_bits = (most - (first - 1)).bit_length()
        derived = {"has_nans": has_nans, "key_dtype": key_dtype, "last": last, "first": first, "gone": first - 1}
        vars(self).update(derived, num_bits=num_bits)

    def unsigned(self, keys: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.unsignedinteger]:
        """Return ``keys``, on the host, as unsigned numbers, of which what is gone has 0: new, or a view."""
        numbers = keys.view(f"u{keys.itemsize}")
        return numbers - numbers.dtype.type(self.gone % (1 << 8 * keys.itemsize)) if self.gone else numbers

    def keys(self, values: torch.Tensor) -> torch.Tensor:
        """Return the keys of ``values``: new, or integers as they are. A NaN's is above ``last``."""
        values = values.to(self.value_dtype)
        if not self.has_nans:
            if on_host(values.device) and (not values.numel() or values.numpy().min() >= self.first):
                return values  # as a rule: a copy would take longer
            return values.clamp(min=self.first)
        bits, magnitude = values.contiguous().view(self.key_dtype), torch.iinfo(self.key_dtype).max
        if self.ordered_by == "magnitude":
            return bits & magnitude
        # A negative float's bits count backwards: key = -(magnitude bits), which also makes -0.0 a 0.
        keys = torch.where(bits < 0, -(bits & magnitude), bits)
        return keys.masked_fill_(keys < self.first, self.last + 1)  # a NaN with a sign

    def reads_bits(self, dtype: torch.dtype) -> bool:
        """Whether the keys of values of ``dtype`` are their bits without the sign."""
        return self.ordered_by == "magnitude" and dtype == self.value_dtype

    def values(self, keys: Sequence[int]) -> list[float] | list[int]:
        """Return the scores whose keys are ``keys``."""
        if not self.has_nans:
            return [*keys]
        sizes = torch.tensor([*map(abs, keys)], dtype=self.key_dtype, device="cpu").view(self.value_dtype)
        return [-size if key < 0 else size for key, size in zip(keys, sizes.double().tolist(), strict=True)]


def common_order(kinds: Iterable[tuple[OrderedBy, torch.dtype]], *, zeros_gone: bool = False) -> Order:
    """Return the order in which values of all ``kinds`` compete; widening to it is exact.

    Raises:
        TypeError: values that no common order holds: integers beside floats, magnitudes beside plain
            values, integers by magnitude, or a dtype this library does not order (complex, quantized).
    """
    return _common_order(frozenset(kinds), zeros_gone)


@cache  # parameters of one kind share theirs
def _common_order(kinds: frozenset[tuple[OrderedBy, torch.dtype]], zeros_gone: bool) -> Order:
    distinct = sorted(kinds, key=str)
    ordered_by, dtypes = {kind[0] for kind in distinct}, [kind[1] for kind in distinct]
    if len(ordered_by) != 1:
        raise TypeError("scores ordered by magnitude and by value cannot compete with each other")
    by: OrderedBy = ordered_by.pop()
    zeros_gone = zeros_gone and by == "magnitude"
    if all(dtype.is_floating_point for dtype in dtypes):
        if len(dtypes) == 1 and dtypes[0] in _NATIVE_FLOATS:
            return Order(by, dtypes[0], zeros_gone)
        return Order(by, torch.float64 if torch.float64 in dtypes else torch.float32, zeros_gone)
    if by == "value" and all(dtype in _INTEGERS for dtype in dtypes):
        size = max(2, *(2 * d.itemsize if d is torch.uint8 else d.itemsize for d in dtypes), 0)
        return Order("value", _INTEGER_OF_SIZE[size])
    raise TypeError(f"scores of dtypes {[str(dtype) for dtype in dtypes]} by {by} have no common order")
