"""The scripts in launch/ do what they say: here in this process, and with --whole on two ranks, too."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import nn

from distprune import load, sparsity
from tests.hf_models import TEXT, make_model, make_tokenizer
from tests.started import run_script

LAUNCH = Path(__file__).parent.parent.parent / "launch"
WINDOWS = ["--text", "text.txt", "--samples", "4", "--sequence-length", "16"]
OUTPUT = ["--output", "out"]


def zeros(share: float, include: str | Sequence[str] = ()) -> Callable[[nn.Module], bool]:
    return lambda model: abs(sparsity(model, include=include) - share) < 0.001


# A script with its arguments, the last line that it prints, and what is true of the model that it writes.
EXAMPLES = [
    (
        ["one_shot.py", "model", *WINDOWS, *OUTPUT, "--pattern", "1:4"],
        r"75.0% of the weights are zero; perplexity [\d.]+ before, [\d.]+ after",
        zeros(0.75),
    ),
    (
        ["shrink_and_recover.py", "model", *WINDOWS, *OUTPUT, "--steps", "2"],
        r"before, [\d.]+ without these channels, [\d.]+ after 2 steps",
        lambda model: model.config.intermediate_size == 21,
    ),
    (
        ["attention_only.py", "model", *OUTPUT],
        r"50.0% of the attention's weights are zero, and 2.3% of the others",  # which are there before
        zeros(0.5, include="*self_attn*_proj.weight"),
    ),
    (["own_score.py", "model", *WINDOWS, *OUTPUT], r"50.0% of the weights are zero by fisher", zeros(0.5)),
]
FSDP2 = ["train_sparse_fsdp2.py", *OUTPUT, "--steps", "4", "--save-every", "2"]
TRAINER = ["trainer_sparse.py", *OUTPUT, "--steps", "12"]
# Those that resume: the last checkpoint, and what it leads to.
RESUMING = [
    (FSDP2, "step-000004", "step-000004/__0_0.distcp"),
    pytest.param(TRAINER, "checkpoint-12", "model.safetensors", marks=pytest.mark.whole),
]
IS_SPARSE = "80.0% of the weights in the layers are zero"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Run a script in this process, and return the last line that it prints."""

    def run(script: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", script)
        runpy.run_path(str(LAUNCH / script[0]), run_name="__main__")
        return capsys.readouterr().out.splitlines()[-1]

    return run


def name_of(value: object) -> str:
    return value[0] if isinstance(value, list) else ""


@pytest.mark.parametrize(("script", "said", "holds"), EXAMPLES, ids=name_of)
def test_in_one_process(
    script: list[str],
    said: str,
    holds: Callable[[nn.Module], bool],
    folder: Path,
    last_line: Callable[[list[str]], str],
) -> None:
    assert re.fullmatch(said, last_line(script))
    assert holds(load(folder / "out"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # says torch.distributed.checkpoint
@pytest.mark.parametrize(("script", "checkpoint", "result"), RESUMING, ids=name_of)
def test_resume(
    script: list[str], checkpoint: str, result: str, folder: Path, last_line: Callable[[list[str]], str]
) -> None:
    assert last_line(script) == IS_SPARSE
    whole = (folder / "out" / result).read_bytes()
    shutil.rmtree(folder / "out" / checkpoint)
    assert last_line([*script, "--resume"]) == IS_SPARSE
    assert (folder / "out" / result).read_bytes() == whole


@pytest.mark.launcher
@pytest.mark.whole
@pytest.mark.parametrize(("script", "said"), [of[:2] for of in EXAMPLES], ids=name_of)
def test_on_two_ranks(script: list[str], said: str, folder: Path) -> None:
    assert re.fullmatch(said, run_script(2, folder, str(LAUNCH / script[0]), *script[1:]).splitlines()[-1])


@pytest.mark.launcher
@pytest.mark.whole
def test_resume_on_another_number_of_ranks(folder: Path) -> None:
    script = [str(LAUNCH / FSDP2[0]), *FSDP2[1:]]
    assert run_script(2, folder, *script).splitlines()[-1] == IS_SPARSE
    shutil.rmtree(folder / "out" / "step-000004")
    assert run_script(4, folder, *script, "--resume").splitlines() == [IS_SPARSE]  # the first steps are not done again


@pytest.mark.launcher
@pytest.mark.whole
def test_a_trainer_on_two_ranks(folder: Path) -> None:
    printed = run_script(2, folder, str(LAUNCH / TRAINER[0]), *TRAINER[1:]).splitlines()
    assert printed[-1] == IS_SPARSE
    assert (folder / "out" / "checkpoint-12" / "model.safetensors").exists()
