"""Calibration text: tokenized, packed into sequences, and spread over the data-parallel ranks."""

from __future__ import annotations

import hashlib
import itertools
import math
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
from distprune.shards.device import sent

_BATCH_TOKENS = 8192
_CPU_FEATURES = 1 << 21  # of the hidden states of one batch


@dataclass(frozen=True)
class Samples:
    """What this rank runs: ``batches[i]`` are the keyword arguments of a forward, of the samples ``windows[i]``.

    Every rank has as many, because a sharded forward needs every rank. A batch without windows is padding: one sample
    that is run, and not counted. Padding comes last.
    """

    batches: list[dict[str, Any]]
    windows: list[range]  # the numbers of samples, among those of all ranks


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


def spread(
    token_ids: torch.Tensor, part: int, num_parts: int, batch_tokens: int = 1, device: torch.device | str = "cpu"
) -> Samples:
    """Return one part of the samples ``token_ids`` (num_samples, length): ``part``, ``part + num_parts``, ... Local.

    As many samples run together as make ``batch_tokens`` tokens, or one. Every part has as many batches, and shares its
    samples out evenly. Ranks that need each other to run a sample must ask for the same part.
    """
    num_samples, length = token_ids.shape
    if num_samples == 0:
        raise ValueError("there is no calibration sample")
    own = range(part, num_samples, num_parts)
    most = math.ceil(num_samples / num_parts)  # of one part
    num_batches = math.ceil(most / max(batch_tokens // length, 1))
    bounds = [math.ceil(len(own) * i / num_batches) for i in range(num_batches + 1)]
    windows = [own[start:stop] for start, stop in itertools.pairwise(bounds)]
    run = [list(some) or [own[-1] if own else 0] for some in windows]
    batches = [{"input_ids": sent(token_ids[some], torch.device(device)), "use_cache": False} for some in run]
    return Samples(batches, windows)


def own_samples(
    sample_group: SampleGroup, model: nn.Module, token_ids: torch.Tensor, batch_tokens: int | None = None
) -> Samples:
    """Return the samples that ``sample group`` runs, on the device of ``model``. Local."""
    num_tokens = tokens_together(model, batch_tokens)
    return spread(token_ids, sample_group.number, sample_group.num_groups, num_tokens, device_of(model))


def device_of(module: nn.Module) -> torch.device:
    """Return where ``module`` runs: the device of its first parameter, the CPU where it has none. Local."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def tokens_together(model: nn.Module, batch_tokens: int | None) -> int:
    """Return how many tokens run in one forward of ``model``: ``batch_tokens``, or by default what it is fast with.

    That are 8,192, which fill a device; on the CPU as many as have 2 million features, which its cache holds. Local.

    Raises:
        TypeError, ValueError: ``batch_tokens`` is no number of tokens.
    """
    if batch_tokens is None:
        width = getattr(getattr(model, "config", None), "hidden_size", None) or 1
        return _BATCH_TOKENS if device_of(model).type != "cpu" else min(_BATCH_TOKENS, _CPU_FEATURES // width)
    if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int):
        raise TypeError(f"batch_tokens must be a number of tokens, not {batch_tokens!r}")
    if batch_tokens < 1:
        raise ValueError(f"{batch_tokens=} must be at least 1; a window is run alone where it has more tokens")
    return batch_tokens


def check_fit(token_ids: torch.Tensor, model: nn.Module, length: int | None = None) -> None:
    """Raise a ValueError if ``model`` has no positions or no embeddings for ``token_ids`` (samples, length). Local.

    They may also be in one line, of which so many make the longest sequence.
    """
    config = getattr(model, "config", None)
    positions, vocabulary = getattr(config, "max_position_embeddings", None), getattr(config, "vocab_size", None)
    length = token_ids.shape[1] if length is None else length
    low, high = int(token_ids.min()), int(token_ids.max())
    if positions is not None and 0 < positions < length:  # XLNet says -1
        raise ValueError(f"sequences of {length} tokens are longer than the model's {positions} positions")
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        wrong = high if high >= vocabulary else low
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary}; is the tokenizer another model's?"
        )
