"""The job, from directory to directory: the same bytes over any ranks, and all or nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typing_extensions import override

from distprune.jobs import FinetuneJob, OneShotJob, PruneJob, ShrinkJob, Watcher, run_prune_job
from distprune.jobs.model_card import CARD_NAME
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.run import write_report
from distprune.patterns.base import Scope
from tests.hf_models import make_model
from tests.jobs import jobs_of_a_kind
from tests.jobs.jobs_of_a_kind import run_in_own_folder
from tests.sampling import pairs_first
from tests.small_job import small_job
from tests.worlds import ProcessPool


def run_on_rank(rank: int, jobs: list[PruneJob]) -> str:
    """Run this rank's job; return the error as text, or nothing."""
    return jobs_of_a_kind.run_on_rank(rank, jobs[rank % len(jobs)])


class Heard(Watcher):
    """Keeps what it is told; raises when it is told of ``fails_at``."""

    def __init__(self, fails_at: str = "") -> None:
        self.said: list[str] = []
        self.stages: dict[str, list[tuple[int, int]]] = {}
        self.num_blocks: list[int] = []
        self._fails_at = fails_at

    @override
    def say(self, text: str) -> None:
        self.said.append(text)
        self._hear("say")

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        self.stages.setdefault(f"{stage} {unit}", []).append((done, total))
        self._hear(stage)

    @override
    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        self.num_blocks.append(num_blocks)
        self._hear(str(report["name"]))

    def _hear(self, what: str) -> None:
        if what == self._fails_at:
            raise KeyError(f"the watcher broke at {what}")


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file's bytes, but for the report, which holds times, its picture, and the folder's name."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.stem != Path(REPORT_NAME).stem}
    for named in (f'path = "{folder.name}"', f"--output {folder.name}"):
        found |= {name: of.replace(named.encode(), b"") for name, of in found.items() if name == CARD_NAME}
    return found


@pytest.fixture
def job(model_folder: Path, tmp_path: Path) -> PruneJob:
    return PruneJob(model=str(model_folder), output=str(tmp_path / "out"), sparsity=0.3, seed=5)


@pytest.mark.parametrize(
    ("world_size", "dtype", "scope", "method"),
    pairs_first([2, 3, 4], [torch.float32, torch.bfloat16], ["global", "tensor"], ["magnitude", "random"]),
)
@pytest.mark.sampled(3)
def test_same_bytes_over_any_number_of_ranks(
    pool: ProcessPool,
    tmp_path: Path,
    job: PruneJob,
    method: Literal["magnitude", "random"],
    scope: Scope,
    dtype: torch.dtype,
    world_size: int,
) -> None:
    asked = dataclasses.replace(job, method=method, scope=scope, dtype=dtype)
    run_prune_job(asked)
    spread = dataclasses.replace(asked, output=str(tmp_path / "spread"))
    assert pool.run(world_size, run_on_rank, [spread]) == [""] * world_size
    alone, over_ranks = contents(tmp_path / "out"), contents(tmp_path / "spread")
    assert "model.safetensors" in alone
    assert alone == over_ranks
    assert alone["model.safetensors"] != (Path(job.model) / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"sparsity": 0.4}, "--sparsity: 0.3 on rank 0; 0.4 on rank 1"),
        ({"evaluation_length": 8}, "--eval-length"),
        ({"model": "elsewhere"}, "--model"),
    ],
)
def test_ranks_with_different_arguments(
    pool: ProcessPool, tmp_path: Path, job: PruneJob, change: dict[str, object], shown: str
) -> None:
    other = dataclasses.replace(job, **change)  # type: ignore[arg-type]
    match = f"^ValueError: ranks were called with different arguments.*{shown}"
    pool.all_say(2, run_on_rank, [job, other], match=match)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_see_different_files(pool: ProcessPool, tmp_path: Path, model_folder: Path, text_file: Path) -> None:
    """The same names on every rank, and another file behind one of them: storage that is not shared."""
    for rank in ("0", "1"):
        shutil.copytree(model_folder, tmp_path / rank / "model")
        shutil.copyfile(text_file, tmp_path / rank / "text.txt")
    output = str(tmp_path / "out")
    job = PruneJob(model="model", output=output, sparsity=0.3, evaluate_on=("text.txt",), evaluation_length=16)
    calibrated = small_job(Path("model"), Path("text.txt"), tmp_path)
    asked: list[tuple[Any, str, str]] = [(job, "model/config.json", "model files")]
    asked += [(job, "text.txt", "evaluation tokens of text.txt"), (calibrated, "text.txt", "calibration tokens")]
    for job, name, what in asked:
        before = (tmp_path / "1" / name).read_text()
        (tmp_path / "1" / name).write_text(before.replace("e", "a") if name == "text.txt" else f" {before}")
        match = f"^ValueError: ranks were called with different arguments: {what}: "
        pool.all_say(2, run_in_own_folder, tmp_path, job, match=match)
        (tmp_path / "1" / name).unlink()
        pool.all_say(2, run_in_own_folder, tmp_path, job, match="^FileNotFoundError: ")
        (tmp_path / "1" / name).write_text(before)
    assert not Path(output).exists()


