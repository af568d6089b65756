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

    A file too large to be tokenized whole gives one window from each of as many stretches of equal length.

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
        # Of a seed torch's generator takes 32 bits.
        seed = int.from_bytes(hashlib.sha256(f"{self._seed}:{step}".encode()).digest()[:4])
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
