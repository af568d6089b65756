"""What is said of words that a command does not take."""

from __future__ import annotations

import pytest

from distprune.cli import main
from tests.cli.test_main import end

PRUNE, HALF = "prune m --output o", "prune m --output o --sparsity 0.5"

SAID = {
    f"{PRUNE} --amount 0.3": "prune takes no --amount; say --sparsity 0.5: the final share of zeros",
    f"{PRUNE} --score l2": "prune takes no --score; say --method",
    f"{PRUNE} --prunen 2": "prune takes no --prunen; say --pattern 2:4",
    f"{PRUNE} --sparsty 0.5": "prune takes no --sparsty; did you mean --sparsity?",
    f"{PRUNE} --teacher t": "prune takes no --teacher; finetune does",
    f"{PRUNE} --zzz": "prune takes no --zzz; distprune prune --help says what it takes",
    "shrink m --output o --sparsity 0.5": "shrink takes no --sparsity; say what stays: --mlp 0.75, --heads 6",
    "finetune m --output o --lr 1": "finetune takes no --lr; say --learning-rate",
    "compare a --outpt b.png": "compare takes no --outpt; did you mean --output?",
    f"{HALF} --method adm": "--method takes magnitude, random, admm, sparsegpt or wanda, not 'adm'; did you mean admm?",
    f"{HALF} --method best": "--method takes magnitude, random, admm, sparsegpt or wanda, not 'best'",
    f"{HALF} --dtype bf16": "--dtype takes auto, float32, bfloat16 or float16, not 'bf16'; did you mean bfloat16?",
    f"{HALF} --device gpu": "--device takes auto, cpu or cuda, not 'gpu'; did you mean cuda?",
    f"{PRUNE} --sparsity 50%": "--sparsity takes a number such as 0.5, not '50%'; did you mean 0.5?",
    f"{PRUNE} --sparsity half": "--sparsity takes a number such as 0.5, not 'half'",
    f"{PRUNE} --sparsity": "--sparsity needs a value behind it",
    f"{HALF} --eval t --eval-length 1": "--eval-length takes a whole number from 2 to 1073741824, not 1",
    f"{HALF} --eval t --eval-length 1,024": "not '1,024'; did you mean 1024?",
    f"{HALF} --calibration t --target-share 7": "--target-share takes a number above 0 and at most 1, not 7",
    f"{HALF} --seed {1 << 63}": f"--seed takes a whole number from {-(1 << 63)} to {(1 << 63) - 1}, not {1 << 63}",
    f"{HALF} --timeout 0": "--timeout takes a number from 1 to 1000000, not 0",
    f"{HALF} --samples many": "--samples: 'many' is neither 'all' nor a number from 1 to 1073741824",
    f"{PRUNE} --pattern 4:2": "4:2 is not a pattern",
    f"{HALF} more": "prune does not take 'more' here; names of options begin with --",
    "prune m --sparsity 0.5": "prune needs --output: Directory to write",
    "prune": "prune needs MODEL: A Hugging Face directory",
    "inspect": "inspect needs DIRECTORY: A Hugging Face directory",
    "prun m": "Did you mean 'prune'",
}


@pytest.mark.parametrize("line", SAID)
def test_one_sentence_says_what_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.setattr(main, "_work", lambda *_: pytest.fail("a job was started"))
    assert end(monkeypatch, *line.split()) == 2
    error, *more = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert SAID[line] in error
    assert not any(word in error for word in ("Invalid value", "Input should", "Value error", "No such option"))
    assert len(more) in (0, 2)
