"""What is shown of an error: a line of what a user can mend, and a traceback of what nobody expected."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distprune.jobs.own_words import words_content
from tests.cli.command import Command
from tests.cli.test_leaving import LINE, Pair, pair
from tests.modes import obeying_modes
from tests.started import be_rank

__all__ = ["pair"]


# By the type of the error: what is called in the place of ``prune_model``.
BUGS: dict[str, Callable[..., object]] = {
    "ValueError": lambda *_, **__: list(zip([1], [], strict=True)),
    "TypeError": len,  # that it takes no such arguments arises in a line of the library
    "OSError": lambda *_, **__: os.fstat(-1),
    "ModuleNotFoundError": lambda *_, **__: importlib.import_module("distprune.none"),
    "RuntimeError": lambda *_, **__: torch.empty(2).view(3),
    "NotImplementedError": lambda *_, **__: torch.empty(1, device="meta").to("cpu"),
}


@pytest.mark.parametrize("kind", BUGS)
def test_what_no_check_raised_gets_a_traceback(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path, model_folder: Path, kind: str
) -> None:
    """Though checks raise errors of that type too."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("distprune.jobs.prune.prune_model", BUGS[kind])
    error = command("prune", model_folder, "--output", tmp_path / "out", "--sparsity", "0.3", code=1).err
    assert error.startswith("Traceback")
    assert f"\n{kind}: " in error
    assert "jobs/prune.py" in error
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == error.strip()


def be_rank_with_a_bug(variables: dict[str, str], arguments: list[str], log: str) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr("distprune.jobs.options.check_output", lambda *_, **__: list(zip([1], [], strict=True)))
    be_rank(variables, arguments, log)


@pytest.mark.launcher
@pytest.mark.whole
@pytest.mark.xdist_group("launcher")
def test_where_nobody_expected_it_is_shown_by_the_first_rank_too(pair: Pair) -> None:
    for rank, be in enumerate((be_rank, be_rank_with_a_bug)):
        pair.variables[rank]["TORCHELASTIC_ERROR_FILE"] = str(pair.folder / f"error{rank}.json")
        pair.start_one(rank, LINE, be)
    assert (pair.code(0), pair.code(1)) == (1, 1)
    for rank in range(2):
        for said in (pair.said(rank), (pair.folder / f"error{rank}.json").read_text()):
            assert "lambda *_, **__: list(zip([1], [], strict=True))" in said
            assert "ValueError: zip() argument 2 is shorter than argument 1" in said
    assert "ValueError: rank 1 of 2: zip()" in pair.said(0)


# By what runs out of memory: the command line, in which stage, and a way out that is named.
SHORT: dict[str, tuple[str, str, str]] = {
    "jobs.run.load_model": ("prune {model} --sparsity 0.5", "loading", "--dtype bfloat16, --streamed, which does not"),
    "jobs.prune.prune_model": ("prune {model} --sparsity 0.5", "pruning", "--streamed, which does not load the model"),
    "jobs.run.perplexities": (
        "prune {model} --sparsity 0.5 --eval {text} --eval-length 8",
        "evaluating before on text.txt",
        "--dtype bfloat16, more ranks",
    ),
    "jobs.one_shot.prune_blocks": (
        "prune {model} --sparsity 0.5 --calibration {text} --own-words 0 --samples 2 --sequence-length 8",
        "pruning block by block",
        "--offload, fewer --samples, a smaller --sequence-length",
    ),
    "removal.shrink_model.cut_model": (
        "shrink {model} --mlp 0.5 --refit none --calibration {text} --own-words 0 --samples 2 --sequence-length 8",
        "shrinking block by block",
        "--offload, fewer --samples",
    ),
    "jobs.finetune.MaskedTraining.backward": (
        "finetune {model} --data {text} --steps 1 --batch-size 2 --sequence-length 8",
        "training",
        "a smaller --batch-size, a smaller --sequence-length, more ranks",
    ),
    "jobs.streamed.FileWriter": ("prune {model} --sparsity 0.5 --streamed", "starting", "more ranks"),
    "jobs.sample.own_words": ("sample {model} --samples 2 --sequence-length 8", "writing own words", "fewer --samples"),
}
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1 GiB is free."


def too_much(kind: str) -> None:
    """Run out of memory."""
    if kind == "torch":
        torch.empty(1 << 60, dtype=torch.uint8, device="cpu")
    elif kind == "numpy":
        np.empty(1 << 60, dtype=np.uint8)
    raise {
        "python": MemoryError(),
        "system": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        "CUDA": torch.OutOfMemoryError(CUDA),
        "C++": RuntimeError("std::bad_alloc"),
    }[kind]


# By who says it: what is said of the size.
SIZES = {
    "torch": "1152921504606846976 bytes",
    "numpy": "1.00 EiB",
    "python": "MemoryError()",
    "system": "Cannot allocate memory",
    "CUDA": "Tried to allocate 2.00 GiB",
    "C++": "std::bad_alloc",
}


@pytest.mark.parametrize(
    ("where", "kind"),
    [*((where, "torch") for where in SHORT), *(("jobs.prune.prune_model", kind) for kind in SIZES if kind != "torch")],
)
def test_out_of_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    tmp_path: Path,
    model_folder: Path,
    text_file: Path,
    where: str,
    kind: str,
) -> None:
    """In every job, whoever says it."""
    line, stage, ways = SHORT[where]
    monkeypatch.setattr(f"distprune.{where}", lambda *_, **__: too_much(kind))
    words = [word.format(model=model_folder, text=text_file) for word in line.split()]
    said = command(*words, "--output", tmp_path / "out", code=1).err.splitlines()
    assert not any("Traceback" in line for line in said)
    (error,) = (line for line in said if line.startswith("error: "))
    assert error.startswith(f"error: out of memory while {stage}")
    assert SIZES[kind] in error
    assert "Ways out: " in error
    assert ways in error
    assert not (tmp_path / "out").exists()


def test_what_may_not_be_read_is_not_called_missing(command: Command, tmp_path: Path, model_folder: Path) -> None:
    model, words = tmp_path / "model", tmp_path / "words"
    shutil.copytree(model_folder, model)
    words.write_bytes(words_content(torch.ones(2, 8), {}))
    line: list[str | Path] = ["prune", model, "--output", tmp_path / "out", "--sparsity", "0.5"]
    reading: list[str | Path] = ["--method", "wanda", "--sequence-length", "8", "--own-words", words]
    commands: list[tuple[Path, list[str | Path]]] = [
        (model / "model.safetensors", line),
        (model / "model.safetensors", ["inspect", model]),
        (model / "config.json", line),
        (words, [*line, *reading]),
    ]
    for closed, asked in commands:
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            with obeying_modes():
                err = command(*asked, code=1).err
        finally:
            closed.chmod(mode)
        said = [line for line in err.splitlines() if "written to" not in line]
        assert said[-1].endswith(f"Permission denied: '{closed}'"), said
        assert not any("Traceback" in line for line in said)
