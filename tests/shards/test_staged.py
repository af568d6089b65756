"""What travels through two buffers arrives whole, however late the copies are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from distprune.shards import staged
from distprune.shards.staged import fetch_in_turn, send_in_turn
from tests.device_path import as_on_a_device

NUM = 7


class Late:
    """A copy that is made when it is waited for, or when the device has done all there is to do."""

    all: ClassVar[list[Late]] = []

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source, self._is_done = target, source, False
        Late.all.append(self)

    def synchronize(self) -> None:
        if not self._is_done:
            self._target.copy_(self._source)
        self._is_done = True


@pytest.fixture
def _late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(staged, "_begin_copy", Late)
    monkeypatch.setattr(staged, "_pinned", lambda size: torch.full((size,), 99, dtype=torch.uint8))
    Late.all.clear()
    with as_on_a_device():
        yield


def pieces() -> list[torch.Tensor]:
    """Return some of different sizes, dtypes and strides; one is empty."""
    made = [torch.arange(3.0 * i).view(3, i).t() + 10 * i for i in range(NUM)]
    return [*made, torch.arange(9, dtype=torch.bfloat16), torch.ones((), dtype=torch.int64)]


@pytest.mark.usefixtures("_late_copies")
def test_what_is_sent_arrives() -> None:
    targets = [torch.zeros_like(of) for of in pieces()]
    send_in_turn(zip(targets, pieces(), strict=True))
    for copy in Late.all:
        copy.synchronize()
    assert len(Late.all) == len(targets)
    assert all(torch.equal(one, other) for one, other in zip(targets, pieces(), strict=True))


@pytest.mark.usefixtures("_late_copies")
def test_what_is_fetched_arrives_while_the_next_is_on_its_way() -> None:
    asked = 0

    def asking() -> Iterator[torch.Tensor]:
        nonlocal asked
        for asked, piece in enumerate(pieces(), 1):  # noqa: B007
            yield piece

    fetched = fetch_in_turn(asking())
    for i, (piece, wanted) in enumerate(zip(fetched, pieces(), strict=True)):
        assert torch.equal(piece, wanted)
        assert asked == min(i + 2, len(pieces()))


def test_nothing_is_copied_aside_on_the_host() -> None:
    whole = pieces()
    assert all(piece is of for piece, of in zip(fetch_in_turn(whole), whole, strict=True))
