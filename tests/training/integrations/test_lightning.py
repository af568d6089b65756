"""What a Lightning Trainer resumes is what would have been without the interruption: the same losses and masks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

import distprune as prune
from distprune.training.hold import Hold
from distprune.training.schedules import cubic, stepwise
from distprune.training.sparse_training import SparseTraining
from tests.training.optimizers import INCLUDE
from tests.worlds import ProcessPool
from tests.wrapped import Wrapped, batches, pairs_of, transformer, whole

pytest.importorskip("lightning", reason="needs the extra lightning")
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from distprune.training.integrations.lightning import SparseTrainingCallback

NUM_STEPS = 6  # two epochs
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "cubic": {"schedule": cubic(0.8, stop=4)},
    "taylor": {"schedule": cubic(0.8, stop=4), "score": "taylor"},
}
STRATEGIES = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "fsdp2-sharded": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "fsdp2-full": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
}


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = transformer(seed)

    @override
    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.model, FSDPModule):
            for module in (*self.model.layers, self.model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    @override
    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        logits = self.model(own[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(module: Module, kind: str, strategy: Strategy, folder: Path, checkpoint: str | None) -> tuple[Any, ...]:
    callback, losses = SparseTrainingCallback(**{"include": INCLUDE, **KINDS[kind]}), Losses()
    saves = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=LightningEnvironment(),
        max_epochs=2,
        callbacks=[callback, losses, saves],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows: Any = batches(NUM_STEPS // 2)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None), ckpt_path=checkpoint)
    weights = [whole(inner.get_parameter(name)) for inner, name in pairs_of(module.model)]
    assert trainer.callback_metrics["sparsity"] == pytest.approx(0.5 if kind == "fixed" else 0.8, abs=1e-3)
    return losses.losses, weights, callback.training


def train_on_rank(rank: int, layout: str, kind: str, folder: Path) -> list[tuple[Any, ...]]:
    results = []
    launched = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for is_resumed in (False, True):
        with mock.patch.dict(os.environ, launched):
            module = Module(seed=int(is_resumed))
            if kind == "fixed" and not is_resumed:
                prune.prune_model(module, 0.5, include=INCLUDE)
            checkpoint = str(folder / "epoch=0.ckpt") if is_resumed else None
            losses, weights, training = fit(module, kind, STRATEGIES[layout](), folder, checkpoint)
        assert isinstance(training, Hold if kind == "fixed" else SparseTraining)
        results.append((losses, weights, training.step if isinstance(training, SparseTraining) else NUM_STEPS))
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", STRATEGIES)
def test_resumes(pool: ProcessPool, tmp_path: Path, layout: str, kind: str) -> None:
    for (losses, weights, step), (resumed_losses, resumed_weights, resumed_step) in pool.run(
        2, train_on_rank, layout, kind, tmp_path
    ):
        assert step == resumed_step == len(losses) == NUM_STEPS
        assert resumed_losses == losses[NUM_STEPS // 2 :]
        assert all(map(torch.equal, weights, resumed_weights))


AVERAGES = {
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
}


class Logger(DummyLogger):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append(dict(metrics))


def averaged_on_rank(rank: int, name: str, comes_first: bool) -> None:
    launched = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, launched):
        module, logger = Module(0), Logger()
        schedule = stepwise({0: 0.25, 7: 0.75})  # averages of the last epochs have zeros, but not enough
        callbacks = [SparseTrainingCallback(schedule, scope="tensor", include=INCLUDE), AVERAGES[name]()]
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            plugins=LightningEnvironment(),
            max_epochs=3,
            callbacks=callbacks if comes_first else callbacks[::-1],
            logger=logger,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows: Any = batches(NUM_STEPS // 2)
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))
    assert prune.sparsity(module, include=INCLUDE) == 0.75
    assert sum("sparsity" in metrics for metrics in logger.metrics) == 9
    shares = [metrics["sparsity/model.layers.0.up.weight"] for metrics in logger.metrics if len(metrics) == 8]
    assert shares == [0.25, 0.75]


@pytest.mark.parametrize(("name", "comes_first"), [("SWA", True), ("EMA", False)])
def test_averages_of_weights(pool: ProcessPool, name: str, comes_first: bool) -> None:
    """What other callbacks write into the model at the end has zeros, too."""
    pool.run(1, averaged_on_rank, name, comes_first)


def test_equals_a_plain_loop(pool: ProcessPool, tmp_path: Path) -> None:
    """Lightning computes gradients within the step, in a closure; scores find them all the same."""
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    SparseTraining(model, optimizer, include=INCLUDE, **KINDS["taylor"])
    for tokens in batches(NUM_STEPS // 2) * 2:
        Wrapped(model, 0, 1).step(tokens)
        optimizer.step()
        optimizer.zero_grad()
    ((_, weights, _), _), *_ = pool.run(2, train_on_rank, "ddp", "taylor", tmp_path)
    for weight, (module, name) in zip(weights, pairs_of(model), strict=True):
        assert torch.equal(weight == 0, module.get_parameter(name) == 0)
