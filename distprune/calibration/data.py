"""Text to calibrate on and to train on, tokenized and packed into sequences; and how many of these run together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.calibration.text import (
    TextFile,
    behind,
    draw_windows_of_text,
    first_token,
    is_drawn_by_place,
    open_text,
    tokens_of,
)
from distprune.models.decoder_blocks import text_config

# That run together: the least and the most tokens, how many features their hidden states have, and logits in memory.
_ON_HOST, _ON_DEVICE = (1, 8192, 1 << 21, 1 << 28), (8192, 65536, 1 << 25, 1 << 30)


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
        text_or_files: a text; a file; or several files, which give as many windows each. A ``str`` is a file if there
            is one of that name, and else a text. A file named ``.jsonl``, ``.ndjson`` or ``.json`` holds one JSON
            object a line, whose ``text`` counts, or one JSON string a line; an end-of-sequence token, where the
            tokenizer has one, follows each. Any other file is one text.
        tokenizer: of transformers. Where it begins texts with a token (Llama's and Gemma's do), each window begins so.
        samples: how many of the windows without gaps that the tokens are cut into; ``None``: all of them. A file that
            is too large to tokenize whole is drawn from by position: each of as many stretches of equal length gives
            one window, which begins with a word anywhere in a document. So long documents give more windows.

    Local: nothing is communicated, and all ranks that pass the same get the same.

    Raises:
        FileNotFoundError: no such file.
        TypeError: numbers that are none.
        ValueError: too little text, a file that is not UTF-8, or a line that is not what it should be, or longer than
            64 MiB where it is drawn from by position; a seed of more than 64 bits.
    """
    if not isinstance(samples, Integral | None) or not isinstance(sequence_length, Integral):
        raise TypeError(f"{samples=} of {sequence_length=}: both must be whole numbers")
    if (samples is not None and samples < 1) or sequence_length < 1:
        raise ValueError(f"{samples=} of {sequence_length=}: one sample of one token is the least")
    if isinstance(text_or_files, str) and not os.path.isfile(text_or_files):
        return draw_windows_of_text(tokenizer, text_or_files, samples, sequence_length, seed)
    files = [text_or_files] if isinstance(text_or_files, str | Path) else list(text_or_files)
    if not files:
        raise ValueError("there is no file to draw windows from")
    if missing := [file for file in files if isinstance(file, str) and not os.path.exists(file)]:
        raise FileNotFoundError(f"there is no calibration file {missing[0][:200]}; join several texts into one")
    drawn = []
    for number, file in enumerate(files):
        share = None if samples is None else samples // len(files) + (number < samples % len(files))
        if share != 0:
            drawn.append(TextFile(tokenizer, Path(file)).draw(share, sequence_length, seed))
    return torch.cat(drawn)


def token_digest(token_ids: torch.Tensor) -> str:
    """Return what ranks, and a job that goes on, compare ``token_ids`` by. Local."""
    return hashlib.sha256(token_ids.contiguous().numpy(force=True).tobytes()).hexdigest()


