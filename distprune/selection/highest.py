"""Selection within one row: N:M groups along the inputs, and the lowest of every row.

No communication: the caller holds whole groups, or whole rows. The order is that of every selection here: of equal
scores the lowest index is pruned first, -0.0 equals 0.0, infinities are ordinary, and NaN is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.kernels.available import has_kernels
from distprune.kernels.lowest import Keys
from distprune.kernels.table import Piece
from distprune.kernels.within import MOST_IN_GROUP, MOST_IN_ROW, Units, Within
from distprune.shards.device import chunk_size, fetched, on_host

Array = npt.NDArray[Any]

_MAX_PAIRED = 16  # scores of a group are compared pair by pair up to this m; a sort is faster beyond
_INT32 = Keys("keys", -(1 << 31) - 1, (1 << 31) - 1, "unmarked")  # each is one of a number that was not pruned before


def keep_highest_per_group(scores: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Return what stays, bool, of the shape of ``scores`` (rows, columns): ``n`` of every ``m`` columns.

    Groups are columns 0 to m - 1, m to 2 m - 1, and so on. Local; temporaries stay under 64 MiB whatever the size,
    except that a single row is not cut. On a device one wait, none for integers.

    Raises:
        ValueError: ``scores`` is not 2-D or holds NaN, not 0 <= n <= m, or m does not divide the columns.
    """
    _check_2d(scores)
    num_columns = scores.shape[1]
    if m < 1 or not 0 <= n <= m:
        raise ValueError(f"{n}:{m} is not a pattern: n of every m are kept, 0 <= n <= m and m >= 1")
    if num_columns % m:
        raise ValueError(f"{n}:{m} needs a number of columns that {m} divides, not {num_columns}")

    def choose(rows: torch.Tensor, keep: torch.Tensor, _: slice) -> None:
        if m <= _MAX_PAIRED:
            _keep_by_pairs(rows, n, m, keep)
        else:
            _keep_by_sorting(rows.view(-1, m), m - n, keep.view(-1, m))

    return _by_rows(scores, choose, ("groups", n, m) if m <= MOST_IN_GROUP else None)


def keep_highest_per_row(scores: torch.Tensor, num_pruned: int | torch.Tensor) -> torch.Tensor:
    """Return what stays, bool, of the shape of ``scores`` (rows, columns): all but ``num_pruned`` of every row.

    ``num_pruned``: one number for all rows, or (rows,) int64 on their device, each of which the caller knows to be
    in [0, columns]. Local; temporaries stay under 64 MiB whatever the size, except that a single row is not cut. On a
    device one wait, none for integers.

    Raises:
        ValueError: ``scores`` is not 2-D or holds NaN, or the one ``num_pruned`` is not in [0, columns].
    """
    _check_2d(scores)
    is_here = on_host(scores.device)
    if isinstance(num_pruned, torch.Tensor):
        numbers = num_pruned
        if not is_here or not (numbers == numbers[:1]).all():
            return _by_rows(scores, lambda rows, keep, at: _keep_by_sorting(rows, numbers[at, None], keep))
        num_pruned = int(numbers[0]) if len(numbers) else 0
    number, num_columns = num_pruned, scores.shape[1]
    if not 0 <= number <= num_columns:
        raise ValueError(f"{num_pruned=} is not between 0 and the {num_columns} columns of a row")

    def here(rows: torch.Tensor, keep: torch.Tensor, _: slice) -> None:
        if number in (0, num_columns):
            keep.fill_(number == 0)
            return
        values, kept = rows.numpy(), keep.numpy()
        kth = np.partition(values, number - 1, axis=1)[:, number - 1 : number]
        np.greater(values, kth, out=kept)
        num_tied_kept = num_columns - number - _count_by_row(kept)
        if num_tied_kept.any():  # more tie with the k-th than are to go: of each row the last ones stay
            tied = np.flatnonzero(values == kth)
            row = tied // num_columns
            place_from_end = np.searchsorted(row, row, side="right") - np.arange(len(row))
            kept.reshape(-1)[tied[place_from_end <= num_tied_kept[row]]] = True

    choose = here if is_here else lambda rows, keep, _: _keep_by_sorting(rows, number, keep)
    return _by_rows(scores, choose, ("rows", num_columns, number) if num_columns <= MOST_IN_ROW else None)


def _check_2d(scores: torch.Tensor) -> None:
    if scores.ndim != 2:
        raise ValueError(f"scores must be 2-D, (rows, columns), not {scores.shape=}")


