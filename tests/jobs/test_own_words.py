"""Jobs calibrate with what the model writes, beside a text or without one, and keep it until they are done."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distprune import own_words
from distprune.calibration.data import WindowBatches, calibration_windows
from distprune.checkpoint.hf_load import load_model, load_tokenizer
from distprune.jobs import (
    OneShotJob,
    PlanJob,
    PruneJob,
    SampleJob,
    ShrinkJob,
    own_words as words_of_jobs,
    run_finetune_job,
    run_one_shot_job,
    run_plan_job,
    run_prune_job,
    run_sample_job,
    run_shrink_job,
)
from distprune.jobs.own_words import WindowCounts, about_tokenizer, counts_of, mixed, read_words, words_content
from tests.jobs.jobs_of_a_kind import files, left, run_on_rank
from tests.small_job import small_finetune_job
from tests.worlds import ProcessPool


@pytest.fixture
def job(job: OneShotJob) -> OneShotJob:
    """A job without a text."""
    return dataclasses.replace(job, method="wanda", calibration="self", own_words=None, samples=3, sequence_length=12)


@pytest.mark.parametrize(
    ("method", "num_own"), [("admm", 96), ("sparsegpt", 0), ("wanda", 0), ("magnitude", 0), ("random", 0)]
)
def test_how_many_windows_of_each_kind(job: OneShotJob, method: Any, num_own: int) -> None:
    wanted: Any = dataclasses.replace(job, method=method, calibration="text.txt").own_words_or_default()
    of_text = partial(counts_of, "text.txt", num_text=4, num_in_file=None)
    assert of_text(4, wanted) == WindowCounts(4, num_own // 2, num_own // 2)
    assert of_text(4, 9) == WindowCounts(4, 3, 6)
    assert counts_of("text.txt", 4, None, num_text=4, num_in_file=7) == WindowCounts(4, own=7)
    assert counts_of("self", 3, wanted, num_text=0, num_in_file=None) == WindowCounts(own=3)
    assert counts_of("self", 3, None, num_text=0, num_in_file=7) == WindowCounts(own=7)
    with pytest.raises(ValueError, match="say how many"):
        run_one_shot_job(dataclasses.replace(job, method=method, samples=None))


@pytest.mark.parametrize(("num_text", "num_continuing"), [(1, 48), (16, 48), (64, 27), (126, 1), (128, 0), (1000, 0)])
def test_the_more_text_there_is_the_less_is_continued(num_text: int, num_continuing: int) -> None:
    counts = counts_of("text.txt", num_text, None, num_text=num_text, num_in_file=None)
    assert counts == WindowCounts(num_text, num_continuing, 96 - num_continuing)


def test_kinds_are_evenly_mixed() -> None:
    kinds = [torch.full((num, 2), num) for num in (4, 12, 8)]
    order = mixed(kinds)[:, 0].tolist()
    assert all(sorted(order[start : start + 6]) == [4, 8, 8, 12, 12, 12] for start in range(0, 24, 6))
    assert torch.equal(mixed(kinds[:1]), kinds[0])


def test_documents_begin_with_lines_of_a_file(job: OneShotJob, tmp_path: Path) -> None:
    tokenizer, lines = load_tokenizer(Path(job.model)), tmp_path / "lines"
    asked = SampleJob(model=job.model, output=str(tmp_path / "words"), samples=8, sequence_length=64)
    with pytest.raises(FileNotFoundError, match="no file of beginnings"):
        run_sample_job(dataclasses.replace(asked, beginnings=str(lines)))
    lines.write_text("\n \n")
    with pytest.raises(ValueError, match=r"lines \(--beginnings\) holds no line"):
        run_sample_job(dataclasses.replace(asked, beginnings=str(lines)))
    lines.write_text("the model\n\ns\n", encoding="utf-8-sig")
    run_sample_job(dataclasses.replace(asked, beginnings=str(lines)))
    windows, about = read_words(tmp_path / "words")
    begun = windows[1::2].reshape(8, 32)  # without a chat template
    starts = [tokenizer(line)["input_ids"] for line in ("the model", "s")]
    assert sum(text[:9].tolist() == starts[0] for text in begun) == 4
    assert sum(text[:1].tolist() == starts[1] for text in begun) == 4
    assert about["beginnings"] == "2"


def calibrated_with(patch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the kinds of windows that a job mixes."""
    found: list[torch.Tensor] = []

    def spy(kinds: list[torch.Tensor]) -> torch.Tensor:
        found.extend(kinds)
        return mixed(kinds)

    with patch.context() as context:
        context.setattr(words_of_jobs, "mixed", spy)
        run()
    return found


