"""Selection within one row: N:M groups along the inputs, and the lowest of every row.

No communication: the caller holds whole groups, or whole rows. The order is that of every selection here: of equal
scores the lowest index is pruned first, -0.0 equals 0.0, infinities are ordinary, and NaN is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards import chunk_size, fetched, on_host

__all__ = ["keep_highest_per_group", "keep_highest_per_row"]

Array = npt.NDArray[Any]

_MAX_PAIRED = 16  # scores of a group are compared pair by pair up to this m; a sort is faster beyond


def keep_highest_per_group(scores: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Return what stays, bool, of the shape of ``scores`` (rows, columns): ``n`` of every ``m`` columns.

    Groups are columns 0 to m - 1, m to 2 m - 1, and so on. Local; temporaries stay under 64 MiB
    whatever the size, except that a single row is not cut. On a device one wait, none for integers.

    Raises:
        ValueError: ``scores`` is not 2-D or holds NaN, not 0 <= n <= m, or m does not divide the columns.
    """
    _check_2d(scores)
    num_columns = scores.shape[1]
    if m < 1 or not 0 <= n <= m:
        raise ValueError(f"{n}:{m} is not a pattern: n of every m are kept, 0 <= n <= m and m >= 1")
    if num_columns % m:
        raise ValueError(f"{n}:{m} needs a number of columns that {m} divides, not {num_columns}")

    def there(rows: torch.Tensor, _: slice) -> torch.Tensor:
        return _by_sorting(rows.reshape(-1, m), m - n).view(rows.shape)

    def here(rows: torch.Tensor, _: slice) -> torch.Tensor:
        groups = rows.numpy().reshape(-1, m)
        if n in (0, m):
            return torch.full(rows.shape, n == m)
        if m <= _MAX_PAIRED:
            return torch.from_numpy((_ranks(np.ascontiguousarray(groups.T)) >= m - n).T.reshape(rows.shape))
        keep = np.ones(groups.shape, dtype=np.bool_)
        np.put_along_axis(keep, np.argsort(groups, axis=1, kind="stable")[:, : m - n], False, axis=1)
        return torch.from_numpy(keep.reshape(rows.shape))

    return _by_rows(scores, here if on_host(scores.device) else there)


def keep_highest_per_row(scores: torch.Tensor, num_pruned: int | torch.Tensor) -> torch.Tensor:
    """Return what stays, bool, of the shape of ``scores`` (rows, columns): all but ``num_pruned`` of every row.

    ``num_pruned``: one number for all rows, or (rows,) int64 on their device, each of which the caller knows to be
    in [0, columns]. Local; temporaries stay under 64 MiB whatever the size, except that a single row is not cut.
    On a device one wait, none for integers.

    Raises:
        ValueError: ``scores`` is not 2-D or holds NaN, or the one ``num_pruned`` is not in [0, columns].
    """
    _check_2d(scores)
    is_here = on_host(scores.device)
    if isinstance(num_pruned, torch.Tensor):
        numbers = num_pruned
        if not is_here or not (numbers == numbers[:1]).all():
            return _by_rows(scores, lambda rows, at: _by_sorting(rows, numbers[at, None]))
        num_pruned = int(numbers[0]) if len(numbers) else 0
    number = num_pruned
    if not 0 <= number <= scores.shape[1]:
        raise ValueError(f"{num_pruned=} is not between 0 and the {scores.shape[1]} columns of a row")

    def here(rows: torch.Tensor, _: slice) -> torch.Tensor:
        if number in (0, scores.shape[1]):
            return torch.full(rows.shape, number == 0)
        values = rows.numpy()
        kth = np.partition(values, number - 1, axis=1)[:, number - 1 : number]
        keep = values > kth
        # More than are to go: ties with the k-th.
        num_undecided = values.shape[1] - number - np.count_nonzero(keep, axis=1)
        for row in np.flatnonzero(num_undecided):
            tied = np.flatnonzero(values[row] == kth[row])
            keep[row, tied[len(tied) - num_undecided[row] :]] = True
        return torch.from_numpy(keep)

    return _by_rows(scores, here if is_here else lambda rows, _: _by_sorting(rows, number))


def _check_2d(scores: torch.Tensor) -> None:
    if scores.ndim != 2:
        raise ValueError(f"scores must be 2-D, (rows, columns), not {scores.shape=}")


def _ranks(columns: Array) -> Array:
    """Return how many of its group come before each score, int8; ``columns`` is (m, groups)."""
    ranks = np.zeros(columns.shape, dtype=np.int8)
    for j in range(1, len(columns)):
        for i in range(j):
            i_first = np.less_equal(columns[i], columns[j]).view(np.int8)  # of equals the lower index
            ranks[j] += i_first
            ranks[i] += 1
            ranks[i] -= i_first
    return ranks


def _by_sorting(rows: torch.Tensor, num_pruned: int | torch.Tensor) -> torch.Tensor:
    """Return what stays of ``rows``; ``num_pruned``: of each, or (rows, 1)."""
    # A device's stable sort may go by bits; adding 0.0 makes a -0.0 a 0.0.
    order = (rows + 0.0 if rows.is_floating_point() else rows).sort(dim=1, stable=True).indices
    stays = torch.arange(rows.shape[1], device=rows.device) >= num_pruned
    return torch.empty(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, order, stays.expand(rows.shape))


def _by_rows(scores: torch.Tensor, keep_rows: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
    """Return ``keep_rows`` of all rows, so many at a time that temporaries stay small."""
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    num_nans = torch.zeros((), dtype=torch.int64, device=scores.device)
    # A stable sort on a device takes some 30 bytes of temporaries for each element.
    size = chunk_size(scores.device) // (1 if on_host(scores.device) else 2)
    num_rows = max(1, size // max(1, scores.shape[1]))
    for start in range(0, len(scores), num_rows):
        at = slice(start, start + num_rows)
        rows = scores[at].detach()
        # On the host a sum, which is cheap, says whether NaN is to be looked for.
        if rows.is_floating_point() and not (on_host(rows.device) and math.isfinite(rows.sum())):
            num_nans += rows.isnan().sum()
        if rows.dtype in (torch.bfloat16, torch.float16):
            rows = rows.float()  # exact
        keep[at] = keep_rows(rows.contiguous(), at)
    if scores.is_floating_point() and (num := int(fetched([num_nans])[0])):
        raise ValueError(f"{num} scores are NaN; NaN has no place in the order, mend the values first")
    return keep
