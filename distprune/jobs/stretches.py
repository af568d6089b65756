"""A checkpoint written stretch by stretch: each is noted when every rank has it on the disk.

Noun: a *stretch* is some tensors, or parts of some, of about 256 MiB a rank. They are of several files, up to eight,
because a system lets one of a machine's threads at a time write to a file.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import torch

from distprune.checkpoint.digest import NUM_WORDS, as_words, new_digest
from distprune.checkpoint.hf_directory import HfDirectory, TensorEntry
from distprune.checkpoint.naming import different_values
from distprune.checkpoint.output_files import allocate_directory, planned
from distprune.checkpoint.regions import Region
from distprune.checkpoint.stored_parameters import StoredParameters, mapped_tensors
from distprune.checkpoint.stored_slices import Progress, chunks_of, read_ahead, write_chunk
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.slow import work_together
from distprune.jobs.journal import Item
from distprune.jobs.unfinished import Unfinished
from distprune.pruning.streamed import StreamedPruning
from distprune.selection.radix import raise_nans
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, bytes_of, cut
from distprune.shards.pieces import pieces_of, share_of, within

STRETCH = "stretch"  # an item's kind
_STRETCH_BYTES = 256 << 20  # of a rank
_COPY_NUMEL = 4 << 20
_Map: TypeAlias = Callable[[Callable[[int], bytes], Sequence[int]], Iterator[bytes]]
_MAX_THREADS = 8  # each has some 10 MiB
_NUM_LANES = 8  # sequences of files, of each of which a stretch has a part
_NUM_COUNTS = 3  # of a parameter: pruned, pruned before, NaN


@dataclass(frozen=True)
class _Part:
    """Part ``number`` of ``num_parts`` of a region of one tensor; ``parameter``: what is pruned in it, if anything."""

    path: Path
    entry: TensorEntry  # where it is written
    region: Region
    parameter: str | None
    number: int
    num_parts: int

    @property
    def num_bytes(self) -> int:
        """About so many, of all ranks together."""
        return self.region.numel * self.entry.dtype.itemsize // self.num_parts

    def as_stored(self, piece: Geometry) -> Geometry:
        """Return what a piece, of the parameter or of it as one line, is of the stored tensor, or of that as a line."""
        if self.parameter is None:
            return piece
        if len(piece.global_shape) == len(self.region.bounds):
            return self.region.inside(piece, self.entry.shape)[1]
        start = sum(
            first * math.prod(self.entry.shape[dim + 1 :]) for dim, first in enumerate(self.region.stored_start)
        )
        runs = tuple((low + start, high + start) for low, high in piece.dim_runs[0])
        return Geometry((math.prod(self.entry.shape),), (runs,))

    def shard_as_stored(self, values: torch.Tensor, piece: Geometry) -> LocalShard:
        """Return ``values`` of a piece of the parameter as a shard of the stored tensor: a view."""
        shard = LocalShard(self.entry.name, values, piece)
        if len(piece.global_shape) == len(self.region.bounds):
            return self.region.part_of(shard, self.entry.shape)
        return replace(shard, geometry=self.as_stored(piece))


class StretchWriter:
    """Writes what ``pruning`` leaves of the ``values``, all tensors of ``source`` by name, into ``unfinished``."""

    def __init__(
        self,
        source: HfDirectory,
        stored: StoredParameters,
        pruning: StreamedPruning,
        values: Mapping[str, torch.Tensor],
        unfinished: Unfinished,
    ) -> None:
        self._comm: Communicator = unfinished.comm
        self._num_bytes = _STRETCH_BYTES * unfinished.comm.size  # of a stretch
        self._source, self._pruning, self._values, self._unfinished = source, pruning, values, unfinished
        self._stored = stored
        self.files = []
        for file in source.weight_files:
            names = [entry.name for entry in file.tensors if entry.name in stored.parts]
            shards = [LocalShard(name, values[name], Geometry.whole(values[name].shape)) for name in names]
            self.files.append(planned(unfinished.folder / file.path.name, shards))

    @cached_property
    def stretches(self) -> list[list[_Part]]:
        """All stretches, the same on every rank: of each of a few sequences of files what comes next."""
        lanes: list[list[_Part]] = [[] for _ in self.files[:_NUM_LANES]]
        for number, file in enumerate(self.files):
            lane = lanes[number * len(lanes) // len(self.files)]
            lane += [part for entry in file.tensors for part in self._parts(file.path, entry)]
        places: list[tuple[float, int, _Part]] = []  # which share of its lane is before a part, which lane it is
        for number, lane in enumerate(lanes):
            before = [*itertools.accumulate((part.num_bytes for part in lane), initial=0)]
            places += [(start / max(1, before[-1]), number, part) for start, part in zip(before, lane, strict=False)]
        found: list[list[tuple[int, _Part]]] = [[]]
        num_bytes = 0
        for _, number, part in sorted(places, key=lambda place: place[:2]):
            if num_bytes + part.num_bytes > self._num_bytes and found[-1]:
                found.append([])
                num_bytes = 0
            found[-1].append((number, part))
            num_bytes += part.num_bytes
        return [[part for _, part in sorted(stretch, key=lambda of: of[0])] for stretch in found]

    def _parts(self, path: Path, entry: TensorEntry) -> Iterator[_Part]:
        parts = self._stored.parts[entry.name]
        if all(parameter is None for _, parameter in parts):
            parts = [(Region.whole(entry.name, entry.name, entry.shape), None)]
        for region, parameter in parts:
            num_parts = max(1, -(-region.numel * entry.dtype.itemsize // self._num_bytes))
            for number in range(num_parts):
                yield _Part(path, entry, region, parameter, number, num_parts)

    def allocate(self) -> None:
        """Make the files at their full size; what is there of the weights stays. Every rank must call it: one round.

        Raises:
            OSError: on every rank: the disk is full or not writable.
        """
        with together(self._comm):
            if self._comm.rank == 0:
                allocate_directory(self._source, self.files, self._unfinished.folder)

    def num_as_written(self) -> int:
        """Return how many of the recorded stretches are on the disk as they were written, and forget the others.

        Every rank must call it: a round of 24 bytes for each.
        """
        with ExitStack() as opened:
            with together(self._comm):
                written = opened.enter_context(mapped_tensors(self.files))

            def read(part: _Part, piece: Geometry, digest: Any) -> None:
                digest.update(bytes_of(_cut(written[part.entry.name], part.as_stored(piece))))

            every = opened.enter_context(_mapping())
            recorded = self._unfinished.items(STRETCH)
            for stretch, item in zip(self.stretches, recorded, strict=False):
                digest, _ = self._summed([], partial(self._of_pieces, stretch, every, read))
                if not self._unfinished.verify(item, digest):
                    break
        return len(self._unfinished.items(STRETCH))

    def write(self, first: int, progress: Progress) -> None:
        """Write the stretches from ``first`` on. Every rank must call it.

        A round for each, 24 bytes a parameter in it, and the wait for the disk as :func:`work_together`.

        Raises:
            OSError: on every rank: the disk is full or not writable, or a file of the source was changed meanwhile.
            ValueError: on every rank: weights are NaN, or tied ones are stored with different values.
        """
        sizes = [sum(part.num_bytes for part in stretch) for stretch in self.stretches]
        with ExitStack() as opened, ThreadPoolExecutor(1) as syncing, ThreadPoolExecutor(1) as reading:
            with together(self._comm):
                files = {file.path: opened.enter_context(file.path.open("r+b", buffering=0)) for file in self.files}
                for pool in (syncing, reading):  # each starts its thread now, where all hear of it if it cannot
                    pool.submit(int)
            disk = _Disk(self._unfinished, files, syncing)
            every = opened.enter_context(_mapping())
            # A system lets one thread at a time write to a file, and may have the others spin until then.
            turns = {path: Lock() for path in files}

            def written(stretch: Sequence[_Part], counts: dict[str, list[int]]) -> bytes:
                lock = Lock()

                def write(part: _Part, piece: Geometry, digest: Any) -> None:
                    found = self._write(files[part.path].fileno(), turns[part.path], part, piece, digest)
                    if found is not None and part.parameter is not None:
                        with lock:
                            counts[part.parameter][:] = map(sum, zip(counts[part.parameter], found, strict=True))

                digests = self._of_pieces(stretch, every, write)
                self._source.check_unchanged()
                return digests

            reading.submit(self._read_ahead, self.stretches[first : first + 1])
            for number in range(first, len(self.stretches)):
                stretch = self.stretches[number]
                reading.submit(self._read_ahead, self.stretches[number + 1 : number + 2])
                names = [*dict.fromkeys(part.parameter for part in stretch if part.parameter is not None)]
                counts = {name: [0, 0, 0] for name in names}
                digest, totals = self._summed([*counts.values()], partial(written, stretch, counts))
                if any(num_nans for _, _, num_nans in totals):
                    raise_nans(self._comm, {name: counts[name][2] for name in names})
                of_name = {name: [pruned, before] for name, (pruned, before, _) in zip(names, totals, strict=True)}
                disk.record(Item(STRETCH, of_name, digest), {part.path for part in stretch})
                if progress is not None:
                    progress(sum(sizes[: number + 1]), sum(sizes))
            disk.finish()

    def _read_ahead(self, stretches: Sequence[Sequence[_Part]]) -> None:
        """Have the system read what this rank will need, or about that."""
        tensors = self._source.tensors
        for part in itertools.chain.from_iterable(stretches):
            file, entry = tensors[part.entry.name]
            ranges = []
            for piece in filter(lambda piece: piece.local_numel, map(part.as_stored, self._pieces(part))):
                size = math.prod(piece.global_shape[1:]) * entry.dtype.itemsize
                rows = piece.dim_runs[0] if piece.dim_runs else ((0, 1),)
                ranges.append((entry.start + rows[0][0] * size, entry.start + rows[-1][1] * size))
            read_ahead(file.path, ranges)

    def counts(self) -> list[list[int]]:
        """Return, of every parameter, how many zeros it has and how many it had, of what is recorded. Local."""
        totals = {name: [0, 0] for name in self._pruning.names}
        for stretch in self._unfinished.items(STRETCH):
            for name, counts in stretch.value.items():
                totals[name] = [*map(sum, zip(totals[name], counts, strict=True))]
        return [*totals.values()]

    def _write(self, descriptor: int, turn: Lock, part: _Part, piece: Geometry, digest: Any) -> list[int] | None:
        """Write what is left of a piece of ``part``; return what is pruned, was before, and is NaN, if it counts."""
        name, values = part.entry.name, self._values[part.entry.name]

        def write(shard: LocalShard) -> None:
            for chunk, places in chunks_of(shard):
                with turn:
                    write_chunk(descriptor, part.entry, chunk, places)
            digest.update(bytes_of(shard.local))

        if part.parameter is None:
            write(LocalShard(name, _cut(values, piece), piece))
            return None
        first = self._stored.stored[part.parameter][0].stored
        if name != first:
            before = part.shard_as_stored(self._pruning.values(part.parameter, piece), piece)
            if not torch.equal(before.local, _cut(values, before.geometry)):
                raise different_values(self._source.path, first, name)
        left, counts = self._pruning.prune(part.parameter, piece)
        write(part.shard_as_stored(left, piece))
        return counts if name == first else None

    def _of_pieces(self, stretch: Sequence[_Part], every: _Map, work: Callable[[_Part, Geometry, Any], None]) -> bytes:
        """Do ``work`` for all pieces of a stretch, in any order, and return their digests, in theirs."""
        pieces = [(part, piece) for part in stretch for piece in self._pieces(part)]
        order = apart(len(pieces), self._comm.rank, self._comm.size, _num_threads())

        def one(number: int) -> bytes:
            digest = new_digest()
            work(*pieces[number], digest)
            return bytes(digest.digest())

        digests = dict(zip(order, every(one, order), strict=True))
        return b"".join(digests[number] for number in range(len(pieces)))

    def _pieces(self, part: _Part) -> list[Geometry]:
        """Return this rank's pieces of ``part``: of the parameter that is pruned in it, or of the stored tensor."""
        if part.parameter is not None:
            pieces = [*self._pruning.pieces(part.parameter)]
        else:
            shape, bounds = part.entry.shape or (1,), part.region.stored_bounds or ((0, 1),)
            grain = (1,) * len(shape)
            share = within(share_of(shape, grain, self._comm.rank, self._comm.size), bounds)
            pieces = [*pieces_of(share, grain, _COPY_NUMEL)]
        start, stop = (len(pieces) * number // part.num_parts for number in (part.number, part.number + 1))
        return pieces[start:stop]

    def _summed(self, counts: Sequence[Sequence[int]], work: Callable[[], bytes]) -> tuple[str, list[list[int]]]:
        """Return a digest of what ``work`` returns on all ranks, and the sum of ``counts``, as it leaves them."""

        def fill(words: torch.Tensor) -> None:
            words[:NUM_WORDS] = as_words(new_digest(f"{self._comm.rank}:".encode() + work()))
            if counts:
                flat = [num for each in counts for num in each]
                words[NUM_WORDS:] = torch.tensor(flat, dtype=torch.int64, device="cpu")

        words = sum_together(self._comm, (NUM_WORDS + _NUM_COUNTS * len(counts),), fill)
        digest = words[:NUM_WORDS].numpy().tobytes().hex()
        return digest, words[NUM_WORDS:].view(len(counts), _NUM_COUNTS).tolist()


class _Disk:
    """Stretch n is synced while n + 1 is written, and recorded while n + 2 is: all ranks have it on the disk by then.

    Every rank syncs all files of a stretch. Where ``unfinished`` does not sync files nothing waits for the disk.
    """

    def __init__(self, unfinished: Unfinished, files: Mapping[Path, FileIO], thread: ThreadPoolExecutor) -> None:
        self._unfinished, self._files, self._thread = unfinished, files, thread
        self._unsynced = {*files}  # since this job has begun
        self._written: list[tuple[Item, list[Future[None]]]] = []  # which every rank has written
        self._recorded: list[Future[None]] = []

    def _sync(self, paths: set[Path]) -> list[Future[None]]:
        """Begin to sync files to which every rank has written. Local."""
        self._unsynced -= paths
        if not self._unfinished.sync_files:
            return []
        return [self._thread.submit(os.fsync, self._files[path].fileno()) for path in sorted(paths)]

    def record(self, item: Item, paths: set[Path]) -> None:
        """Note that every rank has written a stretch, into the files ``paths``, once they are synced.

        Every rank must call it. Waits for the stretch before, as :func:`work_together`. Raises what an earlier sync or
        record raised.
        """
        self._written.append((item, self._sync(paths)))
        if len(self._written) > 1:
            self._record_first()

    def finish(self) -> None:
        """Wait until all is recorded, and what was in the files before is on the disk, too. Every rank must call it."""
        before = self._sync({*self._unsynced})
        while self._written:
            self._record_first()
        self._wait([*self._recorded, *before])

    def _record_first(self) -> None:
        item, synced = self._written.pop(0)
        self._wait([*self._recorded, *synced])
        self._recorded = [self._thread.submit(self._unfinished.record, item)]

    def _wait(self, pending: Sequence[Future[None]]) -> None:
        if self._unfinished.sync_files:
            work_together(self._unfinished.comm, lambda: [each.result() for each in pending])
        else:
            with together(self._unfinished.comm):
                [each.result() for each in pending]


def _num_threads() -> int:
    """Return on how many cores this rank is to work: as many as torch has for it."""
    return min(torch.get_num_threads(), _MAX_THREADS)


def apart(num: int, rank: int, num_ranks: int, num_threads: int) -> list[int]:
    """Return ``range(num)`` in an order in which all threads of all ranks are in different parts of it at a time."""
    shift = num * rank // (num_ranks * num_threads)
    numbers = [*range(shift, num), *range(shift)]
    bounds = [num * thread // num_threads for thread in range(num_threads + 1)]
    of_threads = (numbers[low:high] for low, high in itertools.pairwise(bounds))
    return [number for beside in itertools.zip_longest(*of_threads) for number in beside if number is not None]


@contextmanager
def _mapping() -> Iterator[_Map]:
    """Yield ``map`` for what waits for no other: beside each other, on the cores of this rank."""
    num_threads = _num_threads()
    if num_threads == 1:
        yield map
        return
    with ThreadPoolExecutor(num_threads) as pool:
        yield pool.map


def _cut(values: torch.Tensor, piece: Geometry) -> torch.Tensor:
    """Return a piece of a whole tensor, or of it as one line."""
    return cut(values.reshape(piece.global_shape), piece)
