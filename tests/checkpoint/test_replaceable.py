"""Outputs replace nothing but models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distprune.checkpoint.outputs import check_output
from tests.checkpoint.test_outputs import make_old


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("", FileExistsError, "overwrite=True"),
        ("file", NotADirectoryError, "is a file"),
        ("file/below", NotADirectoryError, "is a file"),
        ("new/er/out", FileNotFoundError, "cannot be made: there is no directory .*new$"),
        ("loop", ValueError, "is a link to"),
        ("loop/out", NotADirectoryError, "is a file"),
        ("model", ValueError, "inside each other"),
        ("model/inside", ValueError, "inside each other"),
    ],
)
def test_no_directory_may_be_there(tmp_path: Path, target: str, error: type[Exception], message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(error, match=message):
        check_output(tmp_path / target, inputs=[tmp_path / "model"] if "model" in target else ())
    assert check_output(tmp_path / "new" / "out") == tmp_path / "new" / "out"  # one directory is made above it


def test_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(ValueError, match="mount point"):
        check_output(tmp_path / "out")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_old(tmp_path / "out")


def refused(path: Path | str, message: str, *inputs: Path) -> None:
    """Check that ``path`` is refused, though it is to be overwritten."""
    with pytest.raises(ValueError, match=message):
        check_output(path, overwrite=True, inputs=inputs)


def test_home_and_current_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("", "no name")
    monkeypatch.setenv("HOME", str(model))
    refused(model, "holds the home directory")
    refused("~", "holds the home directory")
    monkeypatch.setenv("HOME", "/")
    monkeypatch.chdir(model)
    refused(".", "holds the current directory")
    refused("/", "holds the home directory")


@pytest.mark.parametrize("inside", [True, False])
def test_a_link(model: Path, inside: bool) -> None:
    link = model / "tokenizer.json" if inside else model.with_name("link")
    link.symlink_to(model if not inside else __file__)
    refused(model if inside else link, r"holds \['tokenizer.json'\]" if inside else "is a link to")


@pytest.mark.parametrize("name", ["notes.txt", ".env", "model.py", "checkpoint-100/", "tokenizer.json/"])
def test_files_that_are_no_models(model: Path, name: str) -> None:
    if name.endswith("/"):
        (model / name).mkdir()
    else:
        (model / name).touch()
    refused(model, f"it holds \\['{name.rstrip('/')}'\\]")
    assert len(list(model.iterdir())) == 3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_model_directory(model: Path, name: str) -> None:
    (model / name).unlink()
    refused(model, "no model directory")


def test_weights_that_the_index_names_and_copies_of_the_input(model: Path, tmp_path: Path) -> None:
    (model / "weights-a.safetensors").touch()
    refused(model, "weights-a")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "weights-a.safetensors"}}')
    check_output(model, overwrite=True)
    source = make_old(tmp_path / "source")
    for folder in (model, source):
        (folder / "vocab.bpe").write_text("vocabulary")
    check_output(model, overwrite=True, inputs=[source])
    refused(model, r"vocab\.bpe")


def test_inputs_in_the_output(model: Path, tmp_path: Path) -> None:
    text = model / "README.md"
    text.write_text("calibration text")
    refused(model, "lie inside each other", text)
    link = tmp_path / "link"
    link.symlink_to(text)
    refused(model, "lie inside each other", link)
    refused(tmp_path, "lie inside each other", text)
    # A model directory whose weights are links into the output.
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").symlink_to(model / "model.safetensors")
    refused(model, "lie inside each other", source)


def test_the_input_under_another_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is mounted in two places is one, though its names are two."""
    same = make_old(tmp_path / "mounted")
    samefile = Path.samefile
    monkeypatch.setattr(Path, "samefile", lambda a, b: {a, b} == {model, same} or samefile(a, b))
    refused(model, "lie inside each other", same)
    refused(model, "lie inside each other", same / "config.json")