def test_a_text_is_continued_and_left(
    job: OneShotJob, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copyfile(text_file, tmp_path / "speeches.txt")
    job = dataclasses.replace(job, calibration=str(path), own_words=9, evaluate_on=(str(path),))
    text, continuing, own = calibrated_with(monkeypatch, lambda: run_one_shot_job(job))
    model, tokenizer = load_model(Path(job.model)), load_tokenizer(Path(job.model))
    pieces = calibration_windows(path, tokenizer, 4, 3)
    assert torch.equal(text, calibration_windows(path, tokenizer, 3, 12))
    written = own_words(model, 9, 12, prompts=pieces, tokenizer=tokenizer)
    assert torch.equal(continuing, written[:4])
    assert torch.equal(own, written[4:])
    report = json.loads((Path(job.output) / "report.json").read_text())
    assert report["pruning"]["windows"] == {"text": 3, "continuing": 4, "own": 5}
    assert report["pruning"]["num_samples"] == 12
    assert report["stage_seconds"]["write words"] > 0
    said = "3 windows of 12 tokens of speeches.txt, and 9 that the model wrote, 4 of them continuing it"
    assert f"| calibration | {said} |" in (Path(job.output) / "README.md").read_text()
    assert not list(Path(job.output).glob("*.tokens"))


@pytest.mark.usefixtures("draws_nothing")
def test_killed_and_resumed_it_has_the_same_words(
    make: Callable[[str], Any], expected: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make("one-shot")
    again, output, kept = dataclasses.replace(job, resume=True), Path(job.output), left(job) / "own_words.tokens"
    assert run_on_rank(0, job, 1) == "killed"
    shutil.copytree(left(job), tmp_path / "left")
    with monkeypatch.context() as patch:
        patch.setattr(words_of_jobs, "own_words", lambda *_, **__: pytest.fail("written again"))
        run_one_shot_job(again)
    assert files(output) == expected(job)
    assert "3 windows of 16 tokens that the model wrote; no text" in (output / "README.md").read_text()
    shutil.rmtree(output)
    (tmp_path / "left").rename(left(job))
    kept.write_bytes(kept.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"own_words.tokens is corrupt or truncated"):
        run_one_shot_job(again)


def test_a_file_of_own_words(
    pool: ProcessPool, job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SampleJob(model=job.model, output=str(tmp_path / "words"), samples=3, sequence_length=14)
    assert pool.run(2, run_on_rank, sampling) == ["", ""]
    words, about = read_words(tmp_path / "words")
    tokenizer = load_tokenizer(Path(job.model))
    assert words.shape == (3, 14)
    assert about.items() >= {"model": "model", "seed": "0", "temperature": "1.0", "top_k": "1000"}.items()
    assert {"distprune", "torch", "transformers"} <= about.keys()
    with pytest.raises(FileExistsError, match="is there"):
        run_sample_job(sampling)
    one = run_sample_job(dataclasses.replace(sampling, overwrite=True, samples=1))
    assert (one.num_samples, one.sequence_length) == (1, 14)
    words, _ = read_words(tmp_path / "words")
    assert torch.equal(words, own_words(load_model(Path(job.model)), 1, 14, tokenizer=tokenizer))
    job = dataclasses.replace(job, own_words=str(tmp_path / "words"))
    (used,) = calibrated_with(monkeypatch, lambda: run_one_shot_job(job))
    assert torch.equal(used, words[:, :12])
    planned = PlanJob(**{**vars(job), "output": str(tmp_path / "none")})
    assert run_plan_job(planned).num_windows == 1
    assert run_plan_job(dataclasses.replace(planned, own_words=None, samples=9)).num_windows == 9
    job = dataclasses.replace(job, overwrite=True)
    with pytest.raises(ValueError, match="holds windows of 14 tokens, and 15 are wanted"):
        run_one_shot_job(dataclasses.replace(job, sequence_length=15))
    (tmp_path / "words").write_bytes(words_content(torch.full((1, 14), 67), about_tokenizer(tokenizer)))
    with pytest.raises(ValueError, match="token id 67 is outside the model's vocabulary of 67"):
        run_one_shot_job(job)
    (tmp_path / "words").write_bytes(words_content(words, {"model": "other", "tokenizer": "of another"}))
    with pytest.raises(ValueError, match=r"was written with another tokenizer than the model's, by other"):
        run_one_shot_job(job)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "corrupt or truncated"),
        (lambda path: path.write_bytes(b"text"), "corrupt or truncated"),
        (lambda path: save_file({"token_ids": torch.ones(2, 3)}, path), "no windows of `distprune sample`"),
        (lambda path: save_file({"other": torch.ones(2, 3)}, path), "no windows of `distprune sample`"),
        (lambda path: path.write_bytes(words_content(torch.ones(0, 3), {})), r"int32 \(0, 3\), not token ids"),
        (lambda path: path.unlink(), "no file of own words"),
    ],
)
def test_what_is_no_file_of_own_words(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "words"
    path.write_bytes(words_content(torch.ones(2, 3), {}))
    assert torch.equal(read_words(path)[0], torch.ones(2, 3, dtype=torch.int64))
    damage(path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_words(path)


def test_a_smaller_model(job: OneShotJob) -> None:
    smaller = ShrinkJob(model=job.model, output=job.output, samples=2, sequence_length=8, parameters=0.9)
    assert run_shrink_job(smaller).work.windows == {"text": 0, "continuing": 0, "own": 2}


def test_recovered_with_what_the_teacher_writes(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_prune_job(PruneJob(model=job.model, output=str(tmp_path / "pruned"), sparsity=0.5))
    tuning = small_finetune_job(tmp_path / "pruned", Path("self"), tmp_path, steps=2)
    tuning = dataclasses.replace(tuning, teacher=job.model, own_words=3, sequence_length=8)
    (written,) = calibrated_with(monkeypatch, lambda: run_finetune_job(tuning))
    tokenizer = load_tokenizer(Path(job.model))
    assert torch.equal(written, own_words(load_model(Path(job.model)), 3, 8, tokenizer=tokenizer))
    assert "of 8 tokens of what the teacher wrote; no text |" in (tmp_path / "tuned" / "README.md").read_text()
    (tmp_path / "words").write_bytes(words_content(written, about_tokenizer(tokenizer)))
    again = dataclasses.replace(tuning, teacher=None, own_words=str(tmp_path / "words"), overwrite=True)
    (used,) = calibrated_with(monkeypatch, lambda: run_finetune_job(again))
    assert torch.equal(used, written)
    assert "of 8 tokens of own words, words; no text |" in (tmp_path / "tuned" / "README.md").read_text()


def test_each_window_once_before_any_comes_again() -> None:
    windows = torch.arange(5)[:, None].expand(5, 3)
    batches = WindowBatches(windows, batch_size=4, seed=7)
    drawn = torch.cat([batches[step] for step in range(5)])[:, 0].tolist()
    turns = [drawn[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(turn) == list(range(5)) for turn in turns)
    assert turns[0] != turns[1]
    assert torch.equal(batches[3], WindowBatches(windows, batch_size=4, seed=7)[3])
