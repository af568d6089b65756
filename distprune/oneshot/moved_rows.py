"""All rows of a layer on one rank, for as long as it works on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives import Communicator, as_bytes, from_bytes, swap_known, together
from distprune.oneshot.rows import Rows
from distprune.shards import Runs


@dataclass(frozen=True)
class _Move:
    """One layer's way to its ``owner``, who lacks the rows of ``sources``; ``runs``: of every rank, before."""

    owner: int
    runs: list[Runs]
    sources: list[int]
    row_bytes: int

    def size(self, rank: int) -> int:
        return self.row_bytes * sum(stop - start for start, stop in self.runs[rank])


@dataclass(frozen=True)
class MovedRows:
    """``rows`` of every layer after :func:`move_rows`; :meth:`back` ends it. ``error``: why rows did not arrive."""

    rows: dict[str, Rows]
    error: Exception | None
    _comm: Communicator
    _before: Mapping[str, Rows]
    _moves: Mapping[str, _Move]

    def back(self) -> None:
        """Write the rows back to where they came from, to replicas too.

        Every rank must call it: two rounds, in one of which an owner hands over what it has for the other ranks.
        """
        comm, moves = self._comm, self._moves
        ranks, here = range(comm.size), [name for name, move in moves.items() if move.owner == comm.rank]
        going = [here if to != comm.rank else [] for to in ranks]
        coming = [[n for n, move in moves.items() if move.owner == owner != comm.rank] for owner in ranks]
        sent = [sum(moves[name].size(to) for name in going[to]) for to in ranks]
        arriving = [sum(moves[name].size(comm.rank) for name in coming[owner]) for owner in ranks]

        def make() -> list[torch.Tensor]:
            return [
                as_bytes([v for n in going[to] for v in _at(self.rows[n].weight, moves[n].runs[to])]) for to in ranks
            ]

        received = swap_known(comm, make, (sent, arriving))
        with together(comm):
            for name in here:
                before, now, runs = self._before[name].weight, self.rows[name].weight, moves[name].runs[comm.rank]
                if now is not before:
                    _copy(_split(before, runs), _at(now, runs))
            for names, piece in zip(coming, received, strict=True):
                _write(piece, [self._before[name].weight for name in names])


def move_rows(comm: Communicator, rows: Mapping[str, Rows], owner: Mapping[str, int]) -> MovedRows:
    """Return ``rows`` with all of layer ``name`` on rank ``owner[name]``, which counts them, and none of it elsewhere.

    Layers without an owner stay as they are. What is written into rows that moved is in ``rows``, wherever they
    are held, after ``back()``. Every rank must call it, with the same owners: 3 rounds, two of a few bytes for
    each rank and layer and one in which a rank hands over at most what it holds.
    """
    held = comm.gather([[rows[name].runs, rows[name].owned] for name in owner])
    found, moves = dict(rows), {}
    for i, (name, to) in enumerate(owner.items()):
        runs = [tuple((start, stop) for start, stop in of_rank[i][0]) for of_rank in held]
        # Nothing has to come of what the owner holds itself, a replica as it may be.
        sources = [rank for rank in range(comm.size) if held[rank][i][1] and runs[rank] != runs[to]]
        moves[name] = _Move(to, runs, sources, rows[name].num_in * rows[name].weight.element_size())
    ranks = range(comm.size)
    going = [[n for n, move in moves.items() if move.owner == to and comm.rank in move.sources] for to in ranks]
    coming = [[n for n, move in moves.items() if move.owner == comm.rank and rank in move.sources] for rank in ranks]
    sent = [sum(moves[name].size(comm.rank) for name in names) for names in going]
    arriving = [sum(moves[name].size(rank) for name in coming[rank]) for rank in ranks]

    def make() -> list[torch.Tensor]:
        for name, move in moves.items():
            before, runs = rows[name], move.runs[comm.rank]
            whole, is_owner = before.weight, comm.rank == move.owner
            if not is_owner:
                whole = whole.new_empty((0, before.num_in))
            elif move.sources:
                whole = whole.new_empty((before.num_out, before.num_in))
                _copy(_at(whole, runs), _split(before.weight, runs))
            found[name] = Rows(whole, ((0, before.num_out),) if is_owner else (), before.num_out, is_owner, before.name)
        return [as_bytes([rows[name].weight for name in names]) for names in going]

    error: Exception | None = None
    received = swap_known(comm, make, (sent, arriving))
    try:
        for rank, piece in enumerate(received):
            _write(piece, [view for n in coming[rank] for view in _at(found[n].weight, moves[n].runs[rank])])
    except Exception as caught:
        error = caught
    return MovedRows(found, error, comm, rows, moves)


def _at(whole: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    return [whole[start:stop] for start, stop in runs]


def _split(local: torch.Tensor, runs: Runs) -> Sequence[torch.Tensor]:
    return torch.split(local, [stop - start for start, stop in runs]) if runs else ()


def _copy(views: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for view, source in zip(views, sources, strict=True):
        view.copy_(source)


def _write(piece: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Write into ``views`` what was joined of as many elements of the same dtypes."""
    _copy(views, from_bytes(piece, views))
