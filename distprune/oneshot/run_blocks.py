"""A walk through the blocks of a model, each of which is pruned on the way; and what that took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from distprune.calibration import SampleGroup, Walk, walking
from distprune.collectives import Communicator, max_together, sum_together, together
from distprune.oneshot.block import BlockPruner
from distprune.oneshot.report import BlockReport, Cost

__all__ = ["Finished", "Meter", "OnBlock", "run_blocks"]

OnBlock = Callable[[int, BlockReport], None]
Finished = Callable[[int], bool]


def run_blocks(
    comm: Communicator,
    sample_group: SampleGroup,
    model: nn.Module,
    samples: torch.Tensor,
    make_pruner: Callable[[Walk], BlockPruner],
    *,
    has_targets: bool,
    offload: bool,
    finished: Finished | None,
    on_block: OnBlock | None,
) -> tuple[BlockReport, ...]:
    """Run ``samples`` through the blocks of ``model`` and prune each of them by the pruner, but those it skips.

    The other arguments are those of ``prune_blocks``. Every rank must call it.
    """
    calls_back = bool(max_together(comm, (1,), lambda any_rank: any_rank.fill_(on_block is not None))[0])
    reports = []
    with walking(comm, sample_group, model, samples, offload=offload, has_dense=has_targets) as walk:
        pruner = make_pruner(walk)
        for index in pruner.indices:
            if finished is not None:
                if pruner.pass_by(index, partial(finished, index)):
                    continue
                finished = None
            reports.append(pruner.prune(index))
            if calls_back:
                with together(comm):
                    if on_block is not None:
                        on_block(index, reports[-1])
    return tuple(reports)


class Meter:
    """Measures time and traffic from where it is made."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._started, self._traffic = comm, time.perf_counter(), comm.traffic.copy()

    def read(self) -> Cost:
        """Return what it took so far. Every rank must call it: one round of 8 bytes a rank."""
        comm = self._comm
        used = comm.traffic - self._traffic
        peaks = sum_together(comm, (comm.size,), lambda of_ranks: of_ranks[comm.rank].fill_(_peak_memory()))
        return Cost(time.perf_counter() - self._started, used.num_rounds, used.num_bytes, tuple(peaks.tolist()))


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
