"""What ranks tell each other where each may have something else to tell: every different value once.

Noun: what ranks found out together is *known* to them; a digest of 64 bytes then says that they all still mean it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from distprune.collectives.agree import same_everywhere, sum_together
from distprune.collectives.base import Communicator, as_told

T = TypeVar("T")
Told = list[tuple[Sequence[int], Any]]  # the ranks that told a value, ascending, and the value as JSON carries it

_WORD = 8  # bytes
_MOST_KNOWN = 64  # of each kind


class Known(Generic[T]):
    """What ranks found out together in earlier calls, by the digest of what each of them stated.

    It is kept under a *word*, the same on all ranks that took part and on no others. In the place of its digest a rank
    states that word, if it knows one. So if all state the same, either all know the same, or nobody knows anything and
    the digests are equal.
    """

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[int, str], tuple[str, T]] = OrderedDict()

    def clear(self) -> None:
        """Forget all of it. Local."""
        self._kept.clear()

    def look_up(self, comm: Communicator, digest: str) -> tuple[str, tuple[str, T] | None]:
        """Return what this rank states in the place of ``digest``, and what it knows, with its word. Local."""
        known = self._kept.get(_key(comm, digest))
        return digest if known is None else known[0], known

    def keep(self, comm: Communicator, digest: str, known: tuple[str, T]) -> T:
        """Keep ``known``, with its word, under ``digest``, and return it. Local."""
        self._kept.pop(_key(comm, digest), None)
        self._kept[_key(comm, digest)] = known  # the last to go
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return known[1]

    def of(self, comm: Communicator, make: Callable[[], Any], find: Callable[[Any, bool], T]) -> T:
        """Return what is known of the values that the ranks' ``make`` return now, or find it out.

        Every rank must call it; ``make`` must not communicate. One round of 64 bytes if it is known; else those of
        ``find`` besides, which is given this rank's value, and whether it is that of all ranks. What ``make`` raises
        on one rank is raised on all.
        """
        value, digest, statement, known, error = None, "", "", None, None
        try:
            value = make()
            digest = digest_of([comm.size, value])
            statement, known = self.look_up(comm, digest)
        except BaseException as caught:
            error = as_told(caught)
        all_same, word = same_everywhere(comm, statement, error, new_word())
        if known is None or not all_same:
            known = str(word), find(value, all_same)
        return self.keep(comm, digest, known)


def _key(comm: Communicator, digest: str) -> tuple[int, str]:
    return comm.rank, digest  # ranks that have changed places know nothing of what each other stated


def digest_of(value: Any) -> str:
    """Return the digest of what JSON carries. Local."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def new_word() -> int:
    """Return a number that has not been there before. Local."""
    return secrets.randbits(62)


_told: Known[Told] = Known()


def told_by_all(comm: Communicator, make: Callable[[], Any]) -> Told:
    """Return every different value that the ranks' ``make`` return, with the ranks, in the order of the first of those.

    Every rank must call it; ``make`` must not communicate. One round of 64 bytes if all values are the same, or those
    of an earlier call; else the two of :func:`each_different` besides. What ``make`` raises on one rank is raised on
    all.
    """

    def find(value: Any, all_same: bool) -> Told:
        return [(range(comm.size), json.loads(json.dumps(value)))] if all_same else each_different(comm, value)

    return _told.of(comm, make, find)


def each_different(comm: Communicator, value: Any) -> Told:
    """Return every different ``value`` of the ranks, as :func:`told_by_all` does.

    Every rank must call it. Two rounds: 16 bytes a rank, and each different value, compressed, from the first rank that
    has it.
    """
    own = zlib.compress(json.dumps(value).encode())
    digest = int.from_bytes(hashlib.sha256(own).digest()[: _WORD - 1], "little")

    def announce(words: torch.Tensor) -> None:
        words[comm.rank] = torch.tensor([digest, len(own)], dtype=torch.int64, device="cpu")

    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, of_rank in enumerate(sum_together(comm, (comm.size, 2), announce).tolist()):
        ranks.setdefault(tuple(of_rank), []).append(rank)
    sizes = [-(-size // _WORD) for _, size in ranks]
    firsts = [of[0] for of in ranks.values()]

    def tell(words: torch.Tensor) -> None:
        if comm.rank in firsts:
            buffer = torch.split(words, sizes)[firsts.index(comm.rank)].view(torch.uint8)
            buffer[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)

    words = torch.split(sum_together(comm, (sum(sizes),), tell), sizes)
    return [
        (of, json.loads(zlib.decompress(bytes(packed.view(torch.uint8)[:size].numpy()))))
        for ((_, size), of), packed in zip(ranks.items(), words, strict=True)
    ]
