"""The loops. Imports numba: reach them by ``compiled()``.

Nouns: *bits* are integers, 1-D, which ``& magnitude`` makes keys (see ``selection/order.py``); where they are keys
already, ``magnitude`` is -1. Both are of one dtype. Nothing here is checked: NaN and lengths are the caller's.

How they are written: numba widens small integers to 64 bits unless each sum is narrowed again, indices that may be
negative keep a loop from using vector instructions, and so do sums that end often; hence the casts and the tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[Any]

_TILE = 4096  # elements: counts of them fit in 16 bits, and what is noted of them in a core's first-level cache


def _loop(function: Any) -> Any:
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError:  # there is no folder for the cache
        return njit(function, nogil=True)


@_loop
def keep_groups(keys: Array, n: int, m: int, keep: Array) -> None:
    """Write into ``keep``, bool, what stays: the ``n`` highest of every ``m``, of equals the later ones."""
    byte = np.int8
    if m == 4:
        num_pruned = byte(m - n)
        for group in range(len(keys) // 4):
            a, b, c, d = keys[4 * group], keys[4 * group + 1], keys[4 * group + 2], keys[4 * group + 3]
            # Whether the first of two comes first in the order; a rank counts who comes before.
            ab, ac, ad, bc, bd, cd = byte(a <= b), byte(a <= c), byte(a <= d), byte(b <= c), byte(b <= d), byte(c <= d)
            keep[4 * group] = byte(byte(byte(3) - ab) - byte(ac + ad)) >= num_pruned
            keep[4 * group + 1] = byte(byte(byte(2) + ab) - byte(bc + bd)) >= num_pruned
            keep[4 * group + 2] = byte(byte(byte(1) + ac) + byte(bc - cd)) >= num_pruned
            keep[4 * group + 3] = byte(ad + byte(bd + cd)) >= num_pruned
        return
    num_groups = max(1, _TILE // m)
    of_place = np.empty((m, num_groups), keys.dtype)  # keys by their place in the group
    ranks = np.empty((m, num_groups), np.int8)
    for start in range(0, len(keys), num_groups * m):
        part, kept = keys[start : start + num_groups * m], keep[start : start + num_groups * m]
        num = len(part) // m
        for place in range(m):
            here, there = of_place[place], part[place:]
            for group in range(num):
                here[group] = there[group * m]
            ranks[place] = byte(m - 1 - place)
        for later in range(m):
            second, second_ranks = of_place[later], ranks[later]
            for place in range(later):
                first, first_ranks = of_place[place], ranks[place]
                for group in range(num):
                    comes_first = byte(first[group] <= second[group])
                    second_ranks[group] = byte(second_ranks[group] + comes_first)
                    first_ranks[group] = byte(first_ranks[group] - comes_first)
        for place in range(m):
            here_ranks, here_kept = ranks[place], kept[place:]
            for group in range(num):
                here_kept[group * m] = here_ranks[group] >= m - n


@_loop
def keep_groups_of_bits(bits: Array, magnitude: Any, n: int, m: int, out: Array, zero: Any) -> tuple[Any, Any]:
    """Do as ``keep_groups`` with the keys of ``bits``, and return the lowest and the highest of them.

    ``zero``: 0 in the dtype of ``bits``; then ``out`` takes the bits of what stays, and 0 for the others. ``None``:
    ``out`` is bool.
    """
    cast = bits.dtype.type
    tile = max(1, _TILE // m) * m
    memory, flags = np.empty(tile, bits.dtype), np.empty(tile, np.bool_)
    lowest = highest = cast(bits[0] & magnitude)
    for start in range(0, len(bits), tile):
        part, kept = bits[start : start + tile], out[start : start + tile]
        keys = memory[: len(part)]
        for i in range(len(part)):
            key = cast(part[i] & magnitude)
            lowest, highest = min(lowest, key), max(highest, key)
            keys[i] = key
        if zero is None:
            keep_groups(keys, n, m, kept)
        else:
            keep_groups(keys, n, m, flags)
            factors = flags.view(np.int8)
            for i in range(len(part)):
                kept[i] = cast(part[i] * cast(factors[i]))
    return lowest, highest


@_loop
def keep_above(bits: Array, magnitude: Any, first: Any, key: Any, out: Array, zero: Any) -> tuple[int, int]:
    """Write into ``out`` which keys are above ``key``; return how many are, and how many below ``first``.

    ``zero``: as of ``keep_groups_of_bits``.
    """
    cast = bits.dtype.type
    num_kept = num_gone = 0
    for start in range(0, len(bits), _TILE):
        part, kept = bits[start : start + _TILE], out[start : start + _TILE]
        num, gone = np.int16(0), np.int16(0)
        for i in range(len(part)):
            own = cast(part[i] & magnitude)
            is_above = own > key
            if zero is None:
                kept[i] = is_above
            else:
                kept[i] = part[i] if is_above else zero
            num, gone = np.int16(num + np.int16(is_above)), np.int16(gone + np.int16(own < first))
        num_kept, num_gone = num_kept + int(num), num_gone + int(gone)
    return num_kept, num_gone


@_loop
def find_inside(
    bits: Array, magnitude: Any, low: Any, high: Any, offsets: Array, keys: Array
) -> tuple[int, int, Any, Any]:
    """Write the offsets and the keys of those from ``low`` to ``high``.

    Return how many are at least ``low``, how many inside, and the lowest and the highest of all keys.
    """
    cast = bits.dtype.type
    lowest = highest = cast(bits[0] & magnitude)
    num_kept = num_inside = 0
    inside = np.zeros(_TILE, np.uint8)
    words = inside.view(np.uint64)  # as a rule few are inside
    for start in range(0, len(bits), _TILE):
        part = bits[start : start + _TILE]
        num, num_above = np.int16(0), np.int16(0)
        for i in range(len(part)):
            key = cast(part[i] & magnitude)
            lowest, highest = min(lowest, key), max(highest, key)
            is_kept, is_above = key >= low, key > high
            inside[i] = is_kept & (not is_above)
            num = np.int16(num + np.int16(is_kept))
            num_above = np.int16(num_above + np.int16(is_above))
        num_kept += int(num)
        if num > num_above:
            inside[len(part) :] = 0
            for word in range(len(words)):
                if words[word]:
                    for i in range(8 * word, 8 * word + 8):
                        if inside[i]:
                            offsets[num_inside], keys[num_inside] = start + i, cast(part[i] & magnitude)
                            num_inside += 1
    return num_kept, num_inside, lowest, highest
