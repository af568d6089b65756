"""A walk through the blocks of a model, each of which is pruned on the way; and what that took."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from distprune.calibration import SampleGroup, Walk, catch_inputs, own_samples
from distprune.collectives import Communicator, max_together, sum_together, together
from distprune.models import evaluating
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
    make_pruner: Callable[[Walk, int], BlockPruner],
    *,
    has_targets: bool,
    offload: bool,
    finished: Finished | None,
    on_block: OnBlock | None,
) -> tuple[BlockReport, ...]:
    """Run ``samples`` through the blocks of ``model`` and prune each of them by the pruner, but those it skips.

    ``make_pruner`` is given the walk and the number of this rank's samples that count, and must not communicate. The
    other arguments are those of ``prune_blocks``. Every rank must call it.
    """
    calls_back = bool(max_together(comm, (1,), lambda any_rank: any_rank.fill_(on_block is not None))[0])
    reports = []
    with evaluating(model):
        with together(comm):
            mine = own_samples(sample_group, model, samples)
            walk = catch_inputs(model, mine.batches, offload=offload, comm=comm)
            if sample_group.size > 1:
                _check_whole(walk, samples.shape[1])
            if has_targets:
                walk.split()
            pruner = make_pruner(walk, mine.num_counted)
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


def _check_whole(walk: Walk, length: int) -> None:
    """Refuse hidden states that are cut along the sequence: ranks that share a sample would count tokens twice."""
    shape = tuple(walk.hidden[0].shape)
    if math.prod(shape[:-1]) != length:
        raise NotImplementedError(
            f"hidden states of shape {shape} between blocks, for samples of {length} tokens: a tensor-parallel plan "
            "must leave them whole on every rank (no SequenceParallel across blocks)"
        )


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
