"""What the command line accepts, what it passes on, and how it ends."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
from typer.testing import CliRunner

from distprune import __main__
from distprune.cli import main
from distprune.cli.commands import JobCommand, Running
from distprune.jobs import BareJob, FinetuneJob, OneShotJob, PlanJob, PruneJob, SampleJob, ShrinkJob, StreamedJob
from distprune.version import __version__
from tests.cli.command import Command


def commands(line: str) -> list[JobCommand]:
    """Return what this command line asks for."""
    requests: list[JobCommand] = []
    result = CliRunner().invoke(main.app, line.split(), obj=requests.append)
    assert result.exit_code == 0, result.output
    return requests


def asked(line: str) -> BareJob:
    (command,) = commands(line)
    return command.job


def test_version(command: Command) -> None:
    assert command("--version").out == f"distprune {__version__}\n"


COMMANDS = ("prune", "shrink", "finetune", "sample")  # that run jobs


def test_the_help_of_each_command() -> None:
    """Options in groups, and two examples that are what the command takes."""
    command: Any = typer.main.get_command(main.app)
    for name, of in command.commands.items():
        examples = of.epilog.split("\n\n")[1:]
        assert len(examples) == 2
        for example in examples:
            words = shlex.split(example.partition("distprune ")[2])
            assert words[0] == name
            of.make_context(name, words[1:], obj=lambda *_: None)
            if name in COMMANDS:
                asked(" ".join(words))
        options = [option for option in of.params if option.param_type_name == "option"]
        if name in COMMANDS:
            assert {option.name for option in options if not option.rich_help_panel} == set()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("typer", "rich") else object())
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            __main__.run()
    assert capsys.readouterr().err == (
        "error: the command line needs typer, rich, which are not installed: pip install 'distprune[hf]'\n"
    )


MO: dict[str, Any] = {"model": "m", "output": "o"}
# By command line: the job.
JOBS: dict[str, BareJob] = {
    "prune m --output o --sparsity 0.5": PruneJob(**MO, sparsity=0.5),
    "prune m --output o --pattern 2:4": PruneJob(**MO, pattern="2:4"),
    "prune m --output o --pattern block:16 --sparsity 0.5 --scope tensor": PruneJob(
        **MO, scope="tensor", sparsity=0.5, pattern="block:16"
    ),
    "prune m --output o --sparsity 0.5 --calibration t": OneShotJob(**MO, method="admm", sparsity=0.5, calibration="t"),
    "prune m --output o --pattern 2:4 --streamed --resume --include *.q": StreamedJob(
        **MO, pattern="2:4", resume=True, include=("*.q",)
    ),
    "finetune m --output o --data d --steps 3": FinetuneJob(**MO, data="d", steps=3),
    "shrink m --output o --calibration c --mlp 0.75": ShrinkJob(**MO, calibration="c", mlp=0.75),
    # Without a text the model writes one.
    "prune m --output o --sparsity 0.5 --method admm --samples 8": OneShotJob(**MO, sparsity=0.5, samples=8),
    "prune m --output o --sparsity 0.5 --method wanda": OneShotJob(**MO, sparsity=0.5, method="wanda"),
    "shrink m --output o --mlp 0.5": ShrinkJob(**MO, calibration="self", mlp=0.5),
    "finetune m --output o --teacher t --steps 3": FinetuneJob(**MO, data="self", teacher="t", steps=3),
    "prune m --output o --sparsity 0.5 --calibration t --own-words 2": OneShotJob(
        **MO, sparsity=0.5, calibration="t", own_words=2
    ),
    "prune m --output o --sparsity 0.5 --no-streamed --no-plan --no-offload": PruneJob(**MO, sparsity=0.5),
    "prune m --output o --sparsity 0.5 --own-words w": OneShotJob(**MO, sparsity=0.5, own_words="w"),
    "sample m --output o --samples 3 --sequence-length 9 --seed 5 --temperature 0.5 --top-k 7": SampleJob(
        **MO, samples=3, sequence_length=9, seed=5, temperature=0.5, top_k=7
    ),
    # Sizes are numbers or shares.
    "shrink m --output o --kv-groups 2": ShrinkJob(**MO, kv_groups=2),
    "shrink m --output o --parameters 100M": ShrinkJob(**MO, parameters=100_000_000),
    "shrink m --output o --parameters 6000000000": ShrinkJob(**MO, parameters=6_000_000_000),
    "shrink m --output o --parameters 1.2345K": ShrinkJob(**MO, parameters=1234),
    "shrink m --output o --parameters 0.8": ShrinkJob(**MO, parameters=0.8),
}


def test_which_job_a_command_line_asks_for() -> None:
    for line, job in JOBS.items():
        assert commands(line) == [JobCommand(job)], line
    job = asked("shrink m --output o --kv-groups 2")
    assert isinstance(job, ShrinkJob)
    assert isinstance(job.kv_groups, int)  # two of them, and not a share of 2.0


def test_every_option_arrives() -> None:
    line = (
        "m --output o --seed 7 --dtype bfloat16 --device cpu --overwrite --eval t.txt --eval u.jsonl "
        "--eval-tokens 64 --eval-length 16 --tasks a,b --tasks c --timeout 30"
    )
    common: dict[str, Any] = {**MO, "seed": 7, "dtype": torch.bfloat16, "overwrite": True, "tasks": ("a", "b", "c")}
    common |= {"evaluate_on": ("t.txt", "u.jsonl"), "evaluation_tokens": 64, "evaluation_length": 16}
    in_place = " --sparsity 0.12 --method random --scope tensor --include *a --include *b --exclude *c"
    job = PruneJob(**common, method="random", scope="tensor", sparsity=0.12, include=("*a", "*b"), exclude=("*c",))
    assert commands(f"prune {line}{in_place}") == [JobCommand(job, Running(device="cpu", timeout=30))]
    one_shot = " --method wanda --pattern row --sparsity 0.5 --calibration c --samples 3 --sequence-length 9 --offload"
    one_shot += " --sequential layer --targets dense --target-share 0.25 --allocation gradients --resume"
    one_shot += " --expert-memory 2G"
    common |= {"calibration": "c", "samples": 3, "sequence_length": 9, "offload": True, "resume": True}
    common |= {"targets": "dense", "target_share": 0.25}
    more: dict[str, Any] = {"sequential": "layer", "sparsity": 0.5, "pattern": "row", "allocation": "gradients"}
    more["expert_memory"] = 2 << 30
    calibrated = OneShotJob(**common, **more, method="wanda")
    assert asked(f"prune {line}{one_shot}") == calibrated
    assert asked(f"prune {line}{one_shot} --plan --ranks 64") == PlanJob(**vars(calibrated), ranks=64)
    everything = one_shot.replace("--samples 3", "--samples all")
    assert asked(f"prune {line}{everything}") == dataclasses.replace(calibrated, samples=None)
    removal = (
        "--calibration c --mlp 1.0 --heads 6 --layers 24 --parameters 5M --criterion fluctuation "
        "--layer-criterion influence --refit bias --targets dense --target-share 0.25 "
        "--samples 3 --sequence-length 9 --offload --resume"
    )
    more = {"mlp": 1.0, "heads": 6, "layers": 24, "parameters": 5_000_000, "criterion": "fluctuation", "refit": "bias"}
    assert asked(f"shrink {line} {removal}") == ShrinkJob(**common, **more, layer_criterion="influence")
    training = (
        "--data d --minutes 1.5 --teacher t --learning-rate 0.1 --batch-size 2 --sequence-length 9 --save-every 5 "
        "--compute-dtype float32 --resume"
    )
    for name in ("calibration", "samples", "offload", "targets", "target_share"):
        del common[name]
    more = {"data": "d", "minutes": 1.5, "teacher": "t", "learning_rate": 0.1, "batch_size": 2, "save_every": 5}
    assert asked(f"finetune {line} {training}") == FinetuneJob(**common, **more, compute_dtype=torch.float32)


# By how a command line begins: how it goes on, and is wrong.
WRONG = {
    "prune m --output o --sparsity 0.3 --calibration t": """
        --allocation owl | --scope tensor | --streamed | --target-share 7 | --target-share 0.3 --targets own |
        --target-share 0.3 --method wanda | --no-sync-files | --ranks 8 | --plan --ranks 0 |
        --expert-memory 80X | --plan --streamed
    """,
    "prune m --output o --sparsity 0.3": """
        --scope row | --pattern 2:4 | --allocation uniform | --streamed --device cuda |
        --no-sync-files | --streamed --eval t | --streamed --dtype float16 | --targets dense |
        --target-share 0.3 | --sequential layer | --sequence-length 16 | --offload | --eval-tokens 16 | --plan
        | --ranks 8 | --dtype int8 | --eval-length 1 | --eval-tokens 10000000000000000000000 | --timeout 0 |
        --timeout inf | --timeout nan | --timeout 1e300 | --method wanda --own-words 0 |
        --method wanda --scope tensor
    """,
    "prune m --output o": """
        --sparsity half | --sparsity 1.5 | --sparsity nan | --pattern column --sparsity 0.5 | --pattern row |
        --pattern 2:4 --method wanda --calibration c --samples 0 |
        --pattern 2:4 --method wanda --calibration c --samples many
    """,
    "finetune m --output o": """
        --data d --steps 1 --minutes 1 | --data d --minutes 0 | --data d --minutes nan |
        --data d --steps 1 --learning-rate 0 | --data d --steps 1 --batch-size 0 |
        --data d --steps 1 --timeout 0 | --steps 1 | --steps 1 --teacher t --data d --samples 3
    """,
    "shrink m --output o --calibration c": """
        --mlp 0.5 --target-share 0.3 --targets own | --mlp 0.5 --target-share 0.3 --refit none |
        --mlp 0.5 --layer-criterion loss | --mlp 0.5 --expert-criterion usage | --mlp 0.5 --target-share 2 |
        --mlp 1.5 | --mlp 0 | --mlp -3 | --mlp half | --mlp nan | --heads 2 --kv-groups 2 | --parameters 1.5 |
        --parameters 100m | --parameters M | --parameters 0 | --parameters nan | --mlp 0.5 --criterion best |
        --mlp 0.5 --timeout 0
    """,
    "": """
        prune | prune m --output o | shrink m --output o --mlp 0.5 --own-words 2 |
        shrink m --output o --mlp 0.5 --samples all | sample m | sample m --output o --sequence-length 1 |
        sample m --output o --eval t | shrink m --output o --calibration c | inspect | sharpen m |
    """,
}


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(main, "_work", lambda *_: pytest.fail("a job was started"))
    for begin, ends in WRONG.items():
        for more in ends.split("|"):
            said = command(*begin.split(), *more.split(), code=2)
            assert "Usage:" in said.err + said.out
            assert "Traceback" not in said.err


PRUNE, HALF = "prune m --output o", "prune m --output o --sparsity 0.5"
# By what is wrong: the sentence that says so.
SAID = {
    f"{PRUNE} --amount 0.3": "prune takes no --amount; say --sparsity 0.5: the final share of zeros",
    f"{PRUNE} --sparsty 0.5": "No such option: --sparsty (Possible options: --sparsity)",
    "shrink m --output o --sparsity 0.5": "shrink takes no --sparsity; say what stays: --mlp 0.75, --heads 6",
    "finetune m --output o --lr 1": "finetune takes no --lr; say --learning-rate",
    f"{HALF} --method adm": "'adm' is not one of 'magnitude', 'random', 'admm', 'sparsegpt', 'wanda'",
    f"{PRUNE} --sparsity 50%": "--sparsity takes NUMBER, not '50%'",
    f"{PRUNE} --sparsity": "Option '--sparsity' requires an argument",
    f"{HALF} --eval t --eval-length 1": "evaluation_length (--eval-length) takes a number at least 2 and at most",
    f"{HALF} --eval t --eval-length 1,024": "--eval-length takes INTEGER, not '1,024'",
    f"{HALF} --calibration t --target-share 7": "(--target-share) takes a number above 0 and at most 1, not 7",
    f"{HALF} --seed {1 << 63}": f"at least {-(1 << 63)} and at most {(1 << 63) - 1}, not {1 << 63}",
    f"{HALF} --samples many --calibration t": "--samples takes N|all, not 'many'",
    f"{PRUNE} --pattern 4:2": "4:2 is not a pattern",
    f"{HALF} more": "unexpected extra argument",
    "prune m --sparsity 0.5": "Missing option '--output'",
    "prun m": "Did you mean 'prune'",
    f"{HALF} --samples 3": "--samples goes with --calibration",
    f"{HALF} --streamed --samples 3": "--samples does not go with --streamed",
    f"{HALF} --own-words w --samples 3": "--samples goes with a --calibration text here: --own-words w takes all",
    "shrink m --output o --mlp 6 --own-words w --samples 128": "--own-words w takes all windows",
    f"{HALF} --eval-length 3": "--eval-length goes with --eval",
    f"{HALF} --eval t --eval-tokens 100": "evaluation_tokens=100 (--eval-tokens) are less than one window of 512 (--ev",
    f"{HALF} --method wanda --scope tensor": "--scope does not go with --method wanda",
    f"{HALF} --own-words w --scope tensor": "--scope does not go with --own-words w",
    f"{HALF} --calibration t --scope tensor": "--scope does not go with --calibration",
    f"{HALF} --method wanda --expert-memory 1/0": "--expert-memory takes N[K|M|G|T], not '1/0'",
    "shrink m --output o --parameters 1/0M": "--parameters takes N[K|M|B]|SHARE, not '1/0M'",
    "finetune m --output o --data d": "give steps (--steps) or minutes (--minutes)",
}


def test_one_sentence_says_what_is_taken(command: Command) -> None:
    for line, said in SAID.items():
        error, *more = command(*line.split(), code=2).err.splitlines()
        assert error.startswith("error: ")
        assert said in error
        assert not any(word in error for word in ("Input should", "Value error"))
        assert len(more) in (0, 2), line


def test_prunes_and_inspects(command: Command, tmp_path: Path, model_folder: Path) -> None:
    output = tmp_path / "out"
    shown = command("prune", model_folder, "--output", output, "--sparsity", "0.25", "--scope", "tensor").out
    assert "magnitude" in shown
    assert "Unstructured(sparsity=0.25, scope='tensor')" in shown
    inspected = json.loads(command("inspect", output, "--json").out)
    zeros = {tensor["name"]: tensor["num_zeros"] for tensor in inspected["tensors"]}
    assert zeros["model.layers.1.mlp.up_proj.weight"] == 28 * 20 // 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{model}/nothing --output {out}", "there is no model directory"),
        ("{model} --output {out} --include *.q", "'*.q' matches no parameter"),
        ("{model} --output {model}", "lie inside each other"),
        ("{model} --output {out} --eval {out}.txt", "there is no text file"),
        ("{model} --output {out} --eval {text} --eval-tokens 9000 --eval-length 9000", "one window of 9000"),
        ("org/name@v1 --output {out}", "hf download org/name --revision v1"),
        ("{model} --output {out} --tasks arc_easy", "pip install 'distprune[tasks]'"),
        ("{loop} --output {out}", "loop"),
        ("{model} --output {loop}/out", "loop"),
        ("{model} --output {out} --calibration {loop}", "loop"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    tmp_path: Path,
    model_folder: Path,
    text_file: Path,
    line: str,
    message: str,
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(model_folder.parent / "error.json"))
    places = {"model": model_folder, "out": tmp_path / "out", "text": text_file, "loop": tmp_path / "loop"}
    enough = [] if "--sparsity" in line else ["--sparsity", "0.3"]
    error = command("prune", *line.format(**places).split(), *enough, code=1).err
    assert error.startswith("error: ")
    assert message.format(**places) in error
    assert error.count("\n") == 1
    assert json.loads((model_folder.parent / "error.json").read_text())["message"]["message"] == error.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setitem(main._RUN, PruneJob, fail)


LINE = ("prune", "m", "--output", "o", "--sparsity", "0.3")


def test_what_ends_a_job_is_never_taken_for_a_success(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    ends: dict[BaseException, int] = {SystemExit(143): 143, KeyboardInterrupt(): 130}
    ends |= {SystemExit(code): 1 for code in (0, None, "no")}
    for error, code in ends.items():
        fail_with(monkeypatch, error)
        command(*LINE, code=code)


def test_a_table_that_cannot_be_shown_does_not_change_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(main._RUN, PruneJob, lambda *_, **__: {})  # no report: the table fails
    command(*LINE)
