"""What a walk, or writing own words, takes of the memory there is. What does not fit is refused, or done in parts."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import nn

from distprune.calibration.available import available_bytes
from distprune.calibration.own_words import writing_bytes
from distprune.collectives.agree import max_together, together, told_by_all
from distprune.collectives.base import Communicator
from distprune.jobs.run import Run
from distprune.oneshot.memory_plan import MemoryPlan, fitted
from distprune.oneshot.room import SURE, gibibytes, largest_parts, ways_out
from distprune.oneshot.walk_costs import ModelShape, WalkRequest

_UNKNOWN = 1 << 62
_TOKEN_BYTES = 24  # of a window: as it was written, and in the message that tells it to all ranks, twice


def num_on_machine(comm: Communicator) -> int:
    """Return how many ranks run on this one's machine. Every rank must call it: the rounds of ``told_by_all``."""
    return next(len(ranks) for ranks, _ in told_by_all(comm, platform.node) if comm.rank in ranks)


def fit_memory(run: Run, model: ModelShape, asked: WalkRequest) -> int:
    """Return the ``expert_memory`` with which the walk fits beside the weights, which are there already.

    If that is less than what is asked for, it is said. The ranks of a machine share what its host has. Every rank must
    call it: the rounds of ``told_by_all``, one of 24 bytes and one of 64.

    Raises:
        ValueError: on every rank: the walk does not fit, by far more than what a plan may be wrong by.
    """
    host, num_here = torch.device("cpu"), num_on_machine(run.comm)

    def tell(words: torch.Tensor) -> None:
        on_device = _UNKNOWN if run.device.type == "cpu" else available_bytes(run.device)
        on_host = available_bytes(host)
        free = [on_device, None if on_host is None else on_host // num_here]
        told = [-_UNKNOWN if of is None else -of for of in free]
        words.copy_(torch.tensor(told, dtype=torch.int64, device="cpu"))

    on_device, on_host = (-max_together(run.comm, (2,), tell)).tolist()  # on the rank that has the least

    def lacks(plan: MemoryPlan) -> list[str]:
        """Return what is not there although it is certain to be taken."""
        device, here = _needs(plan, is_host=run.device.type == "cpu")
        return [
            f"{gibibytes(needed)} of {gibibytes(free)} that are free on the {where}"
            for needed, free, where in ((device, on_device, "device"), (here, on_host, "host"))
            if SURE * needed > free
        ]

    def fits(plan: MemoryPlan) -> bool:
        device, here = _needs(plan, is_host=run.device.type == "cpu")
        return bool(device <= on_device and here <= on_host)

    with together(run.comm):
        fitting, plan = fitted(model, asked, fits)
        if lacking := lacks(plan):
            raise ValueError(
                f"the walk takes {' and '.join(lacking)}, for each rank and beside its weights: {largest_parts(plan)}. "
                f"{ways_out(fitting, plan, is_host=run.device.type == 'cpu')}"
            )
    if fitting.expert_memory < asked.expert_memory:
        run.reporter.say(
            f"experts are pruned in more waves, to fit in memory: {gibibytes(fitting.expert_memory)} of their sums at "
            f"a time, where {gibibytes(asked.expert_memory)} are usual"
        )
    return fitting.expert_memory


def fit_writing(comm: Communicator, model: nn.Module, texts: Sequence[tuple[int, int]], device: torch.device) -> None:
    """Refuse to write where there is no room by far. Every rank must call it: the rounds of ``told_by_all``, and one.

    ``texts``: how many, and of how many tokens, of each kind.

    Raises:
        ValueError: on every rank: less memory is free on one than writing takes beside the weights.
    """
    num_here = num_on_machine(comm)
    with together(comm):
        windows = _TOKEN_BYTES * sum(num * length for num, length in texts)
        beside = max(writing_bytes(model, num, length, comm.size) for num, length in texts)
        host, is_host = torch.device("cpu"), device.type == "cpu"
        for where, taken in ((host, windows + beside if is_host else windows), (device, 0 if is_host else beside)):
            free = available_bytes(where)
            room = None if free is None else free // num_here if where.type == "cpu" else free
            if room is not None and SURE * taken > room:
                raise ValueError(
                    f"writing own words takes {gibibytes(taken)} of {gibibytes(room)} that are free on {where.type}, "
                    "beside the weights: ask for fewer or shorter windows, start more ranks, or give a file that was "
                    "written elsewhere (--own-words-file)"
                )


def _needs(plan: MemoryPlan, *, is_host: bool) -> tuple[float, float]:
    """Return what the walk takes on the device and on the host, which may be one, beside the weights."""
    return (0.0, plan.beyond_weights + plan.most.host) if is_host else (plan.beyond_weights, plan.most.host)
