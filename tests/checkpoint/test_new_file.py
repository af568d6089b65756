"""What a person names a file of: it replaces nothing that was not to be replaced, and nothing else is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import distprune as prune
from distprune.checkpoint import disk
from distprune.checkpoint.output_lock import locking
from distprune.collectives.communicator import communicator
from distprune.jobs import SampleJob, compare_outputs, run_sample_job
from distprune.training.report import TrainingReport, Update
from tests.checkpoint.test_outputs import content
from tests.hf_models import make_model, make_tokenizer
from tests.jobs.test_compare import write as write_report

NAME = "out.png"
Write = Callable[[Path, Path, bool], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("llama") / "model", num_hidden_layers=1)
    make_tokenizer(folder)
    write_report(folder.parent / "job")
    return folder


def sample(model: Path, path: Path, overwrite: bool) -> None:
    run_sample_job(SampleJob(model=str(model), output=str(path), samples=1, sequence_length=4, overwrite=overwrite))


def compare(model: Path, path: Path, overwrite: bool) -> None:
    pytest.importorskip("matplotlib")
    compare_outputs([model.parent / "job"]).draw(path, overwrite=overwrite)


def draw_training(_: Path, path: Path, overwrite: bool) -> None:
    pytest.importorskip("matplotlib")
    TrainingReport((Update(1, 1, 2),), 1).draw(path, overwrite=overwrite)


def save_masks(_: Path, path: Path, overwrite: bool) -> None:
    prune.compute_masks(nn.Linear(4, 4), 0.5).save(path, overwrite=overwrite)


WRITERS: dict[str, Write] = {
    "sample": sample,
    "compare": compare,
    "TrainingReport.draw": draw_training,
    "Masks.save": save_masks,
}


def is_there(folder: Path) -> Path:
    (folder / NAME).write_text("theirs")
    return folder / NAME


def is_link(folder: Path) -> Path:
    (folder / "theirs").write_text("theirs")
    (folder / NAME).symlink_to("theirs")
    return folder / NAME


def is_in_model(folder: Path) -> Path:
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors", NAME):
        (folder / "model" / name).write_text("theirs")
    return folder / "model" / NAME


def is_directory(folder: Path) -> Path:
    (folder / NAME).mkdir()
    (folder / NAME / "file").write_text("theirs")
    return folder / NAME


def is_below_a_file(folder: Path) -> Path:
    return is_there(folder) / NAME


def is_nowhere(folder: Path) -> Path:
    return folder / "none" / NAME


# By the mishap: what makes it, whether overwriting is asked for, what is raised and said.
MISHAPS: dict[str, tuple[Callable[[Path], Path], bool, type[Exception], str]] = {
    "it is there": (is_there, False, FileExistsError, "is there; name another output, or pass overwrite=True"),
    "a link": (is_link, True, ValueError, "is a link to theirs; name what it leads to"),
    "in a model's directory": (is_in_model, True, ValueError, "which is a model's directory; write elsewhere"),
    "a directory": (is_directory, True, IsADirectoryError, "is a directory; name a file"),
    "below a file": (is_below_a_file, True, FileNotFoundError, "there is no directory"),
    "nowhere": (is_nowhere, True, FileNotFoundError, "there is no directory"),
    "a folder that takes no file": (lambda _: Path("/proc") / NAME, True, OSError, "cannot be|0 bytes free"),
}


@pytest.mark.parametrize("mishap", MISHAPS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_must_not_be_written(
    writer: str, mishap: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distprune.jobs.run.load_model", lambda *_, **__: pytest.fail("the model is read before"))
    make, overwrite, error, message = MISHAPS[mishap]
    path = make(tmp_path)
    before = content(tmp_path)
    with pytest.raises(error, match=message):
        WRITERS[writer](model, path, overwrite)
    assert content(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_what_appears_meanwhile_stays(
    writer: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = disk.sync_file

    def with_another(path: Path) -> None:
        sync(path)
        (tmp_path / NAME).write_text("theirs")

    monkeypatch.setattr("distprune.checkpoint.outputs.sync_file", with_another)
    with pytest.raises(FileExistsError, match="filled by someone else meanwhile"):
        WRITERS[writer](model, tmp_path / NAME, False)
    assert content(tmp_path) == {NAME: "theirs"}


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link_beside_it(writer: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / f".{NAME}.partial").symlink_to("theirs")
    WRITERS[writer](model, tmp_path / NAME, False)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", f".{NAME}.partial", NAME}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_is_replaced_only_when_asked_and_leftovers_go(writer: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.partial-distprune").write_text("of a killed job")
    path = is_there(tmp_path)
    WRITERS[writer](model, path, True)
    assert path.read_bytes() != b"theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_one_at_a_time(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distprune.jobs.run.load_model", lambda *_, **__: pytest.fail("the model is read before"))
    with locking(communicator(), tmp_path / NAME), pytest.raises(OSError, match="is being written by process"):
        sample(model, tmp_path / NAME, True)


def test_a_model_is_not_written_over_by_what_it_says(model: Path) -> None:
    before = (model / "config.json").read_text()
    for name in ("config.json", "words"):
        with pytest.raises(ValueError, match="lie inside each other"):
            sample(model, model / name, True)
    assert (model / "config.json").read_text() == before
    assert json.loads(before)["model_type"] == "llama"


def test_more_windows_than_there_is_room_for(model: Path, tmp_path: Path) -> None:
    job = SampleJob(model=str(model), output=str(tmp_path / "words"), samples=1 << 30, sequence_length=1 << 20)
    with pytest.raises(OSError, match=r"has [\d,]+ bytes free, and 4,503,599,627,370,496 are to be"):
        run_sample_job(job)
    assert not list(tmp_path.iterdir())
