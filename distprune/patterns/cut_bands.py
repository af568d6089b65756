"""What shard edges cut travels: one rank decides each band, and answers the others.

Nouns: the parts of a parameter that are decided together lie within a *band*: a row, or a block. Bands are numbered.
The *home* of a band is the rank that decides what shard edges cut of it: each rank that holds a part of the parameter
is the home of an equal range. An *item* is an element, or what a rank holds of a block; items are numbered, too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives.agree import swap_known, swap_unknown
from distprune.collectives.base import Communicator
from distprune.collectives.roster import Roster
from distprune.shards.device import fetched

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Told = tuple[int, IntArray, IntArray | None]  # member, numbers of items, and values, in words, of what a rank owns
Answers = list[tuple[int, npt.NDArray[np.uint8]]]  # how many items, and which of them stay, as bits

_BATCH = 1 << 23  # bytes of small parameters that a rank sends at a time
_WORD = 8  # bytes


@dataclass(frozen=True)
class CutPart:
    """What this rank holds of the cut bands of one parameter, of ``num_bands`` with ``num_items`` each.

    ``numbers``: of the items, ascending, counted alike by all ranks: those of a band follow those of the one before.
    ``values``: (items,) or (items, columns) of integers; ``None`` for values that another rank owns.
    """

    num_bands: int
    num_items: int
    numbers: IntArray
    values: torch.Tensor | None


class CutBands:
    """One exchange: :meth:`bring`, then :meth:`back`. Every rank must call both: two rounds, and one.

    A rank sends 8 bytes to every rank, then of what it holds of the cut bands its values, 16 bytes for every run of
    numbers, 8 to each home, and 24 to it for every parameter. One bit an item comes back. Errors on one rank are raised
    on all.
    """

    def __init__(self, comm: Communicator, roster: Roster) -> None:
        self._comm, self._roster = comm, roster
        self._asked: list[list[tuple[int, int]]] = [[] for _ in range(comm.size)]
        self._messages: Sequence[torch.Tensor] = []  # by rank

    @staticmethod
    def batches(roster: Roster, num_bytes: Sequence[int]) -> list[list[int]]:
        """Return which members are exchanged at a time: one, or small ones of which a rank sends 8 MiB or so. Local.

        ``num_bytes``: by member, what all ranks send. Members that no rank holds together may share a batch.
        """
        ends = np.zeros(1 + max([ranks[-1] for ranks in roster.holders], default=0), dtype=np.int64)  # by rank
        batches, array_of = defaultdict[int, list[int]](list), cache(np.array)  # members share their holders
        for member, num in enumerate(num_bytes):
            if num:
                holders = array_of(roster.holders[member])
                ends[holders] = end = max(ends[holders].tolist()) + -(-num // len(holders))
                batches[(end - 1) // _BATCH].append(member)
        return [*batches.values()]

    def bring(self, members: Sequence[int], part_of: Callable[[int], CutPart | None]) -> None:
        """Tell the homes what this rank holds of cut bands: ``part_of`` returns it, or ``None`` for nothing."""

        def questions() -> dict[int, torch.Tensor]:
            parts = {member: part for member in members if (part := part_of(member)) is not None}
            owned = {member: part.values for member, part in parts.items() if part.values is not None}
            values = dict(zip(owned, fetched([*owned.values()]), strict=True))
            words = defaultdict[int, list[torch.Tensor]](list)
            for member, part in parts.items():
                homes = self._roster.holders[member]
                firsts = [-(-part.num_bands * i // len(homes)) * part.num_items for i in range(len(homes) + 1)]
                bounds = np.searchsorted(part.numbers, firsts).tolist()
                for home, low, high in zip(homes, bounds, bounds[1:], strict=False):
                    if low < high:
                        self._asked[home].append((member, high - low))
                        own = values[member][low:high] if member in values else None
                        words[home] += _encoded(member, part.numbers[low:high], own)
            sizes = [torch.tensor([size], dtype=torch.int64, device="cpu") for size in self._num_answered()]
            return {rank: torch.cat([sizes[rank].view(torch.uint8), *of_rank]) for rank, of_rank in words.items()}

        self._messages = swap_unknown(self._comm, questions)

    @cached_property
    def _by_rank(self) -> list[list[Told]]:
        return [[*_decoded(message[_WORD:].numpy())] for message in self._messages]

    def told(self) -> list[Told]:
        """Return what ranks told of the bands whose home is this one. Local: to be called within a round."""
        return [*itertools.chain(*self._by_rank)]

    def back(self, decide: Callable[[], Sequence[BoolArray]]) -> dict[int, Answers]:
        """Return by member what stays of this rank's items. ``decide``: of each that was :meth:`told`, in its order."""

        def answers() -> dict[int, torch.Tensor]:
            stays = iter(decide())
            packed = {rank: [np.packbits(next(stays)) for _ in told] for rank, told in enumerate(self._by_rank) if told}
            return {rank: torch.from_numpy(np.concatenate(of_rank)) for rank, of_rank in packed.items()}

        to = [int.from_bytes(bytes(message[:_WORD].numpy()), "little") for message in self._messages]
        received = swap_known(self._comm, answers, (to, self._num_answered()))
        found = defaultdict[int, Answers](list)
        for message, of_rank in zip(received, self._asked, strict=True):
            parts = torch.split(message, [-(-num // 8) for _, num in of_rank])
            for (member, num), bits in zip(of_rank, parts, strict=True):
                found[member].append((num, bits.numpy()))
        return found

    def _num_answered(self) -> list[int]:
        """Return by rank how many bytes come back."""
        return [sum(-(-num // 8) for _, num in of_rank) for of_rank in self._asked]


def unpacked(answers: Answers) -> BoolArray:
    """Return which items stay. Local."""
    return np.concatenate([np.unpackbits(bits, count=num) for num, bits in answers]).view(np.bool_)


def _encoded(member: int, numbers: IntArray, values: torch.Tensor | None) -> list[torch.Tensor]:
    """Return a message: the member, how many runs and bytes an item, the runs, the values."""
    first = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    runs = np.stack([numbers[first], np.diff(first, append=len(numbers))], 1)
    size = 0 if values is None else values.nbytes // len(numbers)
    words = torch.from_numpy(np.concatenate([[member, len(runs), size], runs.reshape(-1)])).view(torch.uint8)
    if values is None:
        return [words]
    padding = torch.zeros(-values.nbytes % _WORD, dtype=torch.uint8, device="cpu")
    return [words, values.contiguous().view(-1).view(torch.uint8), padding]


def _decoded(message: npt.NDArray[np.uint8]) -> Iterator[Told]:
    """Yield what a rank told: see :func:`_encoded`."""
    words, at = message.view(np.int64), 0
    while at < len(words):
        member, num, size = words[at : at + 3].tolist()
        starts, lengths = words[at + 3 : at + 3 + 2 * num].reshape(-1, 2).T
        ends, at = np.cumsum(lengths), at + 3 + 2 * num
        numbers = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
        stop = at + -(-len(numbers) * size // _WORD)
        yield member, numbers, words[at:stop] if size else None
        at = stop
