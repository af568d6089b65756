"""Calibration text becomes the same samples however many ranks there are."""

from __future__ import annotations

import json
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, LlavaConfig
from typing_extensions import override

from distprune import calibration_windows
from distprune.calibration import text
from distprune.calibration.data import Batches, check_fit, tokens_together
from distprune.calibration.text import tokenize_file
from distprune.calibration.token_ids import as_line, as_windows
from distprune.checkpoint.hf_load import load_tokenizer
from tests.hf_models import TEXT


class Letters:
    """A tokenizer of letters: a is 0, z is 25; its end of sequence is 26."""

    eos_token_id: int | None = 26

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) - ord("a") for c in text if c.isalpha()]}


def make_model(vocabulary: int = 27, positions: int | None = None) -> nn.Module:
    model = nn.Module()
    model.config = SimpleNamespace(vocab_size=vocabulary, max_position_embeddings=positions)  # type: ignore[assignment]
    return model


def load(path: Path, num_samples: int | None, length: int, tokenizer: Any = None, *, seed: int = 0) -> list[list[int]]:
    ids = calibration_windows(path, tokenizer or Letters(), num_samples, length, seed)
    assert ids.dtype == torch.int64
    rows: list[list[int]] = ids.tolist()
    return rows


def test_windows_are_drawn_from_all_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(string.ascii_lowercase * 8)
    cut = load(path, None, 4)
    assert [token for row in cut for token in row] == list(range(26)) * 8
    drawn = [load(path, 6, 4, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(row in cut for row in drawn[0])
    with pytest.raises(ValueError, match=r"53 samples of 4 tokens need 212: .* at most 52 samples"):
        load(path, 53, 4)


def test_windows_of_text_and_of_several_files(tmp_path: Path) -> None:
    letters, one, other = Letters(), tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text(string.ascii_lowercase * 8)
    other.write_text(string.ascii_lowercase[::-1] * 8)
    of_one, of_other = load(one, 3, 4), load(other, 2, 4)
    assert calibration_windows(one, letters, 3, 4).tolist() == of_one
    assert calibration_windows(str(one), letters, 3, 4).tolist() == of_one
    assert calibration_windows(one.read_text(), letters, 3, 4).tolist() == of_one
    assert calibration_windows([one, str(other)], letters, 5, 4).tolist() == of_one + of_other
    assert calibration_windows([one, other], letters, 1, 4, seed=3).tolist() == load(one, 1, 4, seed=3)
    assert len(calibration_windows([one, other], letters, None, 4)) == 104
    with pytest.raises(ValueError, match="the text holds 260 tokens; 128 samples of 2048 tokens"):
        calibration_windows(string.ascii_lowercase * 10, letters)
    with pytest.raises(ValueError, match=r"the text 'notes.txt' \(there is no file of that name\) holds 8 tokens"):
        calibration_windows("notes.txt", letters)
    with pytest.raises(FileNotFoundError, match="there is no calibration file nothing"):
        calibration_windows([Path("nothing")], letters)
    for words in ("short text", "long " * 100):
        with pytest.raises(FileNotFoundError, match=rf"no calibration file {words[:9]}.*; join several texts"):
            calibration_windows([words, words], letters)
    for numbers in ((1.5, 4), ("3", 4), (3, 4.0)):
        with pytest.raises(TypeError, match="both must be whole numbers"):
            calibration_windows(one, letters, *numbers)
    with pytest.raises(ValueError, match="seed=18446744073709551616 has more than the 64 bits"):
        calibration_windows(one, letters, 3, 4, seed=1 << 64)
    with pytest.raises(TypeError, match=r"seed must be an int, not 0\.5"):
        calibration_windows(one.read_text(), letters, 3, 4, seed=0.5)  # type: ignore[arg-type]
    assert calibration_windows(one, letters, np.int64(3), np.int64(4)).tolist() == of_one  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples=0 of sequence_length=4"):
        calibration_windows(one, letters, 0, 4)


IDS = [[1, 2, 3], [4, 5, 6]]
ROWS: Any = [{"input_ids": torch.tensor(row)} for row in IDS]
PADDED = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (torch.tensor(IDS), IDS),
        (torch.tensor(IDS, dtype=torch.int32), IDS),
        (np.array(IDS), IDS),
        (IDS, IDS),
        (IDS[0], [IDS[0]]),
        (map(tuple, IDS), IDS),
        ({"input_ids": IDS}, IDS),
        (BatchEncoding({"input_ids": IDS, "attention_mask": [[1] * 3] * 2}), IDS),
        ([torch.tensor(row) for row in IDS], IDS),
        ([{"input_ids": torch.tensor([row])} for row in IDS], IDS),
        (DataLoader(ROWS, batch_size=2), IDS),
        (PADDED, [[1, 2, 3]]),
        ({**PADDED, "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}, [[1, 2, 3]]),
        ({**PADDED, "attention_mask": PADDED["attention_mask"].bool()}, [[1, 2, 3]]),
        ([[1], [2, 3], [4, 5, 6, 7], [8, 9, 10]], [[1, 2, 3, 4], [5, 6, 7, 8]]),
    ],
)
def test_forms_of_samples(samples: Any, expected: list[list[int]]) -> None:
    found = as_windows(samples)
    assert found.dtype is torch.int64
    assert found.tolist() == expected


def test_one_line_of_tokens() -> None:
    assert as_line(torch.tensor(IDS)).tolist() == as_line(IDS).tolist() == [1, 2, 3, 4, 5, 6]
    assert as_line([PADDED, [9]]).tolist() == [1, 2, 3, 4, 5, 9]
    with pytest.raises(TypeError, match=r"samples are text: 'some text'; distprune.calibration_windows"):
        as_line("some text")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_large_file_is_drawn_from_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Windows begin with a word, or a document; most of the file is not read."""
    path = tmp_path / f"text{suffix}"
    words = [
        f"{letter}\N{LATIN SMALL LETTER E WITH ACUTE}{letter}" * 5
        for letter in string.ascii_lowercase
        for _ in range(20)
    ]
    lines = [json.dumps(word, ensure_ascii=False) for word in words] if suffix == ".jsonl" else words
    path.write_text("\n".join(lines))
    monkeypatch.setattr(text, "_WHOLE", 100)
    num_read = 0

    class Spy(Letters):
        @override
        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            nonlocal num_read
            num_read += len(text)
            letters = "".join(c for c in text if c in string.ascii_lowercase)
            return super().__call__(letters, add_special_tokens=add_special_tokens)

    rows = load(path, 4, 10, Spy())
    assert all(len(set(row[:10])) == 1 for row in rows)  # one word
    assert all(0 <= row[0] - 26 / 4 * i + 0.5 <= 26 / 8 + 1 for i, row in enumerate(rows))  # of each quarter
    assert num_read < path.stat().st_size / 4
    assert rows == load(path, 4, 10, Spy())
    assert rows != load(path, 4, 10, Spy(), seed=1)
    assert len(load(path, None, 10, Spy())) >= 20 * 26


def test_a_large_text_without_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows begin with a character; a line of JSON that does not end is not read to its end."""
    path = tmp_path / "text.txt"
    character = "\N{CJK UNIFIED IDEOGRAPH-6587}"  # three bytes
    path.write_text(character * 200_000, encoding="utf-8")
    monkeypatch.setattr(text, "_WHOLE", 100)
    monkeypatch.setattr(text, "_LONGEST_LINE", 100)

    class Characters(Letters):
        @override
        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [int(c == character) for c in text]}

    assert load(path, 6, 10, Characters()) == [[1] * 10] * 6
    lines = path.rename(tmp_path / "text.jsonl")
    with pytest.raises(ValueError, match=r"the line that holds byte \d+ is longer than 100 bytes"):
        load(lines, 6, 10, Characters())


class Numbers(Letters):
    """A tokenizer of numbers, each of which is a token."""

    @override
    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word.strip(MARKS)) for word in text.split() if word.strip(MARKS)]}


