"""Accelerate on the ranks of a pool, on CPU, with DDP or FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

__all__ = ["accelerated"]


@contextmanager
def accelerated(layout: str) -> Iterator[Callable[[], None]]:
    """Prepare this rank, and leave it as it was. What is yielded starts Accelerate's state, so that FSDP is possible.

    Accelerate 1.15.0 drops an FSDP plugin without a word where its ranks are on CPU (``AcceleratorState`` has a list of
    accelerators), so it is told that they are on one; the device stays CPU, and the backend gloo.
    """
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}

    def start() -> None:
        state = PartialState(cpu=True)
        assert state.device.type == "cpu"
        if layout == "fsdp2":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    elsewhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, launched | elsewhere):
        forget()
        try:
            yield start
        finally:
            forget()
