"""All rows of a map on one rank, for as long as it works on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.calibration.rows import Rows
from distprune.collectives import Communicator
from distprune.shards import Runs

__all__ = ["MovedRows", "move_rows"]

_Views = list[list[torch.Tensor]]  # rows for, or from, every rank, in the order in which they travel


@dataclass(frozen=True)
class MovedRows:
    """``rows`` of every map behind :func:`move_rows`; :meth:`back` ends it."""

    rows: dict[str, Rows]
    _comm: Communicator
    _before: Mapping[str, Rows]
    _home: Mapping[str, int]
    _runs: Mapping[str, Sequence[Runs]]  # of every rank, before

    def back(self) -> None:
        """Write the rows back to where they came from, to replicas too.

        Every rank must call it: one round, in which a home hands over what it has for the other ranks.
        """
        sent, coming = _views(self._comm), _views(self._comm)
        for name, home in self._home.items():
            before = self._before[name].weight
            if home != self._comm.rank:
                coming[home].append(before)
                continue
            now = self.rows[name].weight
            for rank, runs in enumerate(self._runs[name]):
                if rank != home:
                    sent[rank] += _at(now, runs)
                elif now is not before:
                    for own, view in zip(_split(before, runs), _at(now, runs), strict=True):
                        own.copy_(view)
        _hand_over(self._comm, sent, coming)


def move_rows(comm: Communicator, rows: Mapping[str, Rows], home: Mapping[str, int]) -> MovedRows:
    """Return ``rows`` with all of map ``name`` on rank ``home[name]``, which counts them, and none of it elsewhere.

    Maps without a home stay as they are. What is written into rows that moved is in ``rows``, wherever they
    are held, after ``back()``. Every rank must call it, with the same homes: 3 rounds, two of a few bytes for
    each rank and map and one in which a rank hands over at most what it holds.
    """
    held = comm.gather([[rows[name].runs, rows[name].owned] for name in home])
    sent, coming = _views(comm), _views(comm)
    found, runs_of = dict(rows), {}
    for i, (name, to) in enumerate(home.items()):
        before = rows[name]
        runs = runs_of[name] = [tuple((start, stop) for start, stop in of_rank[i][0]) for of_rank in held]
        # Nothing has to come of what the home holds itself, a replica as it may be.
        sources = [rank for rank in range(comm.size) if held[rank][i][1] and runs[rank] != runs[to]]
        if comm.rank != to:
            sent[to] += [before.weight] if comm.rank in sources else []
            found[name] = Rows(before.weight.new_empty((0, before.num_in)), (), before.num_out, owned=False)
            continue
        whole = before.weight
        if sources:
            whole = whole.new_empty((before.num_out, before.num_in))
            for view, own in zip(_at(whole, runs[to]), _split(before.weight, runs[to]), strict=True):
                view.copy_(own)
            for rank in sources:
                coming[rank] += _at(whole, runs[rank])
        found[name] = Rows(whole, ((0, before.num_out),), before.num_out, owned=True)
    _hand_over(comm, sent, coming)
    return MovedRows(found, comm, rows, home, runs_of)


def _views(comm: Communicator) -> _Views:
    return [[] for _ in range(comm.size)]


def _at(whole: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    return [whole[start:stop] for start, stop in runs]


def _split(local: torch.Tensor, runs: Runs) -> Sequence[torch.Tensor]:
    return torch.split(local, [stop - start for start, stop in runs]) if runs else ()


def _hand_over(comm: Communicator, sent: _Views, coming: _Views) -> None:
    """Write ``sent[r]`` of this rank into ``coming[this rank]`` of rank r: as many elements, of the same dtype."""
    empty = torch.empty(0, dtype=torch.uint8)
    pieces = [torch.cat([_bytes(view) for view in views]) if views else empty for views in sent]
    sizes = [sum(view.nbytes for view in views) for views in coming]
    for received, views in zip(comm.swap(pieces, sizes), coming, strict=True):
        parts = torch.split(received, [view.nbytes for view in views]) if views else ()
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.clone().view(view.dtype).view(view.shape))  # a copy is aligned for any dtype


def _bytes(view: torch.Tensor) -> torch.Tensor:
    return view.contiguous().view(-1).view(torch.uint8)
