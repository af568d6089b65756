"""Fine-tuning with the zeros held: what is learned, over any ranks, killed and resumed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from distprune import Unstructured
from distprune.jobs import (
    FinetuneJob,
    PruneJob,
    finetune,
    run_finetune_job,
    run_prune_job,
)
from tests.hf_models import ARCHITECTURES, make_model, make_tokenizer
from tests.jobs.jobs_of_a_kind import Killed
from tests.jobs.test_prune import Heard
from tests.small_job import small_finetune_job
from tests.worlds import ProcessPool

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def pruned_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the tiny Llama is zero, some of it -0.0, as other tools write it; and all of one norm is."""
    folder = tmp_path_factory.mktemp("pruned") / "model"
    run_prune_job(PruneJob(model=str(model_folder), output=str(folder), pattern=Unstructured(0.5)))
    tensors = load_file(folder / WEIGHTS)
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    weight[weight == 0] = -0.0
    tensors["model.layers.0.input_layernorm.weight"].zero_()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture
def job(pruned_folder: Path, text_file: Path, tmp_path: Path) -> FinetuneJob:
    job = small_finetune_job(pruned_folder, text_file, tmp_path, steps=6)
    return dataclasses.replace(job, output=str(tmp_path / "out"), learning_rate=0.01, batch_size=3)


def run_on_rank(_: int, job: FinetuneJob) -> Any:
    """Run this rank's job; return its losses, or the error as text."""
    try:
        return list(run_finetune_job(job).work.losses)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def zeros(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor == 0 for name, tensor in load_file(Path(folder) / WEIGHTS).items()}


@pytest.mark.parametrize(("distilled", "compute_dtype"), [(False, torch.bfloat16), (True, torch.float32)])
@pytest.mark.sampled(1)
def test_it_learns_and_the_zeros_are_those_that_were(
    job: FinetuneJob, model_folder: Path, text_file: Path, distilled: bool, compute_dtype: torch.dtype
) -> None:
    heard = Heard()
    teacher = str(model_folder) if distilled else None
    asked = dataclasses.replace(
        job,
        steps=30,
        teacher=teacher,
        compute_dtype=compute_dtype,
        evaluate_on=(str(text_file),),
        evaluation_length=16,
    )
    report = run_finetune_job(asked, watcher=heard).to_dict()
    before, after = zeros(job.model), zeros(job.output)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    training = report["training"]
    assert training["num_zeros"] == sum(int(of.sum()) for of in before.values())
    assert len(training["losses"]) == training["num_steps"] == 30
    assert training["num_tokens"] == 30 * 3 * 16
    assert sum(training["losses"][-5:]) < 0.9 * sum(training["losses"][:5])
    assert report["perplexity_after"][str(text_file)] < report["perplexity_before"][str(text_file)]
    assert heard.stages["training steps"] == [(step, 30) for step in range(1, 31)]
    assert json.loads((Path(job.output) / "report.json").read_text())["training"] == training
    card = ModelCard.load(Path(job.output) / "README.md")
    method = "masked fine-tuning" + (", distilled from the dense model" if distilled else "")
    assert f"| method | {method} |" in card.text
    assert "| trained | 30 steps of 3 windows of 16 tokens of text.txt |" in card.text
    assert "distprune finetune model --data text.txt" in card.text
    assert sorted(path.name for path in Path(job.output).parent.iterdir()) == ["out"]


