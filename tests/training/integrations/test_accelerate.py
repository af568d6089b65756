"""Accelerate saves and loads sparse training over DDP and FSDP2, begun before ``prepare`` or after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import distprune as prune
from distprune.training.schedules import cubic
from tests.accelerated import accelerated
from tests.sampling import only_whole
from tests.training.optimizers import INCLUDE
from tests.worlds import ProcessPool
from tests.wrapped import batches, pairs_of, transformer, whole

NUM_STEPS, SAVED_AT = 6, 3
FSDP2 = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def train_on_rank(rank: int, layout: str, begins_first: bool, folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    with accelerated(layout) as start:
        start()
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**FSDP2) if layout == "fsdp2" else None
        )
        model = transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared = () if begins_first else accelerator.prepare(model, optimizer)
        training = prune.SparseTraining(*(prepared or (model, optimizer)), schedule=cubic(0.8, stop=4), include=INCLUDE)
        model, optimizer = prepared or accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(training)
        losses: list[float] = []
        weights: list[torch.Tensor] = []
        for is_resumed in (False, True):
            if is_resumed:
                accelerator.load_state(str(folder))
                assert training.step == SAVED_AT
            for step in range(SAVED_AT if is_resumed else 0, NUM_STEPS):
                if step == SAVED_AT and not is_resumed:
                    accelerator.save_state(str(folder))
                own = batches(NUM_STEPS)[step].chunk(accelerator.num_processes)[rank]
                logits = model(own[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            weights += [whole(module.get_parameter(name)) for module, name in pairs_of(model)]
        return losses, weights


@pytest.mark.parametrize(
    ("layout", "begins_first"), [("ddp", True), ("fsdp2", False), only_whole("ddp", False), only_whole("fsdp2", True)]
)
@pytest.mark.sampled(1)
def test_resumes(pool: ProcessPool, tmp_path: Path, layout: str, begins_first: bool) -> None:
    for losses, weights in pool.run(2, train_on_rank, layout, begins_first, tmp_path):
        assert losses[NUM_STEPS:] == losses[SAVED_AT:NUM_STEPS]
        num = len(weights) // 2
        assert all(map(torch.equal, weights[:num], weights[num:]))
        flat = torch.cat([weight.flatten() for weight in weights[:num]])
        assert int((flat == 0).sum()) == round(0.8 * flat.numel())
