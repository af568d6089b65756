"""What a rank counts and keeps of its elements, by numpy on the host.

Nouns: a *source* is one parameter's local elements in a competition. A *pile* is sources that are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.selection.order import Order
from distprune.shards.device import SMALL, batches, fetched, on_host
from distprune.shards.geometry import Geometry

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
Prefixes = npt.NDArray[np.uint64]  # by competition

_KEPT_BYTES = 24 << 20  # set aside by all piles of a rank; what does not fit is found again when it is needed
_FEW = 16  # of fewer elements than a 16th of the bins each is counted by itself
_JOINED = 1 << 18  # elements of a pile: sources of half of them and fewer share one


@dataclass(frozen=True)
class Source:
    """One parameter's local elements in a competition; ``first_position``: that of flat index 0.

    ``keys`` yields their keys, chunk by chunk in local order: on the host arrays, on a device tensors.
    """

    name: str
    device: torch.device
    keys: Callable[[Order], Iterator[Any]]
    geometry: Geometry
    owned: bool
    competition: int
    first_position: int


@dataclass(frozen=True)
class Digit:
    """The bits from ``shift`` on, ``width`` of them, of numbers whose higher bits are ``known``, by competition.

    ``keys``: the numbers are the positions of elements with these keys, by competition; else they are keys.
    """

    shift: int
    width: int
    known: Prefixes | None
    keys: Prefixes | None


class Memory:
    """Arrays that chunks use one after the other (fresh ones take as long as the work), and room to set some aside."""

    def __init__(self) -> None:
        self.num_left = _KEPT_BYTES
        self._arrays: dict[np.dtype[Any], Array] = {}

    def array(self, num: int, dtype: npt.DTypeLike) -> Array:
        """Return ``num`` numbers, that were there before."""
        dtype = np.dtype(dtype)
        memory = self._arrays.get(dtype)
        if memory is None or num > len(memory):
            memory = self._arrays[dtype] = np.empty(num, dtype)
        return memory[:num]


class Pile:
    """Elements of one source, or of several of one order and device, less those that are known not to matter."""

    def __init__(self, order: Order, sources: Sequence[Source], memory: Memory) -> None:
        self.sources, self._order, self._memory = sources, order, memory
        self.competitions: IntArray = np.array([source.competition for source in sources])
        first = int(self.competitions[0])
        self._competition = first if (self.competitions == first).all() else None  # that of all, if it is one
        self._numels = [source.geometry.local_numel for source in sources]
        self._kept: tuple[IntArray, Array] | None = None  # offsets, and keys, or
        self._has_positions = False  # positions

    def count(self, digit: Digit, bins: IntArray) -> None:
        """Add the counts of ``digit`` to ``bins`` (competitions, 2**width)."""
        is_first = digit.known is None and digit.keys is None
        for offsets, numbers in self._read() if is_first else self._left(digit):
            competitions = self._competitions(offsets, len(numbers))
            places = self._memory.array(len(numbers), np.int32)
            np.right_shift(numbers, digit.shift, out=places, casting="unsafe")
            if digit.known is not None:
                places &= (1 << digit.width) - 1
            if not isinstance(competitions, int):
                places += competitions * bins.shape[1]
            into = bins[competitions] if isinstance(competitions, int) else bins.reshape(-1)
            if len(places) < len(into) // _FEW:
                np.add.at(into, places, 1)
            else:
                counts = torch.bincount(torch.from_numpy(places)).numpy()  # numpy's makes 64-bit copies first
                into[: len(counts)] += counts

    def num_nans(self) -> dict[str, int]:
        """Return how many scores are NaN, by name."""
        starts, nums = np.cumsum([0, *self._numels]), np.zeros(len(self._numels), dtype=np.int64)
        for start, keys in self._read():
            at = np.flatnonzero(keys > self._order.last - self._order.gone) + start
            nums += np.diff(np.searchsorted(at, starts))
        return {source.name: num for source, num in zip(self.sources, nums.tolist(), strict=True) if num}

    def _left(self, digit: Digit) -> Iterator[tuple[IntArray, Array]]:
        """Yield offsets and numbers of the elements that ``digit`` counts, part by part; set them aside if they fit."""
        kept: list[tuple[IntArray, Array]] | None = []
        is_new = self._kept is None
        for first, numbers in self._read() if self._kept is None else [self._kept]:
            part = first, numbers
            if digit.keys is not None and not self._has_positions:
                keys = _taken(digit.keys, self._competitions(first, len(numbers)))
                at = np.flatnonzero(numbers == keys)
                offsets = first[at] if isinstance(first, np.ndarray) else at + first
                part = offsets, self._positions(offsets)
            part = self._known(digit, *part)
            if kept is None:
                yield part
                continue
            kept.append(part)
            self._memory.num_left -= part[0].nbytes + part[1].nbytes if is_new else 0
            if self._memory.num_left < 0:
                self._memory.num_left += sum(array.nbytes for parts in kept for array in parts)
                yield from kept
                kept = None
        if kept is not None:
            self._kept = np.concatenate([at for at, _ in kept]), np.concatenate([numbers for _, numbers in kept])
            self._has_positions = digit.keys is not None
            yield self._kept

    def _known(self, digit: Digit, first: IntArray | int, numbers: Array) -> tuple[IntArray, Array]:
        """Return offsets and numbers of those whose higher digits are known."""
        if digit.known is None:
            assert isinstance(first, np.ndarray)
            return first, numbers
        known = _taken(digit.known, self._competitions(first, len(numbers)))
        memory = self._memory.array(len(numbers), numbers.dtype)
        at = np.flatnonzero(np.right_shift(numbers, digit.shift + digit.width, out=memory) == known)
        return first[at] if isinstance(first, np.ndarray) else at + first, numbers[at]

    def _read(self) -> Iterator[tuple[int, Array]]:
        """Yield keys, unsigned from 0 (gone) up, and at which offset they begin."""
        chunks: Iterator[Any] = (keys for source in self.sources for keys in source.keys(self._order))
        if not on_host(self.sources[0].device):
            tensors = chunks if len(self.sources) == 1 else iter([torch.cat([*chunks])])
            chunks = (keys.numpy() for chunk in tensors for keys in fetched([chunk]))
        elif len(self.sources) > 1:
            chunks = iter([np.concatenate([*chunks])])
        start = 0
        for keys in chunks:
            yield start, self._order.unsigned(keys)
            start += len(keys)

    def _competitions(self, first: IntArray | int, num: int) -> IntArray | int:
        """Return the competition of ``num`` elements from offset ``first`` on, or of those at some offsets."""
        if self._competition is not None:
            return self._competition
        by_element: IntArray = np.repeat(self.competitions, self._numels)
        return by_element[first] if isinstance(first, np.ndarray) else by_element[first : first + num]

    def _positions(self, offsets: IntArray) -> Prefixes:
        """Return the positions of the elements at ``offsets``, which ascend."""
        positions, starts = np.empty(len(offsets), dtype=np.int64), np.cumsum([0, *self._numels])
        bounds = np.searchsorted(offsets, starts)
        flat_starts = [source.geometry.flat_start for source in self.sources]
        firsts = np.array([source.first_position for source in self.sources]) - starts[:-1]
        if None not in flat_starts:
            np.add(offsets, np.repeat(firsts + flat_starts, np.diff(bounds)), out=positions)
            return positions.view(np.uint64)
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            source, at = self.sources[i], slice(bounds[i], bounds[i + 1])
            flat = source.geometry.flat_indices_at(torch.from_numpy(offsets[at] - starts[i]))
            np.add(flat.numpy(), source.first_position, out=positions[at])
        return positions.view(np.uint64)


def piles_of(orders: Sequence[Order], sources: Sequence[Source]) -> list[Pile]:
    """Return ``sources`` in piles. ``orders``: by competition."""
    memory, alone, small = Memory(), list[Pile](), dict[tuple[Order, torch.device, int | None], list[Source]]()
    for source in sources:
        order, numel = orders[source.competition], source.geometry.local_numel
        if numel <= _JOINED // 2:
            which = None if numel <= SMALL else source.competition
            small.setdefault((order, source.device, which), []).append(source)
        else:
            alone.append(Pile(order, [source], memory))
    return alone + [
        Pile(order, batch, memory)
        for (order, _, _), some in small.items()
        for batch in batches(((source, source.geometry.local_numel) for source in some), _JOINED)
    ]


def _taken(prefixes: Prefixes, competitions: IntArray | int) -> Any:
    return int(prefixes[competitions]) if isinstance(competitions, int) else prefixes[competitions]


def keep_above(keys: Any, key: int, edge: int, out: Any) -> None:
    """Write into ``out`` which ``keys`` are above ``key``, or, from offset ``edge`` on, not below it. Local.

    Both are arrays, or tensors on a device.
    """
    greater, middle = np.greater if isinstance(keys, np.ndarray) else torch.gt, min(max(edge, 0), len(keys))
    if middle:
        greater(keys[:middle], key, out=out[:middle])
    if middle < len(keys):
        greater(keys[middle:], key - 1, out=out[middle:])
