"""What else is at the output of a job, or comes to it, or to the model: what a killed job has done is never lost."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typing_extensions import override

from distprune.checkpoint import hf_directory
from distprune.checkpoint.output_lock import locking
from distprune.checkpoint.outputs import publish
from distprune.collectives.communicator import Alone
from distprune.jobs import PruneJob, Watcher, run as job_run
from tests.jobs.jobs_of_a_kind import KINDS, RESUMABLE, Killed, files, left, run, run_on_rank
from tests.jobs.test_prune import Heard
from tests.sampling import only_whole

pytestmark = pytest.mark.usefixtures("draws_nothing")


def kill(job: Any, watcher: Watcher | None = None) -> None:
    """Run the job until an item is recorded, and it dies."""
    assert run_on_rank(0, job, 1, watcher) == "killed"


def goes_on(job: Any) -> str:
    return f"what is done is kept in {left(job)}; resume=True (--resume) goes on with it"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
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
        job = dataclasses.replace(job, resume=True)
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


@pytest.mark.parametrize("kind", KINDS)
def test_how_paths_are_spelled_is_no_matter_to_a_killed_job(
    make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(kind)
    monkeypatch.chdir(Path(job.model).parent)
    other = dataclasses.replace(job, output=f"{os.path.relpath(job.output)}/", model=os.path.relpath(job.model))
    assert other.flags() != job.flags()
    assert other.flags(deciding=True) == job.flags(deciding=True)
    assert dataclasses.replace(job, output="others").flags(deciding=True) != job.flags(deciding=True)
    for output in (".", "/", ""):
        with pytest.raises(ValueError, match=r"the output .*(write elsewhere|has no name)"):
            dataclasses.replace(job, output=output, resume=True).check(Path(job.model))


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_another_job_has_filled_is_seen_before_the_work(
    make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(kind)
    output = Path(job.output)

    def filled(*_: object) -> None:
        shutil.copytree(job.model, output)

    monkeypatch.setattr("distprune.jobs.run.mesh_of", filled)
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
    job = make(kind)
    with pytest.raises(FileExistsError, match="filled by someone else meanwhile"):
        run(job, Fills(job))
    assert files(Path(job.output)) == files(Path(job.model))
    for again, message in (({}, "pass overwrite=True"), ({"overwrite": True}, r"resume=True \(--resume\)")):
        with pytest.raises(FileExistsError, match=message):
            run(dataclasses.replace(job, **again))
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        run(dataclasses.replace(job, resume=True))
    run(dataclasses.replace(job, resume=True, overwrite=True))
    assert files(Path(job.output)) == expected(job)
    assert [path.name for path in Path(job.output).parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", RESUMABLE)
@pytest.mark.sampled(2)
def test_killed_when_its_output_is_there_nothing_is_in_the_way(
    make: Callable[[str], Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(kind)
    output = Path(job.output)

    def die(*arguments: Any, **more: Any) -> None:
        publish(*arguments, **more)
        shutil.copytree(left(job), tmp_path / "left")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(job_run, "publish", die)
        with pytest.raises(Killed):
            run(job)
    again = PruneJob(model=job.model, output=job.output, sparsity=0.75, overwrite=True)
    with locking(Alone(), output):
        shutil.copytree(tmp_path / "left", left(job))  # as a signal leaves it
        before = files(output.parent)
        with pytest.raises(OSError, match="is being written by process"):
            run(again)  # nothing is removed while another job is at work
        assert files(output.parent) == before
    shutil.copytree(tmp_path / "left", left(job))
    for error, other in (("is finished", {"resume": True}), ("pass overwrite=True", {})):
        with pytest.raises(FileExistsError, match=error):
            run(dataclasses.replace(job, **other))
    run(again)
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("kind", "goes_on_then"),
    [*((kind, True) for kind in RESUMABLE), ("one-shot", False), *(only_whole(kind, False) for kind in RESUMABLE[1:])],
)
def test_an_error_that_the_input_is_not_at_fault_for_keeps_what_is_done(
    make: Callable[[str], Any], kind: str, goes_on_then: bool, expected: Callable[[Any], Any]
) -> None:
    job = make(kind)
    if goes_on_then:
        kill(job, heard := Heard())
        assert heard.said[-1] == goes_on(job)
    again = dataclasses.replace(job, resume=True)

    def lacks_memory(*_: object, **__: object) -> None:
        raise ValueError("that takes 80 GiB of 2 GiB that are free")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distprune.jobs.run.Run.report", lacks_memory)
        heard = Heard()
        with pytest.raises(ValueError, match="80 GiB"):
            run(again if goes_on_then else job, heard)
    assert heard.said[-1] == goes_on(job)
    assert (left(job) / "recipe.json").exists()
    heard = Heard()
    run(again, heard)
    assert any("going on " in said and "after 0 of" not in said for said in heard.said)
    assert files(Path(job.output)) == expected(job)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_model_that_was_fetched_anew_is_the_same(
    make: Callable[[str], Any], kind: str, expected: Callable[[Any], Any]
) -> None:
    job = make(kind)
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
def test_another_version_or_model_does_not_go_on(
    make: Callable[[str], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the bytes that are looked at do not show that it is another one."""
    monkeypatch.setattr("distprune.checkpoint.hf_directory._SAMPLE_BYTES", 0)
    job = make(kind)
    kill(job)
    again, before = dataclasses.replace(job, resume=True), files(left(job))
    with monkeypatch.context() as patch:
        patch.setitem(job_run._VERSIONS, "distprune", "9.9.9")
        with pytest.raises(ValueError, match=r"the job was another: distprune: '.*' then, '9\.9\.9' now"):
            run(again)
    assert files(left(job)) == before
    name = "model.layers.0.mlp.up_proj.weight"
    path = next(path for path in Path(job.model).glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][0] *= -2
    save_file(tensors, path, metadata={"format": "pt"})
    if kind != "streamed":
        with pytest.raises(ValueError, match=r"the job was another: .* weights: "):
            run(again)
        assert files(left(job)) == before
        return
    run(again)  # all is written anew
    written = files(Path(job.output))
    run(dataclasses.replace(job, overwrite=True))
    assert files(Path(job.output)) == written


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
    weights = min(Path(job.model).glob("*.safetensors"))
    with pytest.raises(OSError, match=r"\.safetensors was changed or replaced while it was read"):
        run(job, Replaces(weights))
    assert not Path(job.output).exists()
    assert left(job).exists() == (kind == "streamed")  # what was written before is right
