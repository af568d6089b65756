"""What goes wrong outside of a job: no mishap costs what is done, nor what is the user's. A row for each job."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typing_extensions import override

from distprune.checkpoint import hf_directory
from distprune.checkpoint.output_lock import locking
from distprune.checkpoint.outputs import publish
from distprune.collectives.communicator import Alone
from distprune.jobs import (
    FinetuneJob,
    OneShotJob,
    PruneJob,
    SampleJob,
    ShrinkJob,
    StreamedJob,
    Watcher,
    run_finetune_job,
    run_one_shot_job,
    run_prune_job,
    run_sample_job,
    run_shrink_job,
    run_streamed_job,
    stretches,
    unfinished,
)
from tests.jobs.test_one_shot import Killed
from tests.jobs.test_prune import Heard
from tests.sampling import only_whole
from tests.small_job import small_finetune_job, small_job, small_shrink_job

RUN: dict[type, Callable[..., Any]] = {
    PruneJob: run_prune_job,
    OneShotJob: run_one_shot_job,
    ShrinkJob: run_shrink_job,
    FinetuneJob: run_finetune_job,
    StreamedJob: run_streamed_job,
    SampleJob: run_sample_job,
}
RESUMABLE = ("one-shot", "shrink", "finetune", "streamed")
# What may be another when a job goes on: it changes no bit of what is written.
FREE: dict[str, dict[str, Any]] = {
    "one-shot": {"offload": True},
    "shrink": {"offload": True, "speed": False},
    "finetune": {"save_every": 9.0},
    "streamed": {"sync_files": False},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny files into stretches, and draw nothing, which takes longer than all else."""
    monkeypatch.setattr(stretches, "_STRETCH_BYTES", 6000)
    monkeypatch.setattr("distprune.jobs.run.can_draw", lambda _: False)


@pytest.fixture(scope="session")
def pruned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("to tune") / "model"
    run_prune_job(PruneJob(model=str(model_folder), output=str(folder), sparsity=0.5))
    return folder


@pytest.fixture
def make(model_folder: Path, pruned: Path, text_file: Path, tmp_path: Path) -> Callable[[str], Any]:
    """Makes the job of a kind, over a copy of its model, which a test may spoil."""

    def make(kind: str) -> Any:
        model = tmp_path / "model"
        shutil.copytree(pruned if kind == "finetune" else model_folder, model)
        job: Any
        if kind == "one-shot":
            job = small_job(model, text_file, tmp_path)
            job = dataclasses.replace(job, method="wanda", calibration="self", own_words=None)
        elif kind == "shrink":
            job = dataclasses.replace(small_shrink_job(model, text_file, tmp_path, mlp=0.75), speed=True)
        elif kind == "finetune":
            job = dataclasses.replace(small_finetune_job(model, text_file, tmp_path, steps=5), save_every=0.0)
        elif kind == "sample":
            (tmp_path / "outputs").mkdir()
            job = SampleJob(model=str(model), output="", samples=2, sequence_length=8)
        else:
            job = {"prune": PruneJob, "streamed": StreamedJob}[kind](model=str(model), output="", pattern="2:4")
        return dataclasses.replace(job, output=str(tmp_path / "outputs" / "out"))

    return make


class Dies(Heard):
    """Is killed when a block is done, or some steps or stretches are."""

    @override
    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        raise Killed

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        if stage in ("training", "pruning") and 2 * done > total:
            raise Killed


def run(job: Any, watcher: Watcher | None = None) -> Any:
    return RUN[type(job)](job, watcher=watcher)


def kill(job: Any) -> list[str]:
    """Run the job until it dies; return what it said."""
    dies = Dies()
    with pytest.raises(Killed):
        run(job, dies)
    assert (left(job) / "journal.jsonl").stat().st_size
    return dies.said


def goes_on(job: Any) -> str:
    return f"what is done is kept in {left(job)}; resume=True (--resume) goes on with it"


def left(job: Any) -> Path:
    return Path(job.output).with_name(".out.unfinished")


