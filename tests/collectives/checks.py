"""What every communicator does, checked on all its ranks."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch

from distprune.collectives.agree import (
    agree,
    max_together,
    same_everywhere,
    sum_together,
    swap_known,
    swap_unknown,
    together,
    told_by_all,
)
from distprune.collectives.base import Communicator, Traffic
from distprune.collectives.guarded import guarding
from distprune.collectives.roster import Member, roster_of_all, roster_of_one
from distprune.collectives.slow import work_together
from distprune.mistakes import is_expected, was_told

__all__ = ["check_all"]


def check_all(comm: Communicator) -> None:
    """Run every check; all ranks of ``comm`` must call it."""
    _check_reductions(comm)
    _check_objects(comm)
    _check_counts(comm)
    _check_agreement(comm)
    _check_together(comm)
    _check_reduced_together(comm)
    _check_swapped_together(comm)
    _check_work_together(comm)
    _check_panics(comm)
    _check_roster(comm)


def _check_reductions(comm: Communicator) -> None:
    big = 1 << 60
    values = torch.tensor([[comm.rank, 1], [-comm.rank, big]])
    total = comm.size * (comm.size - 1) // 2
    wrapped = (big * comm.size + (1 << 63)) % (1 << 64) - (1 << 63)
    assert comm.sum(values).tolist() == [[total, comm.size], [-total, wrapped]]
    assert comm.sum(torch.tensor([0.5], dtype=torch.float64)).tolist() == [comm.size / 2]
    assert comm.sum(torch.empty(0, dtype=torch.int64)).tolist() == []
    assert values.tolist() == [[comm.rank, 1], [-comm.rank, big]]
    comm.reduce_(values, "max")
    assert values.tolist() == [[comm.size - 1, 1], [0, big]]
    for rank in (None, *range(comm.size)):
        summed, before = torch.tensor([0.5, comm.rank], dtype=torch.float64), comm.traffic.copy()
        comm.reduce_(summed, "sum", rank)
        if rank in (None, comm.rank):
            assert summed.tolist() == [comm.size / 2, total]
        assert comm.traffic - before == Traffic(1, 16)
    comm.reduce_(torch.empty(0, dtype=torch.float64), "max", comm.size - 1)
    with pytest.raises(TypeError, match="int64 or float64"):
        comm.sum(torch.tensor([1.0]))


def _check_objects(comm: Communicator) -> None:
    for source in range(comm.size):
        assert comm.broadcast({"from": comm.rank, "text": "é" * comm.rank}, source) == {
            "from": source,
            "text": "é" * source,
        }
    # Texts of different lengths, an empty one among them.
    assert comm.gather(list(range(comm.rank))) == [list(range(rank)) for rank in range(comm.size)]


def _check_counts(comm: Communicator) -> None:
    assert _counted(comm, lambda: comm.sum(torch.zeros(10, dtype=torch.int64)))[1] == (1, 80)
    assert _counted(comm, lambda: comm.gather("abc"))[1] == (2, 8 + 5 * comm.size)


def _check_agreement(comm: Communicator) -> None:
    assert _counted(comm, lambda: agree(comm, {"amount": 0.5, "names": ["a"] * 1000}))[1] == (1, 64)
    if comm.size > 1:
        with pytest.raises(ValueError, match="different arguments") as caught:
            agree(comm, {"amount": 0.5 if comm.rank else 0.25, "method": "magnitude"})
        assert "amount: 0.25 on rank 0; 0.5 on rank" in str(caught.value)
        assert "method" not in str(caught.value)
    assert same_everywhere(comm, "alike", 5 + comm.rank) == (True, 5)  # what the first rank drew
    assert same_everywhere(comm, comm.rank)[0] == (comm.size == 1)
    halves = [*range(-(-comm.size // 2))]
    for value, wanted in (("alike", ["alike"]), (comm.rank // 2, halves)):
        told, (num_rounds, _) = _counted(comm, partial(told_by_all, comm, partial(str, value)))
        assert [text for _, text in told] == [*map(str, wanted)]
        assert num_rounds == (1 if len(wanted) == 1 else 3)


def _check_together(comm: Communicator) -> None:
    kinds = (FileNotFoundError, ValueError, NotImplementedError, ImportError, KeyError)
    for kind in kinds:
        carried = RuntimeError if kind is KeyError and comm.rank != comm.size - 1 else kind
        with pytest.raises(carried, match="no such thing") as caught:
            _fail_on_last(comm, kind)
        assert not is_expected(caught.value)  # no check of the library raised it
        assert was_told(caught.value) == (comm.rank != comm.size - 1)
        shown = "".join(traceback.format_exception(caught.value))
        assert 'raise kind("no such thing")' in shown  # on the other ranks, too
    with together(comm):
        pass  # the ranks are still in step


def _check_reduced_together(comm: Communicator) -> None:
    largest = comm.size - 1

    def fill(words: torch.Tensor) -> None:
        assert not words.any()
        words += comm.rank

    def failing(fails: bool, first: float, reduce: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
        reduce(comm, (3,), lambda words: _fail(fails, words.fill_(first)), dtype)

    for reduce, wanted in ((sum_together, comm.size * largest // 2), (max_together, largest)):
        for dtype, first in ((torch.int64, 7), (torch.float64, float("nan"))):
            found, used = _counted(comm, partial(reduce, comm, (2, 3), fill, dtype))
            assert found.tolist() == [[wanted] * 3] * 2
            assert found.dtype == dtype
            assert used == (1, 56)
            assert reduce(comm, (), torch.Tensor.zero_, dtype).shape == ()
            assert reduce(comm, (0, 2), torch.Tensor.zero_, dtype).shape == (0, 2)
            # What was written before the error is no answer for anybody.
            _check_errors(comm, partial(failing, first=first, reduce=reduce, dtype=dtype), num_bytes=32)
    assert int(max_together(comm, (1,), lambda words: words.fill_(-5))) == -5


def _check_swapped_together(comm: Communicator) -> None:
    """Rank r hands r + s bytes of value r to rank s, none to itself."""
    sizes = [(comm.rank + other) * (comm.rank != other) for other in range(comm.size)]

    def swap(fails: bool = False, known: bool = False, extra: int = 0) -> list[torch.Tensor]:
        def make() -> dict[int, torch.Tensor]:
            _fail(fails)
            return {to: torch.full((size + extra,), comm.rank, dtype=torch.uint8) for to, size in enumerate(sizes)}

        return swap_known(comm, make, (sizes, sizes)) if known else swap_unknown(comm, make)

    for known in (False, True):
        received, used = _counted(comm, partial(swap, known=known))
        assert [piece.tolist() for piece in received] == [[other] * size for other, size in enumerate(sizes)]
        assert used == (2 - known, 8 * comm.size + sum(sizes))
        _check_errors(comm, partial(swap, known=known), num_bytes=8 * comm.size + known * sum(sizes))
    nothing = swap_unknown(comm, dict)
    assert [piece.numel() for piece in nothing] == [0] * comm.size
    with pytest.raises(ValueError, match="were announced") as caught:
        swap(known=True, extra=int(comm.rank == comm.size - 1))
    assert is_expected(caught.value)
    assert not was_told(caught.value)


def _check_work_together(comm: Communicator) -> None:
    done = []
    work_together(comm, lambda: done.append(comm.rank))
    assert done == [comm.rank]
    with pytest.raises(MemoryError, match="none is left"):
        work_together(comm, lambda: _fail(comm.rank == comm.size - 1))


class _PanicException(BaseException):
    """As extensions in Rust raise it."""


def _check_panics(comm: Communicator) -> None:
    """They are raised on all ranks, as RuntimeErrors, whatever the rank was at; by a lone process as they are."""

    def panic(*_: object) -> dict[int, torch.Tensor]:
        if comm.rank == comm.size - 1:
            raise _PanicException("at the disco")
        return {}

    def within(context: AbstractContextManager[object]) -> None:
        with context:
            panic()

    nothing = [0] * comm.size
    for call in (
        partial(sum_together, comm, (1,), panic),
        partial(swap_unknown, comm, panic),
        partial(swap_known, comm, panic, (nothing, nothing)),
        partial(work_together, comm, panic),
        lambda: within(together(comm)),
        lambda: within(guarding(comm)),
    ):
        with pytest.raises(_PanicException if comm.size == 1 else RuntimeError, match="at the disco"):
            call()


def _fail(fails: bool, *_: object) -> None:
    if fails:
        raise MemoryError("none is left")


def _counted(comm: Communicator, call: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    before = comm.traffic.copy()
    found = call()
    used = comm.traffic - before
    return found, (used.num_rounds, used.num_bytes)


def _check_errors(comm: Communicator, call: Callable[[bool], object], num_bytes: int) -> None:
    """Let ``call(fails)`` fail on one, two and all ranks: those raise their own error, the others the first's."""
    length = len(json.dumps(["MemoryError", "none is left", ""]))  # and a traceback
    for failing in ({comm.size - 1}, {0, comm.size - 1}, set(range(comm.size))):
        with pytest.raises(MemoryError) as caught:
            call(comm.rank in failing)
        elsewhere = f"rank {min(failing)} of {comm.size}: none is left"
        assert str(caught.value) == ("none is left" if comm.rank in failing else elsewhere)
        _, used = _counted(comm, partial(_raises, call, comm.rank in failing))
        assert used[0] == 3
        assert num_bytes + 8 + length * comm.size < used[1] < num_bytes + 8 + (length + 8000) * comm.size