def test_the_watcher_hears_all_stages(job: PruneJob, text_file: Path) -> None:
    heard = Heard()
    run_prune_job(dataclasses.replace(job, evaluate_on=(str(text_file),), evaluation_length=16), watcher=heard)
    assert list(heard.stages) == [
        "loading bytes",
        "evaluating before on text.txt windows",
        "evaluating after on text.txt windows",
        "saving bytes",
    ]
    for told in heard.stages.values():
        assert told[-1][0] == told[-1][1]
        assert told == sorted(told)


# By field: what is given, and what it becomes.
TAKEN: dict[str, tuple[Any, Any]] = {
    "model": (Path("m"), "m"),
    "output": ("~/o", os.path.expanduser("~/o")),
    "sparsity": (np.float32(0.5), 0.5),
    "dtype": ("float16", torch.float16),
    "evaluate_on": (Path("~/t"), (os.path.expanduser("~/t"),)),
    "tasks": ("a,b", ("a", "b")),
    "calibration": (Path("c"), "c"),
    "samples": ("all", None),
    "own_words": (Path("w"), "w"),
    "expert_memory": ("1G", 1 << 30),
}


def test_fields_take_paths_and_the_words_of_the_command_line() -> None:
    job, wanted = (OneShotJob(**{field: both[i] for field, both in TAKEN.items()}) for i in range(2))
    assert dataclasses.replace(job) == job == wanted
    json.dumps(job.arguments())


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("samples", "many", ValueError, r"--samples takes N\|all, not 'many'"),
        ("samples", 2.5, TypeError, r"samples \(--samples\) must be int \| None, not 2.5"),
        ("epochs", True, TypeError, r"epochs \(--epochs\) must be int \| None, not True"),
        ("evaluate_on", (1,), TypeError, r"--eval takes texts, not \(1,\)"),
        ("evaluate_on", 3, TypeError, r"evaluate_on \(--eval\) must be tuple\[str, \.\.\.\], not 3"),
        ("model", None, TypeError, r"model \(--model\) must be str, not None"),
        ("dtype", "int8", ValueError, r"dtype \(--dtype\) takes None, torch.float32, .* not 'int8'"),
    ],
)
def test_what_fields_do_not_take(field: str, value: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"model": "m", "output": "o", "sparsity": 0.5, field: value}
    with pytest.raises(error, match=message):
        OneShotJob(**given).check_asked()


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("prune", {"evaluation_length": 2100}, r"2048 positions; lower evaluation_length \(--eval-length\)"),
        ("one-shot", {"calibration": "lost", "own_words": 0}, "no calibration file lost"),
        ("one-shot", {"sequence_length": 2100}, r"2048 positions; lower sequence_length \(--sequence-length\)"),
        ("shrink", {"calibration": "lost", "own_words": 0}, "no calibration file lost"),
        ("finetune", {"sequence_length": 2100}, r"2048 positions; lower sequence_length \(--sequence-length\)"),
    ],
)
def test_texts_are_checked_before_anything_is_loaded(
    model_folder: Path, text_file: Path, tmp_path: Path, kind: str, asked: dict[str, Any], message: str
) -> None:
    job, heard = jobs_of_a_kind.job_of(kind, model_folder, text_file, tmp_path), Heard()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        jobs_of_a_kind.run(dataclasses.replace(job, evaluate_on=(str(text_file),), **asked), heard)
    assert not heard.stages


