"""What a Trainer resumes is what would have been without the interruption: the same losses, the same masks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from typing_extensions import override

import distprune as prune
from distprune.shards.layouts import local_of
from distprune.training.integrations.transformers import SparseTrainingCallback
from distprune.training.schedules import constant, cubic
from distprune.training.sparse_training import SparseTraining
from tests.accelerated import accelerated
from tests.hf_models import ARCHITECTURES
from tests.sampling import only_whole
from tests.worlds import ProcessPool, drawing
from tests.wrapped import whole

NUM_STEPS, SAVED_AT, SKIPPED = 6, 3, 1
KINDS = {"fixed": None, "cubic": cubic(0.8, stop=4)}
SHARE = {"fixed": 0.5, "cubic": 0.8}
LAYOUTS = {"ddp": "", "fsdp2-sharded": "SHARDED_STATE_DICT", "fsdp2-full": "FULL_STATE_DICT"}


class Events(TrainerCallback):  # type: ignore[misc]
    """Leaves out a step, as a GradScaler does, and at the end a kept weight touches zero."""

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step == SKIPPED:
            optimizer.step = lambda: None

    @override
    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        vars(optimizer).pop("step", None)

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step == NUM_STEPS:
            local = local_of(pruned(model)[0].detach())
            local[local != 0] = torch.where(torch.arange(int((local != 0).sum())) == 0, -0.0, local[local != 0])


def pruned(model: nn.Module) -> list[nn.Parameter]:
    return [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]


def llama(seed: int) -> nn.Module:
    config = LlamaConfig(vocab_size=67, bos_token_id=0, eos_token_id=1, pad_token_id=2, **ARCHITECTURES["llama"])
    with drawing(seed):
        return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def trainer_of(
    start: Callable[[], None], model: nn.Module, folder: Path, state_dict_type: str, *callbacks: TrainerCallback
) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(67, (64, 12), generator=generator)
    wrapping = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": state_dict_type}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=SAVED_AT,
        report_to="none",
        disable_tqdm=True,
        fsdp=bool(state_dict_type),
        fsdp_config=wrapping if state_dict_type else None,
    )
    arguments.device  # noqa: B018 - it forgets a state that is there
    start()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))


def train_on_rank(_: int, layout: str, kind: str, folder: Path) -> list[Any]:
    """Train; resume in a new Trainer from the middle; return losses, masks and steps of both."""
    results = []
    for is_resumed in (False, True):
        with accelerated(layout.partition("-")[0]) as start:
            model = llama(seed=int(is_resumed))
            if kind == "fixed" and not is_resumed:
                prune.prune_model(model, SHARE[kind], group=None)
            callback = SparseTrainingCallback(KINDS[kind])
            trainer = trainer_of(start, model, folder, LAYOUTS[layout], Events(), callback)
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if is_resumed else None)
            wrapped = trainer.model_wrapped
            assert isinstance(wrapped, nn.parallel.DistributedDataParallel) == (layout == "ddp")
            weights = [whole(weight) for weight in pruned(trainer.model)]
            assert not any(weight.signbit()[weight == 0].any() for weight in weights)
            logs = trainer.state.log_history
            losses = {log["step"]: log["loss"] for log in logs if "loss" in log}
            assert logs[-1]["sparsity"] == SHARE[kind]
            training = callback.training
            results.append((losses, weights, training.step if isinstance(training, SparseTraining) else None))
            if layout == "fsdp2-sharded":
                trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            trainer.save_model(str(folder / "model"))
    return results


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("ddp", "fixed"),
        ("fsdp2-full", "cubic"),
        only_whole("fsdp2-sharded", "cubic"),
        only_whole("ddp", "cubic"),
        only_whole("fsdp2-sharded", "fixed"),
        only_whole("fsdp2-full", "fixed"),
    ],
)
@pytest.mark.sampled(1)
def test_resumes(pool: ProcessPool, tmp_path: Path, layout: str, kind: str) -> None:
    for (losses, weights, step), (resumed_losses, resumed_weights, resumed_step) in pool.run(
        2, train_on_rank, layout, kind, tmp_path
    ):
        assert list(resumed_losses.items()) == list(losses.items())  # the first ones are the checkpoint's
        assert all(map(torch.equal, weights, resumed_weights))
        assert step == resumed_step == (None if kind == "fixed" else NUM_STEPS - 1)
    num_elements = sum(weight.numel() for weight in weights)
    saved = ["model"] if layout == "fsdp2-sharded" else ["model", f"checkpoint-{NUM_STEPS}"]
    for name in saved:
        loaded, notes = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(notes.values()), notes
        flat = torch.cat([weight.detach().flatten() for weight in pruned(loaded)])
        num_held, num_signed = int((flat.view(torch.int32) == 0).sum()), int(flat.signbit()[flat == 0].sum())
        if name == "model":
            assert num_signed == 0
            assert int((flat == 0).sum()) == sum(int((weight == 0).sum()) for weight in weights)
        else:
            assert num_signed > 0
            assert num_held == round(SHARE[kind] * num_elements)


class Seen(TrainerCallback):  # type: ignore[misc]
    """What TensorBoard's and wandb's callbacks would report: they come before a user's."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))


def logged_on_rank(_: int, folder: Path) -> list[dict[str, float]]:
    callback, seen = SparseTrainingCallback(constant(0.5), scope="tensor"), Seen()
    with accelerated("ddp") as start:
        trainer = trainer_of(start, llama(seed=0), folder, "", seen, callback)
        callback.put_first(trainer)
        trainer.train()
    return seen.logs


def test_logs(pool: ProcessPool, tmp_path: Path) -> None:
    """In all with every log, and by parameter when that changes."""
    (logs,) = pool.run(1, logged_on_rank, tmp_path)
    assert [log["sparsity"] for log in logs] == [0.5] * len(logs)
    by_name = [{name: share for name, share in log.items() if name.startswith("sparsity/")} for log in logs]
    assert by_name[0]["sparsity/model.layers.0.mlp.up_proj.weight"] == 0.5
    assert len(by_name[0]) == 2 * 7
    assert not any(by_name[1:])


def resume_dense_on_rank(_: int, folder: Path) -> list[tuple[int, float]]:
    callback = SparseTrainingCallback(constant(0.5), score="taylor")
    with accelerated("ddp") as start:
        trainer_of(start, llama(seed=0), folder, "").train()
    with accelerated("ddp") as start:
        resumed = trainer_of(start, llama(seed=1), folder, "", callback)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}"))
    training = callback.training
    assert isinstance(training, SparseTraining)
    return [(update.step, update.sparsity) for update in training.updates]


def test_goes_on_from_a_dense_checkpoint(pool: ProcessPool, tmp_path: Path) -> None:
    assert pool.run(1, resume_dense_on_rank, tmp_path) == [[(SAVED_AT, 0.5)]]
    saved = json.loads((tmp_path / f"checkpoint-{NUM_STEPS}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["distprune.SparseTraining"] == {"step": NUM_STEPS}