def _raises(call: Callable[[bool], object], fails: bool) -> None:
    with pytest.raises(MemoryError):
        call(fails)


def _check_roster(comm: Communicator) -> None:
    one = [Member("b", (2, 3), "torch.float32"), Member("a", (4,), "torch.float32")]
    roster = roster_of_all(comm, one)
    assert roster_of_one(comm, one) == roster
    assert (list(roster.members), roster.holders) == (one, (tuple(range(comm.size)),) * 2)
    # A pipeline: every rank has two layers of its own, and all share the norm.
    norm = Member("norm", (3,), "torch.float32")
    own = [Member(f"layers.{2 * comm.rank + i}.w", (3,), "torch.float32") for i in range(2)]
    roster = roster_of_all(comm, [*own, norm])
    names = [f"layers.{i}.w" for i in range(2 * comm.size)] + ["norm"]
    assert [member.name for member in roster.members] == names
    assert roster.holders == (*((i // 2,) for i in range(2 * comm.size)), tuple(range(comm.size)))
    with pytest.raises(ValueError, match="twice"):
        roster_of_all(comm, [norm, norm])
    if comm.size > 1:
        with pytest.raises(ValueError, match="different orders"):
            roster_of_all(comm, one if comm.rank else one[::-1])
        other = Member("b", (2, 3), "torch.float32" if comm.rank else "torch.bfloat16")
        with pytest.raises(ValueError, match="disagree on parameter 'b'"):
            roster_of_all(comm, [other])


def _fail_on_last(comm: Communicator, kind: type[Exception]) -> None:
    with together(comm):
        if comm.rank == comm.size - 1:
            raise kind("no such thing")
