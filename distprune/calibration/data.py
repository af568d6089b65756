"""Calibration text: tokenized, packed into sequences, and spread over the data-parallel ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.text import draw_windows, draw_windows_of_text
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import Group, communicator


@dataclass(frozen=True)
class Samples:
    """What this rank runs: ``batches[i]`` are the keyword arguments of a forward.

    Every rank has as many. Only the first ``num_counted`` count; a rank that has fewer samples than
    others pads with its last one, run again and not counted, because a sharded forward needs every rank.
    """

    batches: list[dict[str, Any]]
    num_counted: int


def load_samples(
    tokenizer: Any,
    path: str | Path,
    model: nn.Module,
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int = 0,
    group: Group = None,
) -> torch.Tensor:
    """Return ``num_samples`` windows from all over a calibration file, (num_samples, sequence_length) int64.

    A file named ``.jsonl``, ``.ndjson`` or ``.json`` holds one JSON object a line, whose ``text`` counts,
    or one JSON string a line; an end-of-sequence token, where the tokenizer has one, follows each. Any
    other file is one text. The tokens are cut into windows without gaps, of which ``seed`` draws; ``None``: all of
    them. A file that is too large to tokenize whole is drawn from by position: each of ``num_samples`` stretches of
    equal length gives one window, which begins with a word anywhere in a document. So long documents give more windows.

    Every rank reads the file and must find the same tokens: two rounds of 64 bytes.

    Raises:
        FileNotFoundError: on every rank: no such file.
        ValueError: on every rank: it is not UTF-8, a line is not what it should be (or longer than 64 MiB, where it is
            drawn from by position), there is too little text, a sequence is longer than the model has positions for,
            a token id is outside of the model's vocabulary, or the ranks find different tokens.
    """
    comm = communicator(group)
    facts: dict[str, Any] = {"samples": num_samples, "sequence length": sequence_length, "seed": seed}
    with together(comm):
        if (num_samples is not None and num_samples < 1) or sequence_length < 1:
            raise ValueError(f"{num_samples=} of {sequence_length=}: one sample of one token is the least")
        token_ids = draw_windows(tokenizer, Path(path), num_samples, sequence_length, seed)
        check_fit(token_ids, model)
        facts["calibration tokens"] = token_digest(token_ids)
    agree(comm, facts)
    return token_ids


def calibration_windows(
    text_or_files: str | Path | Sequence[str | Path],
    tokenizer: Any,
    samples: int | None = 128,
    sequence_length: int = 2048,
    seed: int = 0,
) -> torch.Tensor:
    """Return windows of token ids, (samples, sequence_length) int64, drawn by ``seed`` from all over text or files.

    >>> windows = calibration_windows("the quick brown fox jumps over the lazy dog", tokenizer, 2, 4)
    >>> windows.shape
    torch.Size([2, 4])

    They are what ``distprune prune --calibration`` draws, for :func:`distprune.prune_blocks` and its like.

    Args:
        text_or_files: a text; a file, of text or of JSON lines (``.jsonl``) with a ``text`` each; or several files,
            which give as many windows each. A ``str`` is a file if there is one of that name, and else a text.
        tokenizer: of transformers.
        samples: how many; ``None``: all there are.

    Local: nothing is communicated, and all ranks that pass the same get the same.

    Raises:
        FileNotFoundError: no such file.
        ValueError: too little text, a file that is not UTF-8, or a line that is not what it should be.
    """
    if (samples is not None and samples < 1) or sequence_length < 1:
        raise ValueError(f"{samples=} of {sequence_length=}: one sample of one token is the least")
    if isinstance(text_or_files, str) and not os.path.isfile(text_or_files):
        return draw_windows_of_text(tokenizer, text_or_files, samples, sequence_length, seed)
    files = [text_or_files] if isinstance(text_or_files, str | Path) else list(text_or_files)
    if not files:
        raise ValueError("there is no file to draw windows from")
    drawn = []
    for number, file in enumerate(files):
        share = None if samples is None else samples // len(files) + (number < samples % len(files))
        if share != 0:
            drawn.append(draw_windows(tokenizer, Path(file), share, sequence_length, seed))
    return torch.cat(drawn)


def token_digest(token_ids: torch.Tensor) -> str:
    """Return what ranks, and a job that goes on, compare ``token_ids`` by. Local."""
    return hashlib.sha256(token_ids.contiguous().numpy(force=True).tobytes()).hexdigest()


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


def own_samples(sample_group: SampleGroup, model: nn.Module, token_ids: torch.Tensor) -> Samples:
    """Return the samples that ``sample group`` runs, on the device of ``model``. Local."""
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    return spread(token_ids, sample_group.number, sample_group.num_groups, device)


def check_fit(token_ids: torch.Tensor, model: nn.Module) -> None:
    """Raise a ValueError if ``model`` has no positions or no embeddings for ``token_ids`` (samples, length). Local."""
    config = getattr(model, "config", None)
    positions, vocabulary = getattr(config, "max_position_embeddings", None), getattr(config, "vocab_size", None)
    length, low, high = token_ids.shape[1], int(token_ids.min()), int(token_ids.max())
    if positions is not None and 0 < positions < length:  # XLNet says -1
        raise ValueError(f"sequences of {length} tokens are longer than the model's {positions} positions")
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        wrong = high if high >= vocabulary else low
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary}; is the tokenizer another model's?"
        )
