"""Digests of bytes, by xxh3 (128 bits): they tell files apart, and find damage, at the speed of memory.

They do not protect against an attacker. What a job was asked for, its structure, ranks compare by :func:`agree`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.optional_packages import import_extra
from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator

NUM_WORDS = 2  # of 64 bits
_READ_BYTES = 8 << 20  # of a file, at a time


def new_digest(content: bytes = b"") -> Any:
    """Return a digest to ``update`` with bytes; how they are cut is no matter. Local.

    Raises:
        ImportError: the extra ``hf`` is not installed.
    """
    return import_extra("xxhash", "hf").xxh3_128(content)


def as_words(digest: Any) -> torch.Tensor:
    """Return a digest as int64, which may be summed over ranks: sums wrap around."""
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)


def digest_together(comm: Communicator, own: Callable[[], torch.Tensor]) -> str:
    """Return the sum over ranks of what ``own`` returns, (NUM_WORDS,), as text. Every rank: one round of 24 bytes.

    Raises:
        Exception: on every rank: what ``own`` raises on one.
    """
    return sum_together(comm, (NUM_WORDS,), lambda words: words.copy_(own())).numpy().tobytes().hex()


def file_digest(comm: Communicator, path: Path) -> str:
    """Return a digest of the file ``path``, of which every rank reads its share. Every rank: one round of 24 bytes.

    The same for any number of ranks.

    Raises:
        OSError: on every rank: it cannot be read.
    """

    def own() -> torch.Tensor:
        words = torch.zeros(NUM_WORDS, dtype=torch.int64, device="cpu")
        with path.open("rb") as file:
            for number in range(comm.rank, -(-path.stat().st_size // _READ_BYTES), comm.size):
                file.seek(number * _READ_BYTES)
                words += as_words(new_digest(f"{number}:".encode() + file.read(_READ_BYTES)))
        return words

    return digest_together(comm, own)
