"""What transformers and Accelerate save of reparametrized models, others load; and they resume from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distprune as prune
from tests.accelerated import accelerated
from tests.hf_models import ARCHITECTURES
from tests.worlds import ProcessPool, drawing

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
accelerate = pytest.importorskip("accelerate", reason="needs the extra hf")

IDS = torch.arange(24).view(4, 6)


def llama(*, tied: bool = False, seed: int = 0) -> Any:
    config = transformers.LlamaConfig(vocab_size=67, tie_word_embeddings=tied, **ARCHITECTURES["llama"])
    with drawing(seed):
        return transformers.LlamaForCausalLM(config).eval()


def prune_all(model: Any, *, ends: bool = False, amount: float = 0.5) -> None:
    """Prune the layers, or both ends, of which a model may tie the weights."""
    linear = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    chosen = [model.lm_head, model.model.embed_tokens] if ends else linear
    prune.prune_each([(module, "weight") for module in chosen], prune.L1Unstructured, amount=amount)


def num_zeros(model: nn.Module) -> int:
    return sum(int((parameter == 0).sum()) for parameter in model.parameters())


def assert_loads(folder: Path, model: Any) -> None:
    """Check that the files have what ``model`` computes with, and no other keys."""
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {what: keys for what, keys in said.items() if keys} == {}
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    for name, values in prune.dense_state_dict(model).items():
        assert torch.equal(loaded.get_parameter(name) == 0, values == 0), name
    assert num_zeros(loaded) > 0


@pytest.mark.parametrize("given", ["nothing", "dense_state_dict", "state_dict"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "5KB"])
@pytest.mark.parametrize(("tied", "ends"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.sampled(4)
def test_save_pretrained(tmp_path: Path, given: str, max_shard_size: str, tied: bool, ends: bool) -> None:
    model = llama(tied=tied)
    prune_all(model, ends=ends)
    states = {"nothing": {}, "dense_state_dict": {"state_dict": prune.dense_state_dict(model)}}
    states["state_dict"] = {"state_dict": model.state_dict()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size, **states[given])
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (max_shard_size == "5KB")
    assert_loads(tmp_path, model)
    after = model.state_dict()
    assert after.keys() == before.keys()  # with the mask, for all others
    assert all(torch.equal(after[name], value) for name, value in before.items())


def trainer(model: Any, folder: str, num_steps: int) -> Any:
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=num_steps,
        save_steps=2,
        save_strategy="steps",
        logging_steps=1,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in torch.cat([IDS, IDS + 7])]
    return transformers.Trainer(model, arguments, train_dataset=data)


def resumed_on_rank(_: int, folder: str) -> None:
    """Train for 4 steps; and for 2, saved, and 2 more from what was saved."""
    with accelerated("ddp"):
        model = llama()
        prune_all(model)
        whole = trainer(model, f"{folder}/whole", 4)
        whole.train()
        assert isinstance(whole.model_wrapped, nn.parallel.DistributedDataParallel)
        again = llama()
        prune_all(again)
        resumed = trainer(again, f"{folder}/resumed", 4)
        resumed.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
        for name, values in prune.dense_state_dict(model).items():
            assert torch.equal(prune.dense_state_dict(again)[name], values), name
        losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (whole, resumed)]
        assert losses[0] == losses[1]
        other = llama()
        prune_all(other, amount=0.25)
        with pytest.raises(RuntimeError, match="that the mask keeps"):
            trainer(other, f"{folder}/other", 4).train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
        assert_loads(Path(f"{folder}/whole/checkpoint-4"), model.eval())


@pytest.mark.whole
def test_a_trainer_resumes(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(2, resumed_on_rank, str(tmp_path))


def saved_by_accelerate_on_rank(_: int, folder: str) -> None:
    with accelerated("ddp"):
        model = llama()
        prune_all(model)
        accelerator = accelerate.Accelerator(cpu=True)
        wrapped = accelerator.prepare(model)
        accelerator.save_model(wrapped, folder)
        accelerator.save_state(f"{folder}/state")
        dist.barrier()
        loaded = llama(seed=1)
        said = accelerate.load_checkpoint_in_model(loaded, folder, strict=True)
        assert said is None
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1)
        accelerator.load_state(f"{folder}/state")  # with what is under the masks
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_accelerate_saves_a_model_for_others_and_a_state_to_go_on(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(2, saved_by_accelerate_on_rank, str(tmp_path))
