"""A hash of the places in a parameter, of which consecutive ones share all but the last step.

It takes in the four digits of a flat index, the highest first. A seed is two words: the first ``state``, and
``second``. With a digit the next state is ``x``, modulo 2**32, of ``x = table[digit] ^ state``, then for each factor of
``(state + second) | 1``, 0x21F0AAAD and 0xD35A2D97: ``x *= factor; x ^= x >> 16``. The hash is the last state without
its highest bit. ``table[i]`` is MurmurHash3's 32-bit finalizer (Appleby, public domain) of ``i + 1``. The two factors
are those of a finalizer found with Wellons' hash-prospector (public domain).

Nouns: a *digit* is 12 bits of a flat index. A *row* is the flat indices that differ in the last digit alone. A *state*
is what the hash has come to after some digits. All is int32 that wraps: arrays on the host, where numpy takes a third
of the time that torch does for a few, and else tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from distprune.shards.device import on_host, sent

_BITS, _NUM_DIGITS = 12, 4  # of a digit; of a flat index, which is below 2**48
_WIDTH = 1 << _BITS  # of a row
_LAST_DIGIT = _WIDTH - 1
_FACTORS = 0x21F0AAAD, -0x2CA5D269  # the second: 0xD35A2D97

Seeds = tuple[int, int]  # int32


def hash_run(seeds: Seeds, first: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return the hash of flat indices ``first`` to ``stop``, int32, 1-D: new."""
    return _hash(_run(seeds, first, stop, device, _NUM_DIGITS))


