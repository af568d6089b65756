"""The first tokens of a text file: no more of it is read than they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from distprune.calibration.text import tokenize_file
from distprune.checkpoint.hf_load import load_tokenizer
from tests.hf_models import TEXT


def test_first_tokens_of_a_file(tmp_path: Path, model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    text, lines = tmp_path / "text", tmp_path / "text.jsonl"
    text.write_text(TEXT)
    tokens = tokenize_file(tokenizer, text, max_tokens=100, sequence_length=10)
    assert tokens.tolist() == tokenizer(TEXT)["input_ids"][:100]
    lines.write_text('{"text": "the union"}\n"at work"\nnot read')
    assert tokenize_file(tokenizer, lines, max_tokens=12, sequence_length=10).tolist() == (
        tokenizer("the union")["input_ids"] + tokenizer("at work")["input_ids"][:3]
    )
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, length, error, message in (
        ("text", 101, ValueError, "holds 100 tokens; an evaluation needs at least one window of 101"),
        ("nothing", 10, FileNotFoundError, "no text file"),
        ("bytes", 10, ValueError, "not UTF-8"),
    ):
        with pytest.raises(error, match=message):
            tokenize_file(tokenizer, tmp_path / name, max_tokens=100, sequence_length=length)


def test_reads_on_where_tokens_are_long(tmp_path: Path) -> None:
    def words_of_a_hundred(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(range(len(text) // 100))}

    path = tmp_path / "text"
    path.write_text("x" * 10_000)
    assert tokenize_file(words_of_a_hundred, path, max_tokens=70, sequence_length=8).tolist() == list(range(70))
