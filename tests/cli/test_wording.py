"""Errors in words of the command line."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from distprune.cli import main
from distprune.cli.wording import worded
from distprune.jobs import OneShotJob
from distprune.jobs.options import options_of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sparsity=1.5 is outside", "--sparsity 1.5 is outside"),
        ("it takes targets='own'. (more)", "it takes --targets own. (more)"),
        ("evaluate_on=('a',)", "evaluate_on=('a',)"),
        ("say dtype=torch.float16, or", "say --dtype float16, or"),
        ("offload=True (--offload) lets it", "--offload lets it"),
        ("refit='none' (--refit none), or fewer samples (--samples)", "--refit none, or fewer --samples"),
        ("offload=False and resume=True", "--no-offload and --resume"),
        ("steps=None", "steps=None"),  # no option of this job
        ("sequential=None goes", "no --sequential goes"),
        ("give sparsity=..., such as", "give --sparsity, such as"),
        ("sequence_length of evaluation_length", "--sequence-length of --eval-length"),
        ("the pattern needs a sparsity", "the pattern needs a sparsity"),
        ("Unstructured(sparsity=0.5) leaves sparsity='x'", "Unstructured(sparsity=0.5) leaves --sparsity x"),
        (
            "/data/own_words/file, target_share.txt and 'target_share'",
            "/data/own_words/file, target_share.txt and 'target_share'",
        ),
        ("own_words(model) writes own_words_file", "own_words(model) writes --own-words-file"),
        ("there is no file named_so", "there is no file named_so"),
    ],
)
def test_names_of_fields_become_options(text: str, said: str) -> None:
    assert worded(text, options_of(OneShotJob)) == said


def test_what_was_given_stays() -> None:
    assert worded("no own_words, own_words=3", options_of(OneShotJob), ["own_words"]) == "no own_words, --own-words 3"


def test_errors_speak_of_options() -> None:
    for line, message in (
        ("prune m --output o", "--pattern unstructured needs --sparsity, the share of zeros"),
        ("prune m --output o --sparsity 0.3 --pattern 2:4", "leave out --sparsity 0.3"),
        ("prune m --output o --sparsity 0.3 --streamed --dtype float16", "leave out --dtype float16"),
        ("finetune m --output o --data d", "give --steps or --minutes"),
        ("finetune m --output o --data d --steps 1 --minutes 2", "not both --steps 1 and --minutes 2.0"),
        ("shrink m --output o", "say what stays, by one of --mlp, --heads, --kv-groups"),
        ("shrink m --output o --mlp 0.5 --samples all", "say how many: --samples, such as 128"),
    ):
        output = CliRunner().invoke(main.app, line.split(), obj=pytest.fail).output
        assert message in " ".join(re.split(r"[\s│]+", output)), (line, output)
