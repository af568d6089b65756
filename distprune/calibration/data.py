"""Calibration text: tokenized, packed into sequences, and spread over the data-parallel ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from distprune.collectives import Group, agree, communicator, together

__all__ = ["Samples", "check_fit", "load_samples", "open_text", "spread", "text_tokens"]

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_CHARACTERS_PER_TOKEN = 16  # more than a token has in nearly any text


@dataclass(frozen=True)
class Samples:
    """What this rank runs: ``batches[i]`` are the keyword arguments of a forward.

    Every rank has as many. Only the first ``num_counted`` count; a rank that has fewer samples than
    others runs its last one again to keep them company, because a sharded forward needs every rank.
    """

    batches: list[dict[str, Any]]
    num_counted: int


def load_samples(
    tokenizer: Any,
    path: str | Path,
    model: nn.Module,
    *,
    num_samples: int,
    sequence_length: int,
    group: Group = None,
) -> torch.Tensor:
    """Return the first ``num_samples`` sequences of a calibration file, (num_samples, sequence_length) int64.

    A file named ``.jsonl``, ``.ndjson`` or ``.json`` holds one JSON object a line, whose ``text`` counts,
    or one JSON string a line; an end-of-sequence token, where the tokenizer has one, follows each. Any
    other file is one text. The tokens are cut into sequences without gaps.

    Every rank reads the file and must find the same tokens: two rounds of 64 bytes.

    Raises:
        FileNotFoundError: on every rank: no such file.
        ValueError: on every rank: it is not UTF-8, a line is not what it should be, there is too little
            text, a sequence is longer than the model has positions for, a token id is outside of the
            model's vocabulary, or the ranks find different tokens.
    """
    comm = communicator(group)
    facts: dict[str, Any] = {"samples": num_samples, "sequence length": sequence_length}
    with together(comm):
        if num_samples < 1 or sequence_length < 1:
            raise ValueError(f"{num_samples=} of {sequence_length=}: one sample of one token is the least")
        num_tokens = num_samples * sequence_length
        ids = _token_ids(tokenizer, Path(path), num_tokens)
        if len(ids) < num_tokens:
            raise ValueError(
                f"{path} holds {len(ids)} tokens; {num_samples} samples of {sequence_length} tokens need {num_tokens}: "
                f"give more text, or ask for at most {len(ids) // sequence_length} samples"
            )
        token_ids = torch.tensor(ids[:num_tokens], dtype=torch.int64).view(num_samples, sequence_length)
        check_fit(token_ids, model)
        facts["calibration tokens"] = hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()
    agree(comm, facts)
    return token_ids


def spread(token_ids: torch.Tensor, part: int, num_parts: int, device: torch.device | str = "cpu") -> Samples:
    """Return one part of the samples ``token_ids`` (num_samples, length): ``part``, ``part + num_parts``, ... Local.

    Ranks that need each other to run a sample must ask for the same part. One sample is one batch, so that its
    activations are the same bits on whichever rank it runs.
    """
    num_samples = len(token_ids)
    if num_samples == 0:
        raise ValueError("there is no calibration sample")
    num_rounds = -(-num_samples // num_parts)
    mine = range(part, num_samples, num_parts)
    chosen = [*mine, *[mine[-1] if mine else 0] * (num_rounds - len(mine))]
    batches = [{"input_ids": token_ids[i : i + 1].to(device), "use_cache": False} for i in chosen]
    return Samples(batches, len(mine))


def _token_ids(tokenizer: Any, path: Path, num_tokens: int) -> list[int]:
    with open_text(path, "calibration file") as file:
        if path.suffix not in _JSON_LINES:
            return text_tokens(tokenizer, file, num_tokens)
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        ids: list[int] = []
        for text in _texts(path, file):
            ids += tokenizer(text, add_special_tokens=False)["input_ids"] + end
            if len(ids) >= num_tokens:
                break
        return ids


@contextmanager
def open_text(path: Path, what: str) -> Iterator[TextIO]:
    """Yield the open UTF-8 file ``path``, which errors call ``what``. Local.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the body meets something that is not UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {what} {path}")
    try:
        with path.open(encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def text_tokens(tokenizer: Any, file: TextIO, num_tokens: int) -> list[int]:
    """Return the tokens of as much of a text as has ``num_tokens``, or of all of it. Local."""
    text = ""
    ids: list[int] = []
    # Tokens depend on what follows, so a longer piece is tokenized from the beginning.
    while len(ids) <= num_tokens and (more := file.read(max(_CHARACTERS_PER_TOKEN * num_tokens, len(text)))):
        text += more
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _texts(path: Path, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise ValueError(f'{path}, line {number} holds no text: an object with "text" is called for, or a string')
        yield text


def check_fit(token_ids: torch.Tensor, model: nn.Module) -> None:
    """Raise a ValueError if ``model`` has no positions or no embeddings for ``token_ids`` (samples, length). Local."""
    config = getattr(model, "config", None)
    positions, vocabulary = getattr(config, "max_position_embeddings", None), getattr(config, "vocab_size", None)
    length, low, high = token_ids.shape[1], int(token_ids.min()), int(token_ids.max())
    if positions is not None and length > positions:
        raise ValueError(f"sequences of {length} tokens are longer than the model's {positions} positions")
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        wrong = high if high >= vocabulary else low
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary}; is the tokenizer another model's?"
        )