def files(folder: Path) -> dict[str, bytes]:
    """Return every file in it and below, but for reports, which hold times."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def whole(job: Any) -> dict[str, bytes]:
    """Return what the job writes if nothing happens to it."""
    other = Path(job.output).parents[1] / "whole" / Path(job.output).name
    run(dataclasses.replace(job, output=str(other)))
    return files(other)


@pytest.fixture(scope="module")
def expected() -> Callable[[Any], dict[str, bytes]]:
    """Returns what a job writes over a model that nobody has spoilt, which is run once."""
    known: dict[type, dict[str, bytes]] = {}

    def of_job(job: Any) -> dict[str, bytes]:
        if type(job) not in known:
            known[type(job)] = whole(dataclasses.replace(job, speed=False) if isinstance(job, ShrinkJob) else job)
        return known[type(job)]

    return of_job


@pytest.mark.parametrize("kind", ["prune", *RESUMABLE])
def test_sub_folders_come_along(make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(kind)
    model, output = Path(job.model), Path(job.output)
    carried = {"additional_chat_templates/rag.jinja", "1_Pooling/config.json", "notes/2026/why.txt"}
    monkeypatch.setattr(hf_directory, "_MAX_SMALL_FILE", 2_000)
    for name in (*carried, "original/params.json", "original/weights.pth", ".cache/state.json", "data/a", "data/b"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("a" * 1_500 if name.startswith("data") else f"of {name}")
    if kind != "prune":
        kill(job)
        job = dataclasses.replace(job, resume=True, **({"speed": False} if kind == "shrink" else {}))
    run(job)
    written = files(output)
    assert {name for name in written if "/" in name} == carried
    assert all(written[name] == f"of {name}".encode() for name in carried)
    run(dataclasses.replace(job, overwrite=True))  # they are known to be copies
    assert files(output) == written
    (output / "1_Pooling" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"1_Pooling/mine\.txt"):
        run(dataclasses.replace(job, overwrite=True))
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", RESUMABLE)
def test_what_does_not_change_the_result_may_change(
    make: Callable[[str], Any], kind: str, expected: Callable[[Any], Any]
) -> None:
    job = make(kind)
    kill(job)
    run(dataclasses.replace(job, resume=True, overwrite=True, **FREE[kind]))
    assert files(Path(job.output)) == expected(job)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_interrupted_it_says_how_to_go_on(make: Callable[[str], Any], kind: str) -> None:
    job = make(kind)
    assert kill(job)[-1] == goes_on(job)


@pytest.mark.parametrize("kind", ["prune", *RESUMABLE])
def test_an_output_that_another_job_has_filled_is_seen_before_the_work(
    make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(kind)
    output = Path(job.output)

    def filled(*_: object) -> str:
        if not output.exists():
            shutil.copytree(job.model, output)
        return ""

    monkeypatch.setattr("distprune.jobs.run.sample_together", filled)
    monkeypatch.setattr("distprune.jobs.run.load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("distprune.jobs.streamed.StreamedPruning", lambda *_, **__: pytest.fail("chosen"))
    with pytest.raises(FileExistsError, match="is not empty; name another or pass overwrite=True"):
        run(job)
    assert files(output) == files(Path(job.model))
    assert [path.name for path in output.parent.iterdir()] == ["out"]


class Fills(Heard):
    """Has somebody fill the output with a model while the job works."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job = job

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        if stage in ("loading", "pruning") and not Path(self.job.output).exists():
            shutil.copytree(self.job.model, self.job.output)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_an_output_that_is_filled_while_a_job_works_costs_nothing(
    make: Callable[[str], Any], kind: str, expected: Callable[[Any], Any]
) -> None:
    job = dataclasses.replace(make(kind), **({"speed": False} if kind == "shrink" else {}))
    with pytest.raises(FileExistsError, match="filled by someone else meanwhile"):
        run(job, Fills(job))
    assert files(Path(job.output)) == files(Path(job.model))
    for again, message in (({}, "pass overwrite=True"), ({"overwrite": True}, "pass resume=True")):
        with pytest.raises(FileExistsError, match=message):
            run(dataclasses.replace(job, **again))
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        run(dataclasses.replace(job, resume=True))
    run(dataclasses.replace(job, resume=True, overwrite=True))
    assert files(Path(job.output)) == expected(job)
    assert [path.name for path in Path(job.output).parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", RESUMABLE)
def test_killed_when_its_output_is_there_nothing_is_in_the_way(
    make: Callable[[str], Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dataclasses.replace(make(kind), **({"speed": False} if kind == "shrink" else {}))
    output = Path(job.output)

    def die(*arguments: Any, **more: Any) -> None:
        publish(*arguments, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "publish", die)
        with pytest.raises(Killed):
            run(job)
    assert (output / "journal.jsonl").exists()
    before = files(output.parent)
    again = PruneJob(model=job.model, output=job.output, sparsity=0.75, overwrite=True)
    for other in (job, again):
        with locking(Alone(), output), pytest.raises(OSError, match="is being written by process"):
            run(other)  # nothing is removed while another job is at work
    assert files(output.parent) == before
    onward = PruneJob(model=str(output), output=str(tmp_path / "onward"), sparsity=0.75)
    run(onward)
    assert not {"journal.jsonl", "own_words.tokens"} & files(tmp_path / "onward").keys()
    run(again)
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert not {"journal.jsonl", "own_words.tokens"} & files(output).keys()


@pytest.mark.parametrize(
    ("kind", "goes_on_then"),
    [*((kind, True) for kind in RESUMABLE), ("one-shot", False), *(only_whole(kind, False) for kind in RESUMABLE[1:])],
)
def test_an_error_that_the_input_is_not_at_fault_for_keeps_what_is_done(
    make: Callable[[str], Any], kind: str, goes_on_then: bool, expected: Callable[[Any], Any]
) -> None:
    job = make(kind)
    if goes_on_then:
        kill(job)
    again = dataclasses.replace(job, resume=True, **({"speed": False} if kind == "shrink" else {}))

    def lacks_memory(*_: object, **__: object) -> None:
        raise ValueError("that takes 80 GiB of 2 GiB that are free")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distprune.jobs.run.Run.report", lacks_memory)
        heard = Heard()
        with pytest.raises(ValueError, match="80 GiB"):
            run(again if goes_on_then else job, heard)
    assert heard.said[-1] == goes_on(job)
    assert (left(job) / "journal.jsonl").exists()
    heard = Heard()
    run(again, heard)
    assert any("going on " in said and "after 0 of" not in said for said in heard.said)
    assert files(Path(job.output)) == expected(job)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_model_that_was_fetched_anew_is_the_same(
    make: Callable[[str], Any], kind: str, expected: Callable[[Any], Any]
) -> None:
    job = dataclasses.replace(make(kind), **({"speed": False} if kind == "shrink" else {}))
    kill(job)
    model = Path(job.model)
    for path in model.iterdir():
        content = path.read_bytes()
        path.unlink()
        model.with_name("other").write_bytes(b"")  # takes the inode
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    run(dataclasses.replace(job, resume=True))
    assert files(Path(job.output)) == expected(job)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_model_that_is_another_one(make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bytes that are looked at do not show it."""
    monkeypatch.setattr("distprune.checkpoint.shared_reading._SAMPLE_BYTES", 0)
    job = dataclasses.replace(make(kind), **({"speed": False} if kind == "shrink" else {}))
    kill(job)
    path = Path(job.model) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0] *= -2
    save_file(tensors, path, metadata={"format": "pt"})
    again = dataclasses.replace(job, resume=True)
    if kind != "streamed":
        before = files(left(job))
        with pytest.raises(ValueError, match=r"the job was another: .*weights as read: "):
            run(again)
        assert files(left(job)) == before
        return
    heard = Heard()
    run(again, heard)  # all is written anew
    assert "the weight files were changed or fetched anew: they are pruned from the beginning" in heard.said
    assert files(Path(job.output)) == whole(job)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_another_version_does_not_go_on(make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(kind)
    kill(job)
    before = files(left(job))
    monkeypatch.setitem(unfinished.VERSIONS, "distprune", "9.9.9")
    with pytest.raises(ValueError, match=r"the job was another: distprune: '.*' then, '9\.9\.9' now"):
        run(dataclasses.replace(job, resume=True))
    assert files(left(job)) == before


class Replaces(Watcher):
    """Has somebody write another model over the one that is read, when half of it is."""

    def __init__(self, weights: Path) -> None:
        self.weights, self.is_done = weights, False

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        if stage in ("loading", "pruning") and 2 * done > total and not self.is_done:
            other = self.weights.with_name("other")
            save_file({name: -of for name, of in load_file(self.weights).items()}, other, metadata={"format": "pt"})
            other.replace(self.weights)
            self.is_done = True


@pytest.mark.parametrize("kind", ["prune", "sample", *RESUMABLE])
def test_a_model_that_is_replaced_while_it_is_read(make: Callable[[str], Any], kind: str) -> None:
    job = make(kind)
    weights = Path(job.model) / "model.safetensors"
    with pytest.raises(OSError, match=r"model\.safetensors was changed or replaced while it was read"):
        run(job, Replaces(weights))
    assert not Path(job.output).exists()
    assert left(job).exists() == (kind == "streamed")  # what was written before is right


@pytest.mark.parametrize("kind", ["one-shot", "shrink", "finetune"])
def test_own_words_of_another_tokenizer(make: Callable[[str], Any], kind: str, tmp_path: Path) -> None:
    job = make(kind)
    other = Path(shutil.copytree(job.model, tmp_path / "other"))
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"a":', '"A":'))
    for model in (other, Path(job.model)):
        sampling = SampleJob(model=str(model), output=str(tmp_path / f"words of {model.name}"), samples=2)
        run_sample_job(dataclasses.replace(sampling, sequence_length=16))
    texts = {"data": "self"} if kind == "finetune" else {"calibration": "self", "samples": None}
    job = dataclasses.replace(job, **texts, **({"own_words": None, "speed": False} if kind == "shrink" else {}))
    with pytest.raises(ValueError, match=r"was written with another tokenizer than the model's, by other"):
        run(dataclasses.replace(job, own_words_file=str(tmp_path / "words of other")))
    assert not Path(job.output).exists()
    run(dataclasses.replace(job, own_words_file=str(tmp_path / "words of model")))