def test_weights_are_written_as_they_are_stored_or_as_asked(job: FinetuneJob, tmp_path: Path) -> None:
    run_finetune_job(dataclasses.replace(job, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in load_file(Path(job.output) / WEIGHTS).values()} == {torch.bfloat16}
    again = dataclasses.replace(job, model=job.output, output=str(tmp_path / "again"))
    run_finetune_job(again)
    assert {tensor.dtype for tensor in load_file(tmp_path / "again" / WEIGHTS).values()} == {torch.bfloat16}
    assert all(torch.equal(of, zeros(job.model)[name]) for name, of in zeros(again.output).items())


@pytest.mark.parametrize(("distilled", "batch_size"), [(False, 3), (True, 1)])  # one rank has one more, or none
@pytest.mark.sampled(1)
def test_two_ranks_do_what_one_does(
    pool: ProcessPool, tmp_path: Path, model_folder: Path, job: FinetuneJob, distilled: bool, batch_size: int
) -> None:
    asked = dataclasses.replace(job, batch_size=batch_size, teacher=str(model_folder) if distilled else None)
    alone = run_finetune_job(asked).work.losses
    spread = dataclasses.replace(asked, output=str(tmp_path / "spread"))
    for losses in pool.run(2, run_on_rank, spread):
        assert losses == pytest.approx(alone, rel=1e-4)
    assert all(torch.equal(of, zeros(job.model)[name]) for name, of in zeros(spread.output).items())


def test_a_batch_in_bfloat16_on_two_ranks(pool: ProcessPool, job: FinetuneJob) -> None:
    exact = pool.run(2, run_on_rank, job)[0]
    rounded = dataclasses.replace(job, compute_dtype=torch.bfloat16, overwrite=True)
    losses = pool.run(2, run_on_rank, rounded)[0]
    assert losses == pytest.approx(exact, rel=0.05)
    assert losses != exact


def test_long_gradients_are_cut(job: FinetuneJob, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = run_on_rank(0, job)
    monkeypatch.setattr("distprune.jobs.masked_training._LONGEST_GRADIENT", 1e9)
    longer = run_on_rank(0, dataclasses.replace(job, overwrite=True))
    assert cut[:2] == pytest.approx(longer[:2], rel=1e-3)  # the first step of AdamW has no scale
    assert cut != longer


def test_the_time_that_was_spent_counts(job: FinetuneJob, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ends = [0.0], [80.0]

    def tick() -> float:
        clock[0] += 10.0  # once for the start, once a step and once a save
        if clock[0] in ends:
            raise Killed
        return clock[0]

    monkeypatch.setattr("distprune.jobs.finetune.time", SimpleNamespace(perf_counter=tick))
    timed = dataclasses.replace(job, steps=None, minutes=1.0, save_every=20.0)
    with pytest.raises(Killed):  # in the fifth step, with the state after the fourth: 50 seconds
        run_finetune_job(timed)
    clock[0] = ends[0] = 0.0
    heard = Heard()
    training = run_finetune_job(dataclasses.replace(timed, resume=True), watcher=heard).work
    assert "going on after step 4" in heard.said
    assert (training.num_steps, training.seconds) == (5, 60.0)
    assert heard.stages["training seconds"] == [(60, 60)]


def test_saves_that_take_long_leave_time_to_train(job: FinetuneJob, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saved_after, save = [0.0], list[int](), finetune._save

    def tick() -> float:
        clock[0] += 1.0
        return clock[0]

    def save_slowly(*asked: Any) -> None:
        save(*asked)
        saved_after.append(len(asked[-1]))
        clock[0] += 100.0

    monkeypatch.setattr("distprune.jobs.finetune.time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(finetune, "_save", save_slowly)
    run_finetune_job(dataclasses.replace(job, save_every=2.0))
    assert saved_after == [2, 4]


def with_teacher(name: str, change: Callable[[str], str], job: FinetuneJob, tmp_path: Path) -> FinetuneJob:
    """Return the job with a copy of its model as its teacher, of which one file is changed."""
    shutil.copytree(job.model, tmp_path / "teacher")
    path = tmp_path / "teacher" / name
    path.write_text(change(path.read_text()))
    return dataclasses.replace(job, teacher=str(tmp_path / "teacher"))


other_tokens = partial(with_teacher, "tokenizer.json", lambda text: text.replace('"a":', '"A":'))
larger_vocabulary = partial(
    with_teacher, "config.json", lambda text: json.dumps({**json.loads(text), "vocab_size": 80})
)


def dense(folder: Path) -> Path:
    """Return a model without a zero."""
    make_tokenizer(make_model(folder))
    tensors = load_file(folder / WEIGHTS)
    save_file({n: t + (t == 0) for n, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def with_one_zero(folder: Path) -> Path:
    tensors = load_file(dense(folder) / WEIGHTS)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = 0
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_a_vocabulary_that_the_config_leaves_to_its_default(job: FinetuneJob, tmp_path: Path) -> None:
    """As that of an original may, where the smaller model's config says it."""
    for name in ("teacher", "student"):
        LlamaForCausalLM(LlamaConfig(**ARCHITECTURES["llama"])).save_pretrained(tmp_path / name)
        make_tokenizer(tmp_path / name)
    path = tmp_path / "teacher" / "config.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "vocab_size"})
    )
    asked = dataclasses.replace(job, model=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"), steps=1)
    assert len(run_on_rank(0, asked)) == 1


@pytest.mark.parametrize("make", [dense, with_one_zero])
def test_any_model_is_trained(
    pool: ProcessPool, job: FinetuneJob, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    model = make(tmp_path / "given")
    job = dataclasses.replace(job, model=str(model), teacher=str(model), steps=2)
    for losses in pool.run(2, run_on_rank, job):
        assert isinstance(losses, list), losses
    before, after = load_file(model / WEIGHTS), load_file(Path(job.output) / WEIGHTS)
    assert {name: of.shape for name, of in before.items()} == {name: of.shape for name, of in after.items()}
    assert all(torch.equal(of, after[name] == 0) for name, of in zeros(str(model)).items())
    assert any(not torch.equal(of, after[name]) for name, of in before.items())
    card = (Path(job.output) / "README.md").read_text()
    assert ("| method | masked" in card) == ("- sparse" in card) == (make is with_one_zero)


def short_text(job: FinetuneJob, tmp_path: Path) -> FinetuneJob:
    (tmp_path / "short.txt").write_text("a" * 15)
    return dataclasses.replace(job, data=str(tmp_path / "short.txt"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_tokens, "has another tokenizer than"),
        (larger_vocabulary, r"or another vocabulary \(80 tokens, and 67\)"),
        (short_text, "holds 15 tokens, less than one window of 16"),
        ({"data": "nowhere.txt"}, "there is no text file nowhere.txt"),
        ({"teacher": "nowhere"}, "there is no model directory 'nowhere'"),
    ],
)
def test_bad_input_is_one_error_on_every_rank_and_nothing_is_written(
    pool: ProcessPool, tmp_path: Path, job: FinetuneJob, change: Any, message: str
) -> None:
    asked = change(job, tmp_path) if callable(change) else dataclasses.replace(job, **change)
    pool.all_say(2, run_on_rank, asked, match=f"^(ValueError|FileNotFoundError): .*{message}")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_loss_that_is_no_number_keeps_the_last_state(job: FinetuneJob, tmp_path: Path) -> None:
    error = run_on_rank(0, dataclasses.replace(job, learning_rate=1e30, save_every=0.0))
    assert error.startswith("ValueError: step 2: the loss is ")
    assert error.endswith("the state after step 1 is kept")
    assert (tmp_path / ".out.unfinished" / "state-1").exists()
