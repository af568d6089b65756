"""Ranks agree, or all of them raise.

What is told to the others is an ``Exception``, or what an extension panics with. ``KeyboardInterrupt`` and
``SystemExit`` end their own rank at once: a signal may have reached all ranks, which then meet in no collective. The
others raise in their next one, when the rank has left (gloo sees that at once, NCCL at the group's timeout).
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch

from distprune.collectives.base import Communicator, Op, as_met, as_raised
from distprune.mistakes import called_from_outside, tell_trace, trace_of

_Fill: TypeAlias = Callable[[torch.Tensor], object]

# An error crosses ranks as its type's name and text, and is raised there as the same built-in type.
_CARRIED: tuple[type[Exception], ...] = (
    *(NotImplementedError, FileExistsError, FileNotFoundError, PermissionError, ValueError, TypeError, AssertionError),
    *(AttributeError, IndexError, MemoryError, OSError, ModuleNotFoundError, ImportError, RuntimeError),
)
_NUM_DIGEST_WORDS = 3  # of 63 bits
_WORD = 8  # bytes


def reduce_together(
    comm: Communicator, shape: Sequence[int], fill: _Fill, dtype: torch.dtype = torch.int64, *, op: Op
) -> torch.Tensor:
    """Return the sum or maximum over ranks of what each one's ``fill`` writes into zeros of ``shape``, on the CPU.

    All ranks must call it, with the same ``shape`` and ``dtype`` (int64 or float64): one round of the tensor's bytes
    and 8 more. ``fill`` must not communicate. Whatever it raises on one rank is raised there and, as the same
    built-in type naming the rank, on all others (two rounds more).
    """
    message = torch.zeros(math.prod(shape) + 1, dtype=dtype, device="cpu")
    error: Exception | None = None
    try:
        fill(message[:-1].view(tuple(shape)))
    except BaseException as caught:
        error = as_met(caught)
        message.zero_()[-1] = 1
    comm.reduce_(message, op)
    if message[-1]:
        _raise_errors(comm, error)
    return message[:-1].view(tuple(shape))


sum_together = partial(reduce_together, op="sum")
max_together = partial(reduce_together, op="max")


def swap_unknown(comm: Communicator, make: Callable[[], Mapping[int, torch.Tensor]]) -> list[torch.Tensor]:
    """Return what every rank's ``make`` has for this rank, in rank order, on the CPU; no rank knows how much that is.

    All ranks must call it; ``make`` returns a uint8 piece, 1-D, by the rank it is for, none where there is nothing to
    say, and must not communicate. Two rounds: 8 bytes a rank, and the pieces. Errors as in :func:`sum_together`.
    """
    sizes, joined, error = [-1] * comm.size, torch.empty(0, dtype=torch.uint8, device="cpu"), None
    try:
        pieces = make()
        joined = torch.cat([joined, *(pieces[rank].detach().cpu() for rank in sorted(pieces))])
        sizes = [0] * comm.size
        for rank, piece in pieces.items():
            sizes[rank] = piece.numel()
    except BaseException as caught:
        error = as_met(caught)
    words = [_WORD] * comm.size
    said = torch.tensor(sizes, dtype=torch.int64, device="cpu").view(torch.uint8)
    told = comm.swap(said, words, words).view(torch.int64).tolist()
    if min(told) < 0:
        _raise_errors(comm, error)
    return list(torch.split(comm.swap(joined, sizes, told), told))


def swap_known(
    comm: Communicator, make: Callable[[], Mapping[int, torch.Tensor]], sizes: tuple[Sequence[int], Sequence[int]]
) -> list[torch.Tensor]:
    """Do as :func:`swap_unknown` where all ranks know the sizes before: how many bytes go to and come from every rank.

    One round: 8 bytes a rank and the pieces.

    Raises:
        ValueError: on every rank: ``make`` returned pieces of other sizes than said.
    """
    to, coming = sizes
    # Before each piece, whether it failed: as a whole word, so that what was aligned stays so.
    sent_sizes, sizes_coming = ([_WORD + size for size in of_ranks] for of_ranks in sizes)
    sent, error = torch.zeros(sum(sent_sizes), dtype=torch.uint8, device="cpu"), None
    try:
        pieces = make()
        made = {rank: num for rank, piece in sorted(pieces.items()) if (num := piece.numel())}
        if made != (said := {rank: size for rank, size in enumerate(to) if size}):
            raise ValueError(f"by rank, pieces of {made} bytes, where {said} were announced")
        parts = torch.split(sent, [num for size in to for num in (_WORD, size)])[1::2]
        for rank in made:
            parts[rank].copy_(pieces[rank].detach())
    except BaseException as caught:
        error = as_met(caught)
        sent.fill_(1)
    received = torch.split(comm.swap(sent, sent_sizes, sizes_coming), [num for size in coming for num in (_WORD, size)])
    if torch.cat(received[::2]).any():
        _raise_errors(comm, error)
    return list(received[1::2])


def agree(comm: Communicator, facts: Mapping[str, Any], error: Exception | None = None) -> None:
    """Return if every rank passed the same ``facts`` and no ``error``; otherwise raise on every rank.

    All ranks must call it. One round of 64 bytes when all is well; three more, to find out what is
    wrong, when not. ``facts`` holds what JSON carries; its values are compared one by one, so the
    message names what differs and on which ranks. An ``error`` is raised again where it arose and, as
    the same built-in type naming the rank, everywhere else.
    """
    if not same_everywhere(comm, facts, error=error)[0]:
        check_facts(comm, facts)


def check_facts(comm: Communicator, facts: Mapping[str, Any]) -> None:
    """Raise a ValueError on every rank if their ``facts`` differ: it names what differs, or different functions.

    Every rank must call it where :func:`same_everywhere` said no, wherever a rank then is: one round of 64 bytes, and
    two more where facts differ.
    """
    if same_everywhere(comm, facts)[0]:
        return
    gathered = comm.gather([called_from_outside(), {key: _short(value) for key, value in facts.items()}])
    if functions := _differences([{"": name} for name, _ in gathered]):
        raise ValueError(f"ranks have called different functions{functions[0]}; all must make the same calls in order")
    different = _differences([facts for _, facts in gathered])
    raise ValueError("ranks were called with different arguments: " + " | ".join(different))


def same_everywhere(comm: Communicator, value: Any, drawn: int = 0, error: Exception | None = None) -> tuple[bool, int]:
    """Return whether all ranks have the same ``value``, and what the first has ``drawn``, in [0, 2**63).

    All ranks must call it; one round of 64 bytes, whatever the value's size. One rank's ``error`` is raised on all.
    """

    def fill(words: torch.Tensor) -> None:
        if error is not None:
            raise error
        words[0] = drawn if comm.rank == 0 else 0
        if comm.size > 1:
            digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
            digits = torch.frombuffer(bytearray(digest), dtype=torch.int64)[:_NUM_DIGEST_WORDS] >> 1
            words[1:] = torch.cat([digits, -digits])

    words = max_together(comm, (1 + 2 * _NUM_DIGEST_WORDS,), fill)
    # max(w) == -max(-w) on every word says that all ranks hold the same w.
    signs = torch.tensor([[1], [-1]], dtype=torch.int64, device="cpu")
    largest, smallest = words[1:].view(2, _NUM_DIGEST_WORDS) * signs
    return torch.equal(largest, smallest), int(words[0])


@contextmanager
def together(comm: Communicator, **facts: Any) -> Iterator[dict[str, Any]]:
    """Run the body on every rank; if it raises on one, raise on all (one round, 64 bytes).

    The body must not communicate: a rank that fails inside it would leave the others waiting there.
    ``facts``, and what the body adds to them, are agreed on in the same round. ``KeyboardInterrupt`` and ``SystemExit``
    are raised on their rank alone.
    """
    error: Exception | None = None
    try:
        yield facts
    except BaseException as caught:
        error = as_met(caught)
    agree(comm, {} if error else facts, error)


def _raise_errors(comm: Communicator, error: Exception | None) -> NoReturn:
    """Raise this rank's ``error``, or that of the first rank which has one.

    Two rounds, of its text, and of its traceback if nobody expected it.
    """
    texts = comm.gather(None if error is None else [_carried_type(error).__name__, _text(error), trace_of(error)])
    if error is None:
        source, (name, text, trace) = next((rank, entry) for rank, entry in enumerate(texts) if entry is not None)
        kind = next(kind for kind in _CARRIED if kind.__name__ == name)
        error = kind(f"rank {source} of {comm.size}: {text}")
        if trace:
            tell_trace(error, source, trace)
    raise as_raised(error) if comm.size == 1 else error


def _carried_type(error: Exception) -> type[Exception]:
    return next((kind for kind in _CARRIED if isinstance(error, kind)), RuntimeError)


def _text(error: Exception) -> str:
    """Return what ``error`` says, and its type where that is not carried or is all it says."""
    return str(error) if isinstance(error, _CARRIED) and str(error) else repr(error)


def _short(value: Any) -> Any:
    """Long facts travel as their digest; a few words travel as they are, to be shown."""
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= 200 else f"(sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _differences(gathered: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each key whose value is not the same on all ranks."""
    lines = []
    for key in sorted({key for facts in gathered for key in facts}):
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(gathered):
            shown = json.dumps(facts[key], sort_keys=True) if key in facts else "(not given)"
            by_value.setdefault(shown, []).append(rank)
        if len(by_value) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            lines.append(f"{key}: {shown}")
    return lines


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


