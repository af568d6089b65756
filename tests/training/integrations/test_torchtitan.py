"""Sparse training beside torchtitan's optimizers and checkpointer: what is resumed goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distprune as prune
from distprune.training.integrations.torchtitan import train_sparsely
from distprune.training.schedules import cubic
from distprune.training.sparse_training import SparseTraining
from tests.training.optimizers import INCLUDE
from tests.worlds import ProcessPool
from tests.wrapped import batches, pairs_of, transformer, whole, wrap

NUM_STEPS, SAVED_AT = 6, 3
KINDS: dict[str, dict[str, Any]] = {"fixed": {}, "taylor": {"schedule": cubic(0.8, stop=4), "score": "taylor"}}


def train_on_rank(_: int, kind: str, folder: Path) -> list[tuple[list[float], list[torch.Tensor], int]]:
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    results = []
    for is_resumed in (False, True):
        wrapped = wrap("fsdp2", transformer(seed=int(is_resumed)))
        if kind == "fixed" and not is_resumed:
            prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
        # What the Trainer of 0.3.0 builds, in its order.
        config = default_adamw(lr=1e-2)
        config.implementation = "for-loop"
        optimizers = config.build(model_parts=[wrapped.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=NUM_STEPS)
        checkpointer = CheckpointManager.Config(enable=True, interval=SAVED_AT).build(
            dataloader=None,
            model_parts=[wrapped.model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )
        trainer = SimpleNamespace(model_parts=[wrapped.model], optimizers=optimizers, checkpointer=checkpointer)
        training = train_sparsely(trainer, **{"include": INCLUDE, **KINDS[kind]})
        if is_resumed:
            assert checkpointer.load(step=SAVED_AT)
        losses = []
        for step in range(SAVED_AT if is_resumed else 0, NUM_STEPS):
            losses.append(float(wrapped.step(batches(NUM_STEPS)[step])))
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            checkpointer.save(step + 1)
        checkpointer.close()
        weights = [whole(module.get_parameter(name)) for module, name in pairs_of(wrapped.model)]
        results.append((losses, weights, training.step if isinstance(training, SparseTraining) else NUM_STEPS))
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_resumes(pool: ProcessPool, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    for (losses, weights, step), (resumed_losses, resumed_weights, resumed_step) in pool.run(
        2, train_on_rank, kind, tmp_path
    ):
        assert resumed_losses == losses[SAVED_AT:]
        assert step == resumed_step == NUM_STEPS
        assert all(map(torch.equal, weights, resumed_weights))
        num_zeros, num_elements = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
        assert num_zeros == round((0.5 if kind == "fixed" else 0.8) * num_elements)


def test_several_stages_on_a_rank() -> None:
    with pytest.raises(NotImplementedError, match="one pipeline stage a rank, not 2"):
        train_sparsely(SimpleNamespace(model_parts=[transformer(), transformer()]))
