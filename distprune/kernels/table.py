"""What a launch is given: a table of segments, sent once for all tensors of a kind. The host waits for nothing."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from distprune.kernels.available import kernels, launch, num_programs
from distprune.shards.device import sent
from distprune.shards.geometry import Geometry

ScoreName = Literal["magnitude", "gradient", "taylor", "random", "keys", "value"]
IntArray = npt.NDArray[np.int64]

_CONTIGUOUS = 1 << 62  # a run longer than any tensor
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int32: "int32"}
_NAMES |= {torch.int16: "int16", torch.int8: "int8", torch.bool: "int8", torch.int64: "int64"}
_NUMEL, _START = 4, 9  # columns of a segment: see on_device/tiles.py
_VALUES, _OTHER, _OUT, _MASK = range(4)


@dataclass
class Piece:
    """Elements of one tensor on this rank, contiguous in memory.

    They are runs of ``run``, whose flat indices are ``stride`` apart.

    ``tensor``: the row of the totals. ``other``: gradients, or scores, of as many. ``out``: a mask (bool) to write,
    ``mask``: one that is given. ``zeroth``: the position of flat index 0 in the competition. ``seeds``: of random
    scores.
    """

    values: torch.Tensor
    tensor: int = 0
    competition: int = 0
    zeroth: int = 0
    flat: int = 0  # index of what ``start`` counts from
    start: int = 0
    run: int = _CONTIGUOUS
    stride: int = 0
    other: torch.Tensor | None = None
    out: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    seeds: tuple[int, int] = (0, 0)
    owned: bool = True

    def cut(self, at: slice) -> Piece:
        """Return the piece of the elements ``at``."""
        cut: Any = {name: given.view(-1)[at] for name, given in vars(self).items() if isinstance(given, torch.Tensor)}
        return dataclasses.replace(self, **cut)

    def row(self) -> tuple[int, ...]:
        """Return the columns of a segment that is all of it."""
        given = (self.values, self.other, self.out, self.mask)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        place = self.tensor, self.competition, self.zeroth, self.flat, self.start, self.run, self.stride
        return *addresses, self.values.numel(), *place, *self.seeds, self.owned


def pieces_of(geometry: Geometry, whole: Piece, begin: int = 0) -> list[Piece]:
    """Return ``whole``, the local elements from ``begin`` on, as pieces: itself, if its runs are equally far apart."""
    numel, pieces = whole.values.numel(), []
    for at, flat, run, stride in _parts(geometry):
        low, high = max(at.start, begin), min(at.stop, begin + numel)
        if low < high:
            piece = whole if high - low == numel else whole.cut(slice(low - begin, high - begin))
            piece.flat, piece.run, piece.stride, piece.start = flat, run, stride, low - at.start
            pieces.append(piece)
    return pieces


@lru_cache(maxsize=1 << 12)
def _parts(geometry: Geometry) -> list[tuple[slice, int, int, int]]:
    """Return local offsets whose flat indices are of one kind: the first, how many follow it, and how far apart."""
    starts, offsets = geometry.stretches()
    lengths, apart = np.diff(offsets), np.diff(starts)
    if len(starts) > 1 and (apart == apart[0]).all() and (lengths == lengths[0]).all():
        return [(slice(0, geometry.local_numel), int(starts[0]), int(lengths[0]), int(starts[1] - starts[0]))]
    rows = zip(starts.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return [(slice(begin, end), flat, _CONTIGUOUS, 0) for flat, begin, end in rows]


@dataclass
class Table:
    """A table of segments of one kind, for ``grid`` programs."""

    words: IntArray  # segments, then where those of each program begin
    num_columns: int  # of all segments
    grid: tuple[int]
    kind: Any  # see on_device/tiles.py
    sent: torch.Tensor = field(init=False)

    def without_segments(self) -> Table:
        """Return a table of the same kind that has nothing to do."""
        idle = dataclasses.replace(self)
        idle.sent = torch.zeros_like(self.sent)
        return idle

    def run(self, kernel: Any, *arguments: Any, keys: Any = None, **constants: Any) -> None:
        """Launch ``kernel`` for all segments; ``keys``: what it knows of them, :attr:`Keys.kind`."""
        segments, firsts = self.sent[: self.num_columns], self.sent[self.num_columns :]
        kind = self.kind._replace(**(keys or {}))
        launch(kernel, self.grid, self.sent.device, segments, firsts, *arguments, KIND=kind, **constants)


def tables_of(pieces: Sequence[Piece], block: int, *, row: int = 1, programs: int | None = None) -> list[Table]:
    """Return a table for all ``pieces`` of each kind; each program has about as many tiles of ``block`` elements.

    ``row``: a segment has a multiple of so many elements.
    """
    by_kind, block = defaultdict[Any, list[tuple[int, ...]]](list), max(block, row) // row * row
    for piece in pieces:
        columns = piece.row()
        if columns[_NUMEL]:
            is_aligned = (columns[0] | columns[1] | columns[2] | columns[3] | columns[_NUMEL] | block) % 16 == 0
            dtypes = piece.values.dtype, (piece.values if piece.other is None else piece.other).dtype
            by_kind[*dtypes, is_aligned, piece.run == _CONTIGUOUS].append(columns)
    if not by_kind:
        return []
    device, tiles, tables = pieces[0].values.device, kernels("tiles"), []
    for (dtype, other, *told), rows in by_kind.items():
        kind = tiles.Kind(*[getattr(tiles.tl, _NAMES[one]) for one in (dtype, other)], *told)
        tables.append(_table(kind, rows, block, programs or num_programs(device)))
    words = np.concatenate([table.words for table in tables])
    on_device = sent(torch.tensor(words, dtype=torch.int64, device="cpu"), device)
    for table, part in zip(tables, torch.split(on_device, [len(table.words) for table in tables]), strict=True):
        table.sent = part
    return tables


def _table(kind: Any, columns: Sequence[tuple[int, ...]], block: int, programs: int) -> Table:
    """``columns``: of each piece."""
    rows = np.array(columns, dtype=np.int64)
    numels = rows[:, _NUMEL]
    ends = np.cumsum(-(-numels // block))  # in tiles
    begins = ends - -(-numels // block)
    by_program = np.arange(programs + 1) * ends[-1] // programs
    cuts = np.sort(np.concatenate([begins, by_program]))
    cuts = cuts[(np.diff(cuts, prepend=-1) > 0) & (cuts < ends[-1])]  # np.unique takes ten times as long
    owners = np.searchsorted(ends, cuts, side="right")
    start = (cuts - begins[owners]) * block

    table = rows[owners]
    table[:, _NUMEL] = np.minimum((np.append(cuts[1:], ends[-1]) - cuts) * block, numels[owners] - start)
    num_bits = {_VALUES: kind.dtype.primitive_bitwidth, _OTHER: kind.other.primitive_bitwidth, _OUT: 8, _MASK: 8}
    for column, num in num_bits.items():
        table[:, column] += start * num // 8 * (table[:, column] != 0)
    table[:, _START] += start
    # All begin at multiples of 16 bytes: kernels are compiled for how pointers are aligned.
    rest, firsts = np.zeros(table.size % 2, dtype=np.int64), np.searchsorted(cuts, by_program)
    words = np.concatenate([table.reshape(-1), rest, firsts, firsts[: len(firsts) % 2]])
    return Table(words, table.size + len(rest), (programs,), kind)