Told = list[tuple[Sequence[int], Any]]  # the ranks that told a value, ascending, and the value as JSON carries it


def told_by_all(comm: Communicator, make: Callable[[], Any]) -> Told:
    """Return every different value that the ranks' ``make`` return, with the ranks, in the order of the first of those.

    Every rank must call it; ``make`` must not communicate. One round of 64 bytes if all values are the same, else the
    two of :func:`each_different` besides. What ``make`` raises on one rank is raised on all.
    """
    value, error = None, None
    try:
        value = make()
    except BaseException as caught:
        error = as_met(caught)
    if same_everywhere(comm, value, error=error)[0]:
        return [(range(comm.size), json.loads(json.dumps(value)))]
    return each_different(comm, value)


def each_different(comm: Communicator, value: Any) -> Told:
    """Return every different ``value`` of the ranks, as :func:`told_by_all` does.

    Every rank must call it. Two rounds: 16 bytes a rank, and each different value, compressed, from the first rank that
    has it.
    """
    packed = zlib.compress(json.dumps(value).encode())
    digest = int.from_bytes(hashlib.sha256(packed).digest()[: _WORD - 1], "little")

    def announce(words: torch.Tensor) -> None:
        words[comm.rank] = torch.tensor([digest, len(packed)], dtype=torch.int64, device="cpu")

    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, (number, size) in enumerate(sum_together(comm, (comm.size, 2), announce).tolist()):
        ranks.setdefault((number, size), []).append(rank)
    sizes = [-(-size // _WORD) for _, size in ranks]
    firsts = [same[0] for same in ranks.values()]

    def tell(words: torch.Tensor) -> None:
        if comm.rank in firsts:
            buffer = torch.split(words, sizes)[firsts.index(comm.rank)].view(torch.uint8)
            buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    parts = torch.split(sum_together(comm, (sum(sizes),), tell), sizes)
    return [
        (same, json.loads(zlib.decompress(bytes(part.view(torch.uint8)[:size].numpy()))))
        for ((_, size), same), part in zip(ranks.items(), parts, strict=True)
    ]