MARKS = '"\N{LATIN SMALL LETTER E WITH ACUTE}'  # of words in JSON: they are escaped, or take two bytes


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[str], list[int], int, int]:
    """Return lines of JSON, of few words or many, their tokens, and how many windows of how many tokens to draw."""
    lines: list[str] = []
    tokens: list[int] = []
    is_ascii, mark, before = draw(st.booleans()), draw(st.sampled_from(["", *MARKS])), draw(st.integers(0, 60))
    for num_words in draw(st.lists(st.integers(1, 20) | st.integers(100, 900), min_size=1, max_size=12)):
        words = range(1000 + len(tokens), 1000 + len(tokens) + num_words)
        entry = {"source": "s" * before, "text": "\n".join(f"{mark}{word}" for word in words)}
        lines += [json.dumps(entry, ensure_ascii=is_ascii), *[""] * draw(st.integers(0, 2))]
        tokens += [*words, 26]
    length = draw(st.integers(1, 8))
    num_windows = draw(st.integers(1, max(len(tokens) // (4 * length), 1)))
    return lines, tokens, num_windows, length


@given(documents(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_of_documents_of_any_length_differ(
    tmp_path: Path, drawn: tuple[list[str], list[int], int, int], seed: int
) -> None:
    """A window is of one place of the text, whether there are many documents or one, and no two are of the same."""
    lines, tokens, num_windows, length = drawn
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    assume(len(tokens) >= length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_WHOLE", 0)
        patch.setattr(text, "_CHARACTERS_PER_TOKEN", 1)
        rows = calibration_windows(path, Numbers(), num_windows, length, seed).tolist()
    there = [tokens[i : i + length] for i in range(len(tokens) - length + 1)]
    assert all(row in there for row in rows)
    assert len({tuple(row) for row in rows}) == num_windows


def test_long_documents_give_windows_from_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two documents one is nine tenths of the file, and of the windows; each begins at another place of it."""
    path = tmp_path / "text.jsonl"
    texts = [" ".join(map(str, range(1000, 1900))), " ".join(map(str, range(1900, 2000)))]
    path.write_text("\n".join(map(json.dumps, texts)))
    monkeypatch.setattr(text, "_WHOLE", 0)
    monkeypatch.setattr(text, "_CHARACTERS_PER_TOKEN", 1)
    firsts = calibration_windows(path, Numbers(), 40, 10)[:, 0].tolist()
    assert firsts == sorted(firsts)
    assert all(25 * i - 1 <= first - 1000 <= 25 * (i + 1) for i, first in enumerate(firsts))


def test_json_lines_end_with_the_end_token(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "ab", "other": 1}\n\n"cd"\n')
    assert load(path, 2, 3) == [[0, 1, 26], [2, 3, 26]]
    no_end = Letters()
    no_end.eos_token_id = None
    assert load(path, 2, 2, no_end) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["text.txt", "text.JSONL", "text.Json"])
@pytest.mark.parametrize("by_position", [False, True])
def test_marks_and_names_of_other_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_position: bool
) -> None:
    """A byte order mark is no text, suffixes are of any case, and half a character is a token like any other."""
    monkeypatch.setattr(text, "_WHOLE", 0 if by_position else 1000)
    monkeypatch.setattr(text, "_CHARACTERS_PER_TOKEN", 1)
    half, path = "a\ud83db" * 10, tmp_path / name

    class Bytes(Letters):
        @override
        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [*text.encode()]}

    lines = ["a?b" * 10] if name == "text.txt" else [json.dumps({"text": half})]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    assert load(path, 1, 12, Bytes()) == [[*b"a?ba?ba?ba?b"]]
    assert calibration_windows(half, Bytes(), 1, 12).tolist() == [[*b"a?ba?ba?ba?b"]]


def test_bad_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(FileNotFoundError, match="no calibration file"):
        load(path, 1, 1)
    path.write_text("abcdefg")
    with pytest.raises(
        ValueError, match=r"holds 7 tokens; 2 samples of 4 tokens need 8: give more text, or ask for at most 1 samples"
    ):
        load(path, 2, 4)
    path.write_text("")
    with pytest.raises(ValueError, match="holds 0 tokens; 1 samples of 4 tokens need 4"):
        load(path, 1, 4)
    with pytest.raises(ValueError, match="one sample of one token is the least"):
        load(path, 1, 0)
    path.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load(path, 1, 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"txt": "a"}', 'line 2 holds no text: an object with "text"'),
        ("[1]", "line 2 holds no text"),
        ('{"text": 3}', "line 2 holds no text"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps("ab") + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        load(path, 1, 8)


def test_does_not_fit_the_model() -> None:
    for vocabulary in (5, 7):
        with pytest.raises(ValueError, match=f"id 7 is outside the model's vocabulary of {vocabulary}; is the"):
            check_fit(torch.arange(8).view(2, 4), make_model(vocabulary))
    seeing = LlavaConfig(text_config={"model_type": "llama", "vocab_size": 7})
    with pytest.raises(ValueError, match="id 7 is outside the model's vocabulary of 7"):
        check_fit(torch.arange(8).view(2, 4), SimpleNamespace(config=seeing))
    check_fit(torch.arange(8).view(2, 4), make_model(8))
    with pytest.raises(ValueError, match="sequences of 8 tokens are longer than the model's 6 positions"):
        check_fit(torch.arange(8)[None], make_model(positions=6))
    check_fit(torch.arange(6)[None], make_model(positions=6))


def test_how_many_tokens_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    assert tokens_together(model, None) == tokens_together(model, 8192)
    model.config.hidden_size = 4096  # type: ignore[union-attr]
    assert (tokens_together(model, None), tokens_together(model, 7)) == (512, 7)
    model.config.vocab_size = 1 << 18  # type: ignore[union-attr]
    assert [tokens_together(model, None, num) for num in (0, 1, 4)] == [512, 512, 256]
    monkeypatch.setattr("distprune.calibration.data.device_of", lambda _: torch.device("cuda"))
    there = make_model()
    assert tokens_together(there, None) == 8192
    for width, num in ((64, 65536), (2048, 16384), (8192, 8192)):
        there.config.hidden_size = width  # type: ignore[union-attr]
        assert tokens_together(there, None) == num
    there.config.vocab_size = 1 << 17  # type: ignore[union-attr]
    assert [tokens_together(there, None, num) for num in (1, 4)] == [8192, 2048]
    for bad, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="batch_tokens"):
            tokens_together(model, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_batch_follows_from_the_seed_and_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    path = tmp_path / "text.txt"
    words = [string.ascii_lowercase[i:] + string.ascii_lowercase[:i] for i in range(26)]
    path.write_text(" ".join(words * 8))
    if is_large:
        monkeypatch.setattr(text, "_WHOLE", 100)
    made = [Batches(Letters(), path, batch_size=3, length=5, seed=seed) for seed in (7, 7, 7 + (1 << 32))]
    shown = [[batches[step].tolist() for step in (4, 0, 4)] for batches in made]
    assert shown[0] == shown[1]
    assert shown[0][0] == shown[0][2] != shown[0][1]
    assert shown[2] != shown[0]  # the upper bits of a seed count
    whole = "".join(words * 8)
    seen = {"".join(chr(ord("a") + token) for token in row) for step in range(99) for row in made[0][step].tolist()}
    assert all(window in whole for window in seen)
    assert len(seen) >= 26
    before = made[0].digest()
    assert before == made[1].digest()
    path.write_text(f"{string.ascii_lowercase[::-1]} " * 200)
    assert Batches(Letters(), path, batch_size=3, length=5, seed=7).digest() != before


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
