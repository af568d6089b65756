"""Patterns that a row settles by itself: N:M groups along the input dim, and the lowest of every row.

Nothing is communicated: the caller holds whole groups, or whole rows. The stated order is that of every
selection here: equal scores are pruned from the lowest index up, -0.0 equals 0.0, infinities are
ordinary, and NaN is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["keep_highest_per_group", "keep_highest_per_row"]

Array = npt.NDArray[Any]

_HOST_CHUNK = 1 << 16  # elements: the temporaries stay in a core's second-level cache
_DEVICE_CHUNK = 1 << 20  # elements: a stable sort takes some 30 bytes of temporaries for each
_MAX_PAIRED = 16  # scores of a group are compared pair by pair up to this m; a sort is faster beyond


def keep_highest_per_group(scores: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Return what stays, bool, of the shape of ``scores`` (rows, columns): ``n`` of every ``m`` columns.

    Groups are columns 0 to m - 1, m to 2 m - 1, and so on. Local; temporaries stay under 64 MiB
    whatever the size, except that a single row is not cut.

    Raises:
        ValueError: ``scores`` is not 2-D or holds NaN, not 0 <= n <= m, or m does not divide the columns.
    """
    _check_2d(scores)
    num_columns = scores.shape[1]
    if m < 1 or not 0 <= n <= m:
        raise ValueError(f"{n}:{m} is no pattern: n of every m are kept, 0 <= n <= m and m >= 1")
    if num_columns % m:
        raise ValueError(f"{n}:{m} needs a number of columns that {m} divides, not {num_columns}")
    if n in (0, m):
        return _all_alike(scores, n == m)

    def on_host(rows: Array) -> Array:
        groups = rows.reshape(-1, m)
        if m <= _MAX_PAIRED:
            return (_ranks(np.ascontiguousarray(groups.T)) >= m - n).T.reshape(rows.shape)
        keep = np.ones(groups.shape, dtype=np.bool_)
        np.put_along_axis(keep, np.argsort(groups, axis=1, kind="stable")[:, : m - n], False, axis=1)
        return keep.reshape(rows.shape)

    def on_device(rows: torch.Tensor) -> torch.Tensor:
        return _keep_by_sorting(rows.reshape(-1, m), m - n).view(rows.shape)

    return _by_rows(scores, on_host, on_device)


def keep_highest_per_row(scores: torch.Tensor, num_pruned: int | torch.Tensor) -> torch.Tensor:
    """Return what stays, bool, of the shape of ``scores`` (rows, columns): all but ``num_pruned`` of every row.

    ``num_pruned``: one number for all rows, or (rows,) int64. Local; temporaries stay under 64 MiB whatever
    the size, except that a single row is not cut (and, with a number for each row, that the caller bounds them).

    Raises:
        ValueError: ``scores`` is not 2-D or holds NaN, or ``num_pruned`` is not in [0, columns].
    """
    _check_2d(scores)
    if isinstance(num_pruned, torch.Tensor):
        distinct = sorted(set(num_pruned.tolist()))
        if len(distinct) > 1:
            keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
            for number in distinct:
                rows = num_pruned == number
                keep[rows] = keep_highest_per_row(scores[rows], number)
            return keep
        num_pruned = distinct[0] if distinct else 0
    if not 0 <= num_pruned <= scores.shape[1]:
        raise ValueError(f"{num_pruned=} is not between 0 and the {scores.shape[1]} columns of a row")
    if num_pruned in (0, scores.shape[1]):
        return _all_alike(scores, num_pruned == 0)

    def on_host(rows: Array) -> Array:
        kth = np.partition(rows, num_pruned - 1, axis=1)[:, num_pruned - 1 : num_pruned]
        keep = rows > kth
        num_undecided = np.count_nonzero(rows <= kth, axis=1) - num_pruned  # more than are to go: ties with the k-th
        for row in np.flatnonzero(num_undecided):
            tied = np.flatnonzero(rows[row] == kth[row])
            keep[row, tied[len(tied) - num_undecided[row] :]] = True
        return keep

    return _by_rows(scores, on_host, lambda rows: _keep_by_sorting(rows, num_pruned))


def _check_2d(scores: torch.Tensor) -> None:
    if scores.ndim != 2:
        raise ValueError(f"rows and columns are called for, not {scores.shape=}")


def _all_alike(scores: torch.Tensor, keep: bool) -> torch.Tensor:
    if scores.is_floating_point() and bool(scores.isnan().any()):
        _raise_nans(int(scores.isnan().sum()))
    return torch.full(scores.shape, keep, dtype=torch.bool, device=scores.device)


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


def _keep_by_sorting(rows: torch.Tensor, num_pruned: int) -> torch.Tensor:
    # A device's stable sort may go by bits; adding 0.0 makes a -0.0 a 0.0.
    order = (rows + 0.0 if rows.is_floating_point() else rows).sort(dim=1, stable=True).indices
    keep = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
    return keep.scatter_(1, order[:, :num_pruned], False)


def _by_rows(
    scores: torch.Tensor,
    on_host: Callable[[Array], Array],
    on_device: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return ``on_host`` or ``on_device`` of all rows, so many at a time that temporaries stay small."""
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    is_host = scores.device.type == "cpu"
    num_rows = max(1, (_HOST_CHUNK if is_host else _DEVICE_CHUNK) // max(1, scores.shape[1]))
    for start in range(0, len(scores), num_rows):
        rows = scores[start : start + num_rows].detach()
        if rows.dtype in (torch.bfloat16, torch.float16):
            rows = rows.float()  # exact
        if rows.is_floating_point() and bool(rows.isnan().any()):
            _raise_nans(int(scores.isnan().sum()))
        if is_host:
            keep[start : start + num_rows] = torch.from_numpy(on_host(rows.contiguous().numpy()))
        else:
            keep[start : start + num_rows] = on_device(rows)
    return keep


def _raise_nans(num_nans: int) -> None:
    raise ValueError(f"{num_nans} scores are NaN; NaN has no place in the order, mend the values first")
