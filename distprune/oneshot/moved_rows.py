"""All rows of a map on one rank, for as long as it works on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives import Communicator, swap_together, together
from distprune.oneshot.rows import Rows
from distprune.shards import Runs

__all__ = ["MovedRows", "move_rows"]


@dataclass(frozen=True)
class _Move:
    """One map's way to its ``home``. ``runs``: of every rank, before; ``sources``: ranks whose rows the home lacks."""

    home: int
    runs: list[Runs]
    sources: list[int]
    row_bytes: int

    def size(self, rank: int) -> int:
        return self.row_bytes * sum(stop - start for start, stop in self.runs[rank])


@dataclass(frozen=True)
class MovedRows:
    """``rows`` of every map behind :func:`move_rows`; :meth:`back` ends it. ``error``: what kept rows from arriving."""

    rows: dict[str, Rows]
    error: Exception | None
    _comm: Communicator
    _before: Mapping[str, Rows]
    _moves: Mapping[str, _Move]

    def back(self) -> None:
        """Write the rows back to where they came from, to replicas too.

        Every rank must call it: two rounds, in one of which a home hands over what it has for the other ranks.
        """
        rank, moves = self._comm.rank, self._moves
        here = {name: move for name, move in moves.items() if move.home == rank}
        sent = [sum(move.size(to) for move in here.values()) if to != rank else 0 for to in range(self._comm.size)]
        coming = [
            sum(m.size(rank) for m in moves.values() if m.home == home and home != rank)
            for home in range(self._comm.size)
        ]

        def make() -> list[torch.Tensor]:
            return [
                _joined(
                    [v for n, m in here.items() for v in _at(self.rows[n].weight, m.runs[to])] if to != rank else []
                )
                for to in range(self._comm.size)
            ]

        received = swap_together(self._comm, make, (sent, coming))
        with together(self._comm):
            for name, move in here.items():
                before, now = self._before[name].weight, self.rows[name].weight
                if now is not before:
                    for own, view in zip(_split(before, move.runs[rank]), _at(now, move.runs[rank]), strict=True):
                        own.copy_(view)
            for home, piece in enumerate(received):
                _write(piece, [self._before[n].weight for n, m in moves.items() if m.home == home and home != rank])


def move_rows(comm: Communicator, rows: Mapping[str, Rows], home: Mapping[str, int]) -> MovedRows:
    """Return ``rows`` with all of map ``name`` on rank ``home[name]``, which counts them, and none of it elsewhere.

    Maps without a home stay as they are. What is written into rows that moved is in ``rows``, wherever they
    are held, after ``back()``. Every rank must call it, with the same homes: 3 rounds, two of a few bytes for
    each rank and map and one in which a rank hands over at most what it holds.
    """
    held = comm.gather([[rows[name].runs, rows[name].owned] for name in home])
    found, moves = dict(rows), {}
    for i, (name, to) in enumerate(home.items()):
        runs = [tuple((start, stop) for start, stop in of_rank[i][0]) for of_rank in held]
        # Nothing has to come of what the home holds itself, a replica as it may be.
        sources = [rank for rank in range(comm.size) if held[rank][i][1] and runs[rank] != runs[to]]
        moves[name] = _Move(to, runs, sources, rows[name].num_in * rows[name].weight.element_size())
    own = [(move.home, move.size(comm.rank)) for move in moves.values() if comm.rank in move.sources]
    sent = [sum(size for to, size in own if to == rank) for rank in range(comm.size)]
    here = [(name, move) for name, move in moves.items() if move.home == comm.rank]
    coming = [sum(move.size(rank) for _, move in here if rank in move.sources) for rank in range(comm.size)]

    def make() -> list[torch.Tensor]:
        pieces: list[list[torch.Tensor]] = [[] for _ in range(comm.size)]
        for name, move in moves.items():
            before = rows[name]
            if comm.rank != move.home:
                pieces[move.home] += [before.weight] if comm.rank in move.sources else []
                found[name] = Rows(before.weight.new_empty((0, before.num_in)), (), before.num_out, False, before.name)
                continue
            whole = before.weight
            if move.sources:
                whole = whole.new_empty((before.num_out, before.num_in))
                runs = move.runs[comm.rank]
                for view, part in zip(_at(whole, runs), _split(before.weight, runs), strict=True):
                    view.copy_(part)
            found[name] = Rows(whole, ((0, before.num_out),), before.num_out, True, before.name)
        return [_joined(views) for views in pieces]

    error: Exception | None = None
    received = swap_together(comm, make, (sent, coming))
    try:
        for rank, piece in enumerate(received):
            arriving = [(found[name].weight, move.runs[rank]) for name, move in here if rank in move.sources]
            _write(piece, [view for whole, runs in arriving for view in _at(whole, runs)])
    except Exception as caught:
        error = caught
    return MovedRows(found, error, comm, rows, moves)


def _at(whole: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    return [whole[start:stop] for start, stop in runs]


def _split(local: torch.Tensor, runs: Runs) -> Sequence[torch.Tensor]:
    return torch.split(local, [stop - start for start, stop in runs]) if runs else ()


def _joined(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``views`` as the bytes that travel."""
    return torch.cat(
        [torch.empty(0, dtype=torch.uint8), *(v.contiguous().view(-1).view(torch.uint8).cpu() for v in views)]
    )


def _write(piece: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Write into ``views`` what was joined of as many elements of the same dtypes."""
    for view, part in zip(views, torch.split(piece, [view.nbytes for view in views]) if views else (), strict=True):
        view.copy_(part.clone().view(view.dtype).view(view.shape))  # a copy is aligned for any dtype
