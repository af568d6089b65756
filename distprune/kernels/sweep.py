"""SparseGPT's sweep of columns on a GPU; the plain form is in :mod:`distprune.oneshot.sparsegpt`."""

from __future__ import annotations

import torch

from distprune.kernels.available import kernels, launch

_WIDTH = 128  # columns of a launch
_ROWS = 4  # of a program, which is one warp


def sweep(weight: torch.Tensor, keep: torch.Tensor, upper: torch.Tensor, at: slice, n: int = 128, m: int = 128) -> None:
    """Prune the columns ``at`` of ``weight`` (rows, in) in place, and take their errors from all columns behind them.

    ``upper`` (in, in): the inverse of H is U^T U. Both are float32, and all is contiguous. ``keep`` (rows, in), bool,
    says what may stay, and is written where ``n`` of every ``m`` columns do, at most 128 in all. Local: a launch and a
    product every 128 columns.
    """
    num_rows, num_in = weight.shape
    errors = torch.empty((num_rows, _WIDTH), dtype=weight.dtype, device=weight.device)
    for start in range(at.start, at.stop, _WIDTH) if num_rows else ():
        stop = min(start + _WIDTH, at.stop)
        begin = weight[:, start:], keep.view(torch.int8)[:, start:], upper[start:, start:], errors
        sizes = num_in, num_rows, stop - start, m - n, m, _ROWS, _WIDTH
        launch(kernels("sweep").sweep, (-(-num_rows // _ROWS),), weight.device, *begin, *sizes, num_warps=1)
        weight[:, stop:].addmm_(errors[:, : stop - start], upper[start:stop, stop:], alpha=-1)