def device_of(module: nn.Module) -> torch.device:
    """Return where ``module`` runs: the device of its first parameter, the CPU where it has none. Local."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def tokens_together(model: nn.Module, batch_tokens: int | None, num_copies: int = 0) -> int:
    """Return how many tokens run in one forward of ``model``: ``batch_tokens``, or by default what it is fast with.

    That are as many as have 32 million features, of 8,192 to 65,536, which fill a device; on the CPU as many as have 2
    million, which its cache holds, and 8,192 at most; so, too, if ``model`` is only planned for. ``num_copies``: of
    their logits, which must fit into memory. Local.

    Raises:
        TypeError, ValueError: ``batch_tokens`` is no number of tokens.
    """
    if batch_tokens is None:
        config = text_config(model)
        least, most, features, logits = _ON_HOST if device_of(model).type in ("cpu", "meta") else _ON_DEVICE
        width = getattr(config, "hidden_size", None) or features // 8192
        fitting = logits // ((getattr(config, "vocab_size", None) or 1) * num_copies) if num_copies else most
        return max(1, min(max(least, features // width), most, fitting))
    if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int):
        raise TypeError(f"batch_tokens must be a number of tokens, not {batch_tokens!r}")
    if batch_tokens < 1:
        raise ValueError(f"{batch_tokens=} must be at least 1; a window is run alone where it has more tokens")
    return batch_tokens


def check_fit(
    token_ids: torch.Tensor, model: Any, length: int | None = None, asked: str = "sequence_length (--sequence-length)"
) -> None:
    """Raise a ValueError if ``model`` has no positions or no embeddings for ``token_ids`` (samples, length). Local.

    The ``config`` of its text says so. They may also be in one line, of which so many make the longest sequence;
    ``asked`` is what asks for that length.
    """
    config = text_config(model)
    positions, vocabulary = getattr(config, "max_position_embeddings", None), getattr(config, "vocab_size", None)
    length = token_ids.shape[1] if length is None else length
    low, high = int(token_ids.min()), int(token_ids.max())
    if positions is not None and 0 < positions < length:  # XLNet says -1
        raise ValueError(
            f"sequences of {length} tokens are longer than the model's {positions} positions; lower {asked}"
        )
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        wrong = high if high >= vocabulary else low
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary}; is the tokenizer another model's?"
        )


class Batches:
    """Batches of windows from anywhere in a file, which holds text as in :func:`calibration_windows`. Local.

    A file too large to be tokenized whole gives one window from each of as many stretches of equal length, as there.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds less than one window, or not text.
    """

    def __init__(self, tokenizer: Any, path: str | Path, *, batch_size: int, length: int, seed: int) -> None:
        self._tokenizer, self._path, self._seed = tokenizer, Path(path), seed
        self._batch_size, self._length, self._first = batch_size, length, first_token(tokenizer, length)
        self._ids: torch.Tensor | None = None
        with open_text(self._path, "text file") as file:
            if is_drawn_by_place(self._path, batch_size, length):
                return
            self._ids = torch.tensor(tokens_of(tokenizer, self._path, file), dtype=torch.int64, device="cpu")
        if len(self._first) + len(self._ids) < length:
            raise ValueError(
                f"{path} holds {len(self._ids)} tokens, less than one window of {length}: give more text, or ask for "
                "shorter windows"
            )

    def __getitem__(self, step: int) -> torch.Tensor:
        """Return the batch of a step, (batch_size, length) int64."""
        seed = _seed_of(self._seed, step)
        if self._ids is None:
            return TextFile(self._tokenizer, self._path).draw(self._batch_size, self._length, seed)
        length = self._length - len(self._first)
        starts = torch.randint(
            len(self._ids) - length + 1,
            (self._batch_size, 1),
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        return behind(self._first, self._ids[starts + torch.arange(length, device="cpu")])

    def digest(self) -> str:
        """Return a digest of the tokens; of a file that is drawn from by place, of its size and the first batch."""
        seen = self[0] if self._ids is None else self._ids
        return f"{self._path.stat().st_size} bytes, {token_digest(seen)}"


class WindowBatches:
    """Batches of ``windows`` (n, length) that are there: each once, in an order of the seed, before any comes again.

    Local.
    """

    def __init__(self, windows: torch.Tensor, *, batch_size: int, seed: int) -> None:
        self._windows, self._batch_size, self._seed = windows, batch_size, seed

    def __getitem__(self, step: int) -> torch.Tensor:
        """Return the batch of a step, (batch_size, length) int64."""
        num = len(self._windows)
        places = range(step * self._batch_size, (step + 1) * self._batch_size)
        orders = {turn: self._order(turn) for turn in {place // num for place in places}}
        return self._windows[[orders[place // num][place % num] for place in places]]

    def _order(self, turn: int) -> list[int]:
        generator = torch.Generator().manual_seed(_seed_of(self._seed, turn))
        order: list[int] = torch.randperm(len(self._windows), generator=generator, device="cpu").tolist()
        return order


def _seed_of(seed: int, number: int) -> int:
    """Return a seed for what has a ``number``: of 32 bits, which torch's generator takes. Local."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4])
