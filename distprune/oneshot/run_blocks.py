"""A walk through the blocks of a model, each of which is pruned on the way; and what that took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from distprune.calibration import SampleGroup, walking
from distprune.collectives import Communicator, max_together, sum_together, together
from distprune.oneshot.block import BlockPruner, PruneRows, WalkOptions
from distprune.oneshot.block_layers import BlockLayers
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.shards import LocalShard

__all__ = ["Finished", "Meter", "OnBlock", "run_blocks"]

OnBlock = Callable[[int, BlockReport], None]
Finished = Callable[[int], bool]


def run_blocks(
    meter: Meter,
    sample_group: SampleGroup,
    model: nn.Module,
    samples: torch.Tensor,
    options: WalkOptions,
    linears: Sequence[BlockLayers],
    shards: Sequence[LocalShard],
    prune_rows: PruneRows,
    *,
    offload: bool,
    finished: Finished | None,
    on_block: OnBlock | None,
    **about: Any,
) -> OneShotReport:
    """Run ``samples`` through the blocks of ``model`` and prune ``linears`` of each, but of those that are skipped.

    ``shards``: this rank's part of all parameters that are pruned, owners settled; ``about``: what else the report
    says. The other arguments are those of :class:`BlockPruner` and ``prune_blocks``. Every rank must call it.
    """
    comm, reports = meter.comm, list[BlockReport]()
    calls_back = bool(max_together(comm, (1,), lambda any_rank: any_rank.fill_(on_block is not None))[0])
    owned = {shard.name: shard.owned for shard in shards}
    with walking(comm, sample_group, model, samples, offload=offload, has_dense=options.has_targets) as walk:
        pruner = BlockPruner(comm, walk, options, linears, owned, prune_rows)
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
    return OneShotReport(
        sequential="layer" if options.by_layer else "block",
        target_share=options.target_share,
        num_samples=len(samples),
        blocks=tuple(reports),
        **about,
        **meter.read(),
    )


class Meter:
    """Measures time and traffic from where it is made."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._started, self._traffic = comm, time.perf_counter(), comm.traffic.copy()

    def read(self) -> dict[str, Any]:
        """Return what it took so far, as the report says it. Every rank must call it: one round of 8 bytes a rank."""
        comm = self.comm
        used = comm.traffic - self._traffic
        peaks = sum_together(comm, (comm.size,), lambda of_ranks: of_ranks[comm.rank].fill_(_peak_memory()))
        return {
            "seconds": time.perf_counter() - self._started,
            "num_rounds": used.num_rounds,
            "num_bytes": used.num_bytes,
            "peak_memory": tuple(peaks.tolist()),
        }


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