def hash_at(seeds: Seeds, flat: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the hash of ``flat`` indices (1-D, in any order) below ``numel``, int32, 1-D: new."""
    if on_host(flat.device):
        places = flat.numpy()
        first, end = _rows(int(places.min()), int(places.max()) + 1) if len(flat) else (0, 1)
        if end - first > 1:
            return _joined_on_host([seeds], [flat])
        of_digits = _host_table().take(places & _LAST_DIGIT)
        return _hash(_mixed(of_digits, *_state(seeds, first, _NUM_DIGITS - 1)))
    first, end = _rows(0, numel)
    states = _run(seeds, first, end, flat.device, _NUM_DIGITS - 1)
    return _hash(_at(states, _multipliers(states, seeds[1]), flat >> _BITS, flat & _LAST_DIGIT))


def hash_joined(seeds: Sequence[Seeds], flat: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the hash of the ``flat`` indices of several parameters, one after the other, int32, 1-D: new.

    ``spans``: from where to where those of each lie. Parameters may share a tensor.
    """
    device = flat[0].device
    if on_host(device):
        return _joined_on_host(seeds, flat)
    first_rows, end_rows = np.array([_rows(*span) for span in spans], dtype=np.int64).T
    nums = end_rows - first_rows
    shifts = np.cumsum(nums) - end_rows  # from the number of a row to the place of its state
    first, second = np.repeat(np.array(seeds, dtype=np.int32), nums, axis=0).T
    states = _states(first, second, np.arange(nums.sum()) - np.repeat(shifts, nums))
    of_rows = sent(torch.from_numpy(np.stack([states, _multipliers(states, second)])), device)
    ends = np.cumsum([len(each) for each in flat])
    ends_and_shifts = sent(torch.from_numpy(np.stack([ends, shifts]).astype(np.int32)), device)
    numbers = torch.arange(int(ends[-1]), dtype=torch.int32, device=device)
    of = torch.bucketize(numbers, ends_and_shifts[0], right=True, out_int32=True)
    joined = torch.cat([*flat])
    rows = joined >> _BITS
    rows += ends_and_shifts[1].index_select(0, of)
    return _hash(_at(of_rows[0], of_rows[1], rows, joined.bitwise_and_(_LAST_DIGIT)))


def _joined_on_host(seeds: Sequence[Seeds], flat: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = {id(each): each for each in flat}
    found = {key: _in_rows(each.numpy()) for key, each in parts.items()}
    of_digits, rows, nums = (np.concatenate([found[id(each)][i] for each in flat]) for i in range(3))
    words = np.array(seeds, dtype=np.int32)
    first, second = np.repeat(words, [len(found[id(each)][1]) for each in flat], axis=0).T
    states = _states(first, second, rows)
    return _hash(_mixed(of_digits, np.repeat(states, nums), np.repeat(_multipliers(states, second), nums)))


def _in_rows(flat: Any) -> tuple[Any, Any, Any]:
    """Return the table at the last digits of ``flat``; of each stretch within one row the row, and how many it has."""
    rows = flat >> _BITS
    starts = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    starts = np.concatenate([[0] if len(flat) else [], starts]).astype(np.int64)
    return _host_table().take(flat & _LAST_DIGIT), rows[starts], np.diff(starts, append=len(flat))


def _rows(first: int, stop: int) -> tuple[int, int]:
    """Return the first row of flat indices from ``first`` to ``stop``, and the one after the last: one at least."""
    return first >> _BITS, (max(stop - 1, first) >> _BITS) + 1


def _run(seeds: Seeds, first: int, stop: int, device: torch.device, num_digits: int) -> Any:
    """Return the states of numbers ``first`` to ``stop``, of so many digits each, 1-D: new."""
    table = _host_table() if on_host(device) else _table(device)
    first_row, end_row = _rows(first, stop)
    start, end = first - first_row * _WIDTH, stop - first_row * _WIDTH
    if end_row - first_row == 1:
        return _mixed(table[start:end], *_state(seeds, first_row, num_digits - 1))
    states = _run(seeds, first_row, end_row, device, num_digits - 1)[:, None]
    return _mixed(table, states, _multipliers(states, seeds[1])).reshape(-1)[start:end]


def _state(seeds: Seeds, row: int, num_digits: int) -> tuple[int, int]:
    """Return the state of one row, a number of so many digits, and its multiplier: in a tenth of what arrays take."""
    (state, second), table = seeds, _host_table()
    for place in reversed(range(num_digits)):
        mixed = (int(table[row >> _BITS * place & _LAST_DIGIT]) ^ state) & 0xFFFFFFFF
        for factor in ((state + second) | 1, *_FACTORS):
            mixed = mixed * factor & 0xFFFFFFFF
            mixed ^= mixed >> 16
        state = mixed
    return _wrapped(state), _wrapped((state + second) | 1)


def _wrapped(number: int) -> int:
    return (number + (1 << 31) & 0xFFFFFFFF) - (1 << 31)


def _states(first: Any, second: Any, rows: Any) -> Any:
    """Return the states of ``rows``, with seeds of their own. On the host."""
    states, table = first, _host_table()
    for place in reversed(range(_NUM_DIGITS - 1)):
        states = _mixed(table[rows >> _BITS * place & _LAST_DIGIT], states, _multipliers(states, second))
    return states


def _at(states: torch.Tensor, multipliers: torch.Tensor, rows: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """Return the next states where a row's state and multiplier are found at ``rows``. On an accelerator."""
    of_digits = _table(digits.device).index_select(0, digits)
    mixed: torch.Tensor = _mixed(of_digits, states.index_select(0, rows), multipliers.index_select(0, rows))
    return mixed


def _multipliers(states: Any, second: Any) -> Any:
    return (states + second) | 1


def _mixed(of_digits: Any, states: Any, multipliers: Any) -> Any:
    """Return the states that come after ``states``: new."""
    mixed = of_digits ^ states
    for factor in (multipliers, *_FACTORS):
        mixed *= factor
        _fold(mixed)
    return mixed


def _fold(mixed: Any) -> None:
    """Do ``x ^= x >> 16`` in place. An accelerator touches half of the bytes; all have a number's low half first."""
    if isinstance(mixed, torch.Tensor):
        low, high = (mixed.view(torch.int16)[..., half::2] for half in (0, 1))
        low ^= high
    else:
        bits = mixed.view(np.uint32)
        bits ^= bits >> np.uint32(16)


def _hash(states: Any) -> torch.Tensor:
    states &= 0x7FFFFFFF
    return states if isinstance(states, torch.Tensor) else torch.from_numpy(states)


@cache
def _host_table() -> Any:
    return _finalized(np.arange(1, _WIDTH + 1)).astype(np.int32)


@cache
def _table(device: torch.device) -> torch.Tensor:
    numbers: torch.Tensor = _finalized(torch.arange(1, _WIDTH + 1, dtype=torch.int64, device=device))
    return numbers.to(torch.int32)


def _finalized(numbers: Any) -> Any:
    """Return MurmurHash3's fmix32 of ``numbers``, int64, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers ^= numbers >> shift
        numbers *= factor
        numbers &= 0xFFFFFFFF
    numbers ^= numbers >> 16
    return numbers
