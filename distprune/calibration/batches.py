"""Text to train on: every batch follows from the seed and the number of the step alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from distprune.calibration.data import token_digest
from distprune.calibration.text import draw_windows, is_drawn_by_place, open_text, tokens_of


class Batches:
    """Batches of windows from anywhere in a file, which holds text as in :func:`load_samples`. Local.

    A file too large to be tokenized whole gives one window from each of as many stretches of equal length, as in
    :func:`load_samples`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds less than one window, or not text.
    """

    def __init__(self, tokenizer: Any, path: str | Path, *, batch_size: int, length: int, seed: int) -> None:
        self._tokenizer, self._path, self._seed = tokenizer, Path(path), seed
        self._batch_size, self._length = batch_size, length
        self._ids: torch.Tensor | None = None
        with open_text(self._path, "text file") as file:
            if is_drawn_by_place(self._path, batch_size, length):
                return
            self._ids = torch.tensor(tokens_of(tokenizer, self._path, file), dtype=torch.int64, device="cpu")
        if len(self._ids) < length:
            raise ValueError(
                f"{path} holds {len(self._ids)} tokens, less than one window of {length}: give more text, or ask for "
                "shorter windows"
            )

    def __getitem__(self, step: int) -> torch.Tensor:
        """Return the batch of a step, (batch_size, length) int64."""
        seed = _seed_of(self._seed, step)
        if self._ids is None:
            return draw_windows(self._tokenizer, self._path, self._batch_size, self._length, seed)
        starts = torch.randint(
            len(self._ids) - self._length + 1,
            (self._batch_size, 1),
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        return self._ids[starts + torch.arange(self._length, device="cpu")]

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