def _keep_by_pairs(rows: torch.Tensor, n: int, m: int, keep: torch.Tensor) -> None:
    """Write which ``n`` stay of every ``m`` of ``rows`` (contiguous) into ``keep``.

    Each score is compared with the one ``distance`` behind it, for all at once: so memory is read in its order.
    """
    int8: Any = torch.int8
    tensors: Any = rows.view(-1), keep.view(-1), _pairs(m, max(1, chunk_size(rows.device) // m), rows.device)
    if on_host(rows.device):
        int8, tensors = np.int8, [tensor.numpy() for tensor in tensors]
    all_scores, stays, all_pairs = tensors
    for start in range(0, len(all_scores), all_pairs.shape[1]):
        scores = all_scores[start : start + all_pairs.shape[1]]
        pairs = all_pairs[:, : len(scores)]
        ranks = pairs[0] + 0  # all behind it go later, unless they come before it
        for distance in range(1, m):
            goes_first = (scores[:-distance] <= scores[distance:]).view(int8)  # of equals the lower index
            goes_first &= pairs[distance, :-distance]
            ranks[distance:] += goes_first
            ranks[:-distance] -= goes_first
        stays[start : start + len(scores)] = ranks >= m - n


@lru_cache(8)
def _pairs(m: int, num: int, device: torch.device) -> torch.Tensor:
    """Return, of scores in ``num`` groups of ``m``, how many of its group are behind each; then, for every distance
    from 1 to ``m`` - 1, whether the one so far behind it is in its group: int8, (m, num * m)."""
    behind = torch.arange(m - 1, -1, -1, dtype=torch.int8, device=device).repeat(num)
    return torch.stack([behind, *((behind >= distance).to(torch.int8) for distance in range(1, m))])


def _count_by_row(flags: Array) -> Array:
    """Return how many of each row of ``flags`` (bool, 2-D, contiguous) are True."""
    counts: Array
    if flags.shape[1] % 8:
        counts = np.count_nonzero(flags, axis=1)
    else:  # a quarter of the time
        counts = np.bitwise_count(flags.view(np.uint64)).sum(axis=1, dtype=np.int64)
    return counts


def _keep_by_sorting(rows: torch.Tensor, num_pruned: int | torch.Tensor, keep: torch.Tensor) -> None:
    """Write what stays of ``rows`` into ``keep``, on a device; ``num_pruned``: of each, or (rows, 1)."""
    # A device's stable sort may go by bits; adding 0.0 makes a -0.0 a 0.0.
    order = (rows + 0.0 if rows.is_floating_point() else rows).sort(dim=1, stable=True).indices
    stays = torch.arange(rows.shape[1], device=rows.device) >= num_pruned
    keep.scatter_(1, order, stays.expand_as(order))


def _by_rows(
    scores: torch.Tensor,
    choose: Callable[[torch.Tensor, torch.Tensor, slice], object],
    units: Units | None = None,
) -> torch.Tensor:
    """Return what ``choose`` writes of all rows, so many at a time that temporaries stay small.

    ``units``: by which kernels do so of int32 on a GPU: one launch, for which nobody waits. One row is sorted: a
    program of theirs would read all of it.
    """
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if units is not None and scores.dtype is torch.int32 and len(scores) > 1 and has_kernels(scores.device):
        totals = torch.zeros((1, 3), dtype=torch.int64, device=scores.device)
        Within([Piece(scores.contiguous(), out=keep)], units, _INT32, totals).write()
        return keep
    # A stable sort on a device takes some 30 bytes of temporaries for each element.
    is_here, is_float = on_host(scores.device), scores.is_floating_point()
    num_rows = max(1, chunk_size(scores.device) // (1 if is_here else 2) // max(1, scores.shape[1]))
    num_nans: list[torch.Tensor] = []
    for start in range(0, len(scores), num_rows):
        at = slice(start, start + num_rows)
        rows = scores[at].detach()
        # On the host a sum, which is cheap, says whether NaN is to be looked for.
        if is_float and not (is_here and math.isfinite(rows.sum())):
            num_nans.append(rows.isnan().sum())
        if is_here and rows.dtype in (torch.bfloat16, torch.float16):
            rows = rows.float()  # exact
        choose(rows.contiguous(), keep[at], at)
    if num_nans and (num := int(sum(fetched(num_nans)))):
        raise ValueError(f"{num} scores are NaN; NaN has no place in the order, mend the values first")
    return keep
