"""What a one-shot job is given that is wrong: an error on every rank, and nothing is written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune import NByM
from distprune.checkpoint.output_lock import locking
from distprune.collectives.communicator import communicator
from distprune.jobs import OneShotJob, PlanJob, run_one_shot_job, run_plan_job
from tests.hf_models import make_model, make_tokenizer
from tests.jobs.jobs_of_a_kind import run_on_rank
from tests.worlds import ProcessPool, run_threads


def run(pool: ProcessPool, job: OneShotJob) -> list[str]:
    """Return what was raised on each of two ranks, as text."""
    return list(map(str, pool.run(2, run_on_rank, job)))


def is_refused(pool: ProcessPool, job: OneShotJob, *messages: str) -> None:
    for error in run(pool, job):
        assert error.startswith("ValueError: ")
        assert all(message in error for message in messages), error
    assert not list(Path(job.output).parent.glob("*"))


def spoil(job: OneShotJob, tensor: str, index: int, value: float) -> None:
    path = Path(job.model) / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][index] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_empty_text(pool: ProcessPool, job: OneShotJob) -> None:
    Path(job.calibration).write_text("")
    is_refused(pool, job, "holds 0 tokens; 5 samples of 24 tokens need 120: give more text")


def test_shares_by_gradients_of_a_pattern_without_a_share(pool: ProcessPool, job: OneShotJob) -> None:
    job = dataclasses.replace(job, pattern=NByM(2, 4), allocation="gradients")
    is_refused(pool, job, "allocation='gradients' needs a pattern with one share", "NByM(n=2, m=4)")


def test_too_little_text(pool: ProcessPool, job: OneShotJob) -> None:
    Path(job.calibration).write_text("a" * 119)
    is_refused(pool, job, "holds 119 tokens; 5 samples of 24 tokens need 120", "ask for at most 4 samples")


def test_tokens_outside_of_the_vocabulary(pool: ProcessPool, job: OneShotJob) -> None:
    path = Path(job.model) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {token: number + 60 for token, number in tokenizer["model"]["vocab"].items()}
    path.write_text(json.dumps(tokenizer))
    is_refused(pool, job, "is outside the model's vocabulary of 67", "is the tokenizer another model's?")


def run_in_own_folder(rank: int, folder: Path, job: OneShotJob) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / str(rank))
        return run_on_rank(rank, job)


def test_ranks_that_see_different_text(pool: ProcessPool, tmp_path: Path, job: OneShotJob) -> None:
    text = Path(job.calibration).read_text()
    for rank, own in enumerate((text, text.replace("union", "onion"))):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_text(own)
    for error in pool.run(2, run_in_own_folder, tmp_path, dataclasses.replace(job, calibration="text.txt")):
        assert error.startswith("ValueError: ranks were called with different arguments: calibration tokens: ")
    assert not list(Path(job.output).parent.glob("*"))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"ranks": 8}, "--ranks: null on rank 0; 8 on rank 1"),
        ({"model": "elsewhere"}, "--model"),
        ({"samples": None}, "--samples"),
        ({"dtype": torch.bfloat16}, "--dtype"),
        ({"own_words": 3}, "--own-words"),
        (None, 'called different functions: "run_plan_job" on rank 0; "run_one_shot_job" on rank 1'),
    ],
)
def test_ranks_that_plan_different_jobs(job: OneShotJob, change: dict[str, Any] | None, shown: str) -> None:
    plan = PlanJob(**vars(job))

    def on_rank(rank: int) -> object:
        if rank == 0:
            return run_plan_job(plan)
        return run_one_shot_job(job) if change is None else run_plan_job(dataclasses.replace(plan, **change))

    for error in run_threads(2, on_rank, catch=True):
        assert type(error) is ValueError
        assert shown in str(error)
    assert not list(Path(job.output).parent.glob("*"))


def test_a_model_without_blocks(pool: ProcessPool, tmp_path: Path, job: OneShotJob) -> None:
    model = make_model(tmp_path / "empty", num_hidden_layers=0)
    make_tokenizer(model)
    wanted = "looked for a torch.nn.ModuleList (or a ModuleDict with numbered keys)"
    is_refused(pool, dataclasses.replace(job, model=str(model)), "no decoder blocks in LlamaForCausalLM", wanted)


def test_a_missing_tokenizer(pool: ProcessPool, job: OneShotJob) -> None:
    for path in Path(job.model).glob("tokenizer*"):
        path.unlink()
    is_refused(pool, job, "holds no tokenizer that transformers can load")


def test_a_tokenizer_that_is_missing_on_one_rank(pool: ProcessPool, tmp_path: Path, job: OneShotJob) -> None:
    for rank in ("0", "1"):
        shutil.copytree(job.model, tmp_path / rank / "model")
    for path in (tmp_path / "1" / "model").glob("tokenizer*"):
        path.unlink()
    first, second = pool.run(2, run_in_own_folder, tmp_path, dataclasses.replace(job, model="model"))
    assert first.startswith("ValueError: rank 1 of 2: model holds no tokenizer that transformers can load")
    assert second.startswith("ValueError: model holds no tokenizer that transformers can load")
    assert not list(Path(job.output).parent.glob("*"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_activations_that_are_no_numbers(pool: ProcessPool, job: OneShotJob, value: float) -> None:
    spoil(job, "model.layers.1.post_attention_layernorm.weight", 3, value)
    for error in run(pool, job):
        assert error.startswith("ValueError: block 'model.layers.1': NaN or Inf in the inputs of 'mlp.gate_proj'")
    assert os.listdir(Path(job.output).parent) == []  # the first block was written


def test_activations_that_are_no_numbers_on_one_rank(pool: ProcessPool, job: OneShotJob) -> None:
    vocabulary = json.loads((Path(job.model) / "tokenizer.json").read_text())["model"]["vocab"]
    text = Path(job.calibration).read_text().replace("w", "k")
    text = "w" + text[1 : job.sequence_length * 5]  # in the first sample of five, which is rank 0's
    Path(job.calibration).write_text(text)
    spoil(job, "model.embed_tokens.weight", vocabulary["w"], torch.nan)
    for error in run(pool, job):
        assert error.startswith("ValueError: block 'model.layers.0': NaN or Inf in the inputs of 'self_attn.q_proj'")
    assert not Path(job.output).exists()


def run_with_little_room(rank: int, job: OneShotJob) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        return run_on_rank(rank, job)


def test_a_disk_that_is_too_small(pool: ProcessPool, job: OneShotJob) -> None:
    for error in pool.run(2, run_with_little_room, job):
        assert error.startswith("OSError: ")
        assert "has 1,000 bytes free, and" in error
    assert list(Path(job.output).parent.iterdir()) == []


def test_two_jobs_at_one_output(job: OneShotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distprune.jobs.run.load_model", lambda *_, **__: pytest.fail("loaded"))
    output = Path(job.output)
    with locking(communicator(), output):
        with pytest.raises(OSError, match=rf"is being written by process {os.getpid()} on "):
            run_one_shot_job(job)
    assert not list(output.parent.iterdir())


def test_overwrite_keeps_the_text_it_calibrates_on(job: OneShotJob) -> None:
    run_one_shot_job(job)
    text = Path(job.output) / "vocab.txt"  # a name that a model's files have
    shutil.copyfile(job.calibration, text)
    with pytest.raises(ValueError, match="lie inside each other"):
        run_one_shot_job(dataclasses.replace(job, overwrite=True, calibration=str(text)))
    assert text.is_file()


def test_after_an_error_with_no_block_done_the_mended_job_starts(job: OneShotJob) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        run_one_shot_job(dataclasses.replace(job, pattern=NByM(3, 11)))
    assert list(Path(job.output).parent.iterdir()) == []
    run_one_shot_job(job)
