"""Whether there is room for a walk: what it takes, beside the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from distprune.calibration.available import available_bytes
from distprune.oneshot.admm import ADMM
from distprune.oneshot.memory_plan import WAVES, WEIGHTS, MemoryPlan, plan_walk
from distprune.oneshot.model_shape import shape_of
from distprune.oneshot.plan import OneShotPlan
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.oneshot.walk_costs import WalkRequest
from distprune.shards.device import on_host
from distprune.shards.local_shard import LocalShard

# Measured peaks were 0.90 to 1.02 of what is planned (ADMM, SparseGPT and Wanda, 1 and 2 ranks, also of experts). What
# fits but for a quarter is not refused.
SURE = 0.75
_NUM_NAMED = 3  # parts that an error names


def check_room(model: nn.Module, plan: OneShotPlan, num_ranks: int, *, offload: bool) -> None:
    """Refuse a walk for which this rank's device has no room by far more than a plan may be wrong by. Local.

    Of a model on the host nothing is said, nor where nobody knows how much memory there is.

    Raises:
        ValueError: it names what the most memory is for, and ways out.
    """
    device = next((shard.local.device for shard in plan.shards), torch.device("cpu"))
    free = None if on_host(device) else available_bytes(device)
    if free is None:
        return
    options, solver = plan.options, plan.solver
    num_samples, length = plan.samples.shape
    names: dict[type, str] = {ADMM: "admm", SparseGPT: "sparsegpt"}
    asked = WalkRequest(
        num_ranks,
        num_samples,
        length,
        names.get(type(solver), "scored"),
        pairs=solver.needs == "products" or options.has_targets,
        by_row=plan.pattern.by_row().is_by_row,
        by_layer=options.by_layer,
        has_targets=options.has_targets,
        offload=offload,
        expert_memory=options.expert_memory,
        fits=options.fits,
        tries=True,
        num_sharing=1 if plan.axis is None else len(plan.axis.ranks),
        num_parts=_num_parts(plan.shards),
        permutes=options.permutes,
    )
    walk = plan_walk(shape_of(model), asked)
    if SURE * walk.beyond_weights > free:
        raise ValueError(
            f"the walk takes {gibibytes(walk.beyond_weights)} of {gibibytes(free)} that are free on the device, beside "
            f"the weights: {largest_parts(walk)}. {ways_out(asked, walk, is_host=False)}"
        )


def _num_parts(shards: Sequence[LocalShard]) -> int:
    """Return how many ranks a parameter is cut over, replicas of one part being one."""
    there = sum(math.prod(shard.geometry.global_shape) for shard in shards)
    return max(1, round(there / max(1, sum(shard.local.numel() for shard in shards))))


def largest_parts(plan: MemoryPlan) -> str:
    """Name what most of the memory is for, but for the weights."""
    sizes = {name: max(of.device, of.host) for name, of in {**plan.host_parts, **plan.device_parts}.items()}
    largest = sorted(sizes.keys() - {WEIGHTS}, key=lambda name: -sizes[name])[:_NUM_NAMED]
    return ", ".join(f"{name} {gibibytes(sizes[name])}" for name in largest)


def ways_out(asked: WalkRequest, plan: MemoryPlan, *, is_host: bool) -> str:
    """Say what to ask for instead."""
    ways = ["fewer samples (--samples)", "more ranks"]
    ways += [] if asked.offload or is_host else ["offload=True (--offload)"]
    ways += ["refit='none' (--refit none)"] if asked.fits else []
    ways += ["targets='own' (--targets own)"] if asked.has_targets else []
    ways += ["less expert_memory"] if WAVES in plan.parts and asked.expert_memory > 1 else []
    return f"Ways out: {', '.join(ways)}; --plan shows what each takes"


def gibibytes(num_bytes: float) -> str:
    """Return ``num_bytes`` as text."""
    return f"{num_bytes / 2**30:.3g} GiB"