@pytest.mark.parametrize("kind", ["prune", "one-shot", "sample"])
def test_a_model_in_several_dtypes(
    model_folder: Path, text_file: Path, tmp_path: Path, pool: ProcessPool, kind: str
) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    for path in model.glob("*.safetensors"):
        tensors = {name: t.double() if "norm" in name else t for name, t in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    job = jobs_of_a_kind.job_of(kind, model, text_file, tmp_path)
    job = dataclasses.replace(job, evaluate_on=(str(text_file),)) if kind == "prune" else job
    match = r"holds 'model.*' as torch.*, and does not run in several dtypes: name one of them"
    for num_ranks in (1, 2) if kind == "prune" else (1,):
        pool.all_say(num_ranks, jobs_of_a_kind.run_on_rank, job, match=match)
    assert pool.run(1, jobs_of_a_kind.run_on_rank, dataclasses.replace(job, dtype=torch.float32)) == [""]


def test_what_transformers_does_not_load_is_said(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "gpt2") / "model.safetensors"
    save_file({**load_file(path), "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}, path, {"format": "pt"})
    heard = Heard()
    run_prune_job(PruneJob(model=path.parent, output=tmp_path / "out", sparsity=0.5), watcher=heard)  # type: ignore[arg-type]
    assert "not in the output, since transformers does not load it: 'transformer.h.0.attn.bias'" in heard.said


def test_a_watcher_that_fails_at_the_last_word(job: PruneJob, model_folder: Path, tmp_path: Path) -> None:
    """The only word of this job is that the model's own card is damaged."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    (model / CARD_NAME).write_text("---\n[\n---\n")
    with pytest.raises(RuntimeError, match="the watcher broke at say"):
        run_prune_job(dataclasses.replace(job, model=str(model)), watcher=Heard("say"))
    assert not Path(job.output).exists()


@pytest.mark.parametrize(
    ("kind", "asked", "field"),
    [
        (PruneJob, {"sparsity": 0.5}, "evaluate_on"),
        (OneShotJob, {"sparsity": 0.5}, "calibration"),
        (ShrinkJob, {"mlp": 0.5}, "own_words"),
        (FinetuneJob, {"steps": 1}, "data"),
        (FinetuneJob, {"steps": 1}, "teacher"),
    ],
)
def test_what_is_read_is_not_replaced(job: PruneJob, kind: Any, asked: dict[str, Any], field: str) -> None:
    run_prune_job(job)
    text = shutil.copyfile(f"{job.model}/config.json", f"{job.output}/vocab.txt")  # a name that a model's files have
    read = {field: (text,) if field == "evaluate_on" else text}
    with pytest.raises(ValueError, match="lie inside each other"):
        kind(model=job.model, output=job.output, overwrite=True, **asked, **read).check()


def test_reports_are_strict_json(tmp_path: Path) -> None:
    write_report({"a": [1, float("inf")], "b": {"c": float("nan"), "d": None}, "e": (0.5, "x")}, tmp_path)
    written = json.loads((tmp_path / REPORT_NAME).read_text(), parse_constant=lambda name: pytest.fail(name))
    assert written == {"a": [1, "inf"], "b": {"c": "nan", "d": None}, "e": [0.5, "x"]}
