"""Ranks agree, or all of them raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from distprune.collectives.base import Communicator

__all__ = ["agree", "same_everywhere", "together"]

# An error crosses ranks as its type's name and text, and is raised there as the same built-in type.
_CARRIED: tuple[type[Exception], ...] = (
    NotImplementedError,
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    IndexError,
    OSError,
    RuntimeError,
)
_NUM_DIGEST_WORDS = 4


def agree(comm: Communicator, facts: Mapping[str, Any], error: Exception | None = None) -> None:
    """Return if every rank passed the same ``facts`` and no ``error``; otherwise raise on every rank.

    All ranks must call it. One round of 72 bytes when all is well; two more, to find out what is
    wrong, when not. ``facts`` holds what JSON carries; its values are compared one by one, so the
    message names what differs and on which ranks. An ``error`` is raised again where it arose and, as
    the same built-in type naming the rank, everywhere else.
    """
    all_same, any_failed = same_everywhere(comm, facts, failed=error is not None)
    if all_same and not any_failed:
        return
    if any_failed:
        carried = None if error is None else [_carried_type(error).__name__, str(error)]
        _raise_first_error(comm, comm.gather(carried), error)
    _raise_difference(comm.gather({key: _short(value) for key, value in facts.items()}))


def same_everywhere(comm: Communicator, value: Any, *, failed: bool = False) -> tuple[bool, bool]:
    """Return whether all ranks passed the same ``value``, and whether any passed ``failed``.

    All ranks must call it; one round of 72 bytes, whatever the value's size.
    """
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") >> 1 for i in range(_NUM_DIGEST_WORDS)]
    # max(w) == -max(-w) on every word says that all ranks hold the same w.
    any_failed, *rest = comm.max(torch.tensor([int(failed), *words, *(-word for word in words)])).tolist()
    high, low = rest[:_NUM_DIGEST_WORDS], rest[_NUM_DIGEST_WORDS:]
    return high == [-word for word in low], bool(any_failed)


@contextmanager
def together(comm: Communicator, **facts: Any) -> Iterator[None]:
    """Run the body on every rank; if it raises on one, raise on all (one round, 72 bytes).

    The body must not communicate: a rank that fails inside it would leave the others waiting there.
    ``facts`` are agreed on in the same round.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(comm, {} if error else facts, error)


def _carried_type(error: Exception) -> type[Exception]:
    return next((kind for kind in _CARRIED if isinstance(error, kind)), RuntimeError)


def _raise_first_error(comm: Communicator, carried: list[list[str] | None], own: Exception | None) -> None:
    if own is not None:
        raise own
    source, (name, text) = next((rank, entry) for rank, entry in enumerate(carried) if entry is not None)
    kind = next(kind for kind in _CARRIED if kind.__name__ == name)
    raise kind(f"rank {source} of {comm.size}: {text}")


def _short(value: Any) -> Any:
    """Long facts travel as their digest; a few words travel as they are, to be shown."""
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= 200 else f"(sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _raise_difference(gathered: list[dict[str, Any]]) -> None:
    missing = object()
    lines = []
    for key in sorted({key for facts in gathered for key in facts}):
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(gathered):
            value = facts.get(key, missing)
            shown = "(not given)" if value is missing else json.dumps(value, sort_keys=True)
            by_value.setdefault(shown, []).append(rank)
        if len(by_value) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            lines.append(f"{key}: {shown}")
    raise ValueError("ranks were called with different arguments: " + " | ".join(lines))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
