"""Errors in words of the command line."""

from __future__ import annotations

import pytest

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
