"""All rows of a layer on one rank, for as long as it works on them.

Which rows a rank holds of a layer concerns the layer's owner alone, so it alone is told: no rank ever works on, or
hears of, what others hold of layers that are not its own. And they hold it of every block alike, so they are told once.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from distprune.collectives.agree import same_everywhere, sum_together, swap_known, swap_unknown, together
from distprune.collectives.base import Communicator, as_told
from distprune.collectives.tensors import as_bytes, from_bytes
from distprune.oneshot.rows import Rows
from distprune.shards.device import fetched, sent
from distprune.shards.geometry import Runs


@dataclass(frozen=True)
class _HeldRows:
    """What one rank holds of layer number ``layer``. It ``goes`` to the owner, unless that holds the same rows."""

    layer: int
    runs: Runs
    goes: bool


@dataclass(frozen=True)
class _Plan:
    """Who holds what: ``held`` by this rank, by the layers' owners; and by the others of its own layers, by rank."""

    held: Mapping[int, Sequence[_HeldRows]]
    of_others: Mapping[int, Sequence[_HeldRows]]


@dataclass
class _Plans:
    """The plans that the ranks of one group have found so far, in the order in which all of them did.

    ``number_of``: the last one for what this rank held then.
    """

    plans: list[_Plan] = field(default_factory=list)
    number_of: dict[str, int] = field(default_factory=dict)


_plans: WeakKeyDictionary[Communicator, _Plans] = WeakKeyDictionary()


@dataclass(frozen=True)
class MovedRows:
    """``rows`` of every layer after :func:`move_rows`; :meth:`back` ends it. ``error``: why rows did not arrive."""

    rows: dict[str, Rows]
    error: Exception | None
    _comm: Communicator
    _before: Sequence[Rows]  # of the layers that have an owner, as the plan numbers them
    _now: Sequence[Rows]
    _plan: _Plan

    def back(self) -> None:
        """Write the rows back to where they came from, to replicas too.

        Every rank must call it: two rounds, in one of which an owner hands over what it has for the other ranks.
        """
        comm, before, now, plan = self._comm, self._before, self._now, self._plan
        sizes = _sizes(comm, before, plan.of_others), _sizes(comm, before, plan.held)

        def make() -> dict[int, torch.Tensor]:
            views = {
                rank: [view for part in parts for view in _at(now[part.layer].weight, part.runs)]
                for rank, parts in plan.of_others.items()
            }
            return _pieces(views)

        received = swap_known(comm, make, sizes)
        with together(comm):
            for old, new in zip(before, now, strict=True):
                if new.owned and new.weight is not old.weight:
                    _copy(_split(old.weight, old.runs), _at(new.weight, old.runs))
            for owner, parts in plan.held.items():
                _write(received[owner], [before[part.layer].weight for part in parts])


def move_rows(comm: Communicator, rows: Mapping[str, Rows], owner: Mapping[str, int]) -> MovedRows:
    """Return ``rows`` with all of layer ``name`` on rank ``owner[name]``, which counts them, and none of it elsewhere.

    Layers without an owner stay as they are. What is written into rows that moved is in ``rows``, wherever they
    are held, after ``back()``. Every rank must call it, with the same owners: 2 rounds, one of 64 bytes and one in
    which a rank hands over at most what it holds. The first time that ranks hold rows like these, 4 more: 8 bytes a
    layer, 8 a rank, about 20 for each layer of which this rank holds rows, and 64.
    """
    before, owners = [rows[name] for name in owner], list(owner.values())
    plan = _plan_of(comm, before, owners)
    going = {to: [part for part in parts if part.goes] for to, parts in plan.held.items()}
    coming = {rank: [part for part in parts if part.goes] for rank, parts in plan.of_others.items()}
    arriving = {part.layer for parts in coming.values() for part in parts}
    now: list[Rows] = []

    def make() -> dict[int, torch.Tensor]:
        for i, (of, to) in enumerate(zip(before, owners, strict=True)):
            whole, is_owner = of.weight, comm.rank == to
            if not is_owner:
                whole = whole.new_empty((0, of.num_in))
            elif i in arriving:
                whole = whole.new_empty((of.num_out, of.num_in))
                _copy(_at(whole, of.runs), _split(of.weight, of.runs))
            now.append(Rows(whole, ((0, of.num_out),) if is_owner else (), of.num_out, is_owner, of.name))
        return _pieces({to: [before[part.layer].weight for part in parts] for to, parts in going.items()})

    error: Exception | None = None
    received = swap_known(comm, make, (_sizes(comm, before, going), _sizes(comm, before, coming)))
    try:
        for rank, parts in coming.items():
            _write(received[rank], [view for part in parts for view in _at(now[part.layer].weight, part.runs)])
    except BaseException as caught:
        error = as_told(caught)
    return MovedRows({**rows, **dict(zip(owner, now, strict=True))}, error, comm, before, now, plan)


def _plan_of(comm: Communicator, rows: Sequence[Rows], owners: Sequence[int]) -> _Plan:
    """Return the plan of ``rows``; it is found once. Every rank must call it: a round of 64 bytes, and four for that.

    Ranks that all name one number took part in finding that plan, and hold what they held then.
    """
    known, text, error = _plans.setdefault(comm, _Plans()), "", None
    try:
        text = repr((owners, [(part.runs, part.owned) for part in rows]))
    except BaseException as caught:
        error = as_told(caught)
    is_same = same_everywhere(comm, known.number_of.get(text), error=error)[0]
    if not is_same or text not in known.number_of:
        plan = _who_holds_what(comm, rows, owners)
        known.number_of[text] = len(known.plans)
        known.plans.append(plan)
    return known.plans[known.number_of[text]]


def _who_holds_what(comm: Communicator, rows: Sequence[Rows], owners: Sequence[int]) -> _Plan:
    """Find out the plan of ``rows``, by the layers' numbers. Every rank must call it: four rounds."""
    at_owner: list[int] = []  # of each layer, a digest of which rows its owner holds
    held: dict[int, list[_HeldRows]] = defaultdict(list)
    of_owner: dict[int, list[int]] = defaultdict(list)  # the layers of each
    for layer, to in enumerate(owners):
        of_owner[to].append(layer)

    def tell(words: torch.Tensor) -> None:
        at_owner.extend(_digest_of(part.runs) for part in rows)
        own = [digest if to == comm.rank else 0 for digest, to in zip(at_owner, owners, strict=True)]
        words.copy_(torch.tensor(own, dtype=torch.int64, device="cpu"))

    digests = sum_together(comm, (len(rows),), tell).tolist()

    def make() -> dict[int, torch.Tensor]:
        told: dict[int, list[tuple[int, Runs, bool]]] = defaultdict(list)
        for to, layers in of_owner.items():
            for number, layer in enumerate(layers) if to != comm.rank else ():
                of = rows[layer]
                if of.runs:
                    held[to].append(_HeldRows(layer, of.runs, of.owned and at_owner[layer] != digests[layer]))
                    told[to].append((number, of.runs, held[to][-1].goes))
        texts = {to: bytearray(json.dumps(of_rank).encode()) for to, of_rank in told.items()}
        return {to: torch.frombuffer(text, dtype=torch.uint8) for to, text in texts.items()}

    received = swap_unknown(comm, make)
    of_others: dict[int, list[_HeldRows]] = {}
    with together(comm):
        for rank, piece in enumerate(received):
            if piece.numel():
                of_others[rank] = [
                    _HeldRows(of_owner[comm.rank][number], tuple((start, stop) for start, stop in runs), goes)
                    for number, runs, goes in json.loads(bytes(piece.numpy()))
                ]
    return _Plan(held, of_others)


def _digest_of(runs: Runs) -> int:
    return int.from_bytes(hashlib.sha256(repr(runs).encode()).digest()[:7], "little")


def _sizes(comm: Communicator, rows: Sequence[Rows], parts: Mapping[int, Sequence[_HeldRows]]) -> list[int]:
    """Return how many bytes of ``rows`` the ``parts`` for, or from, each rank are."""
    sizes = [0] * comm.size
    for rank, of_rank in parts.items():
        for part in of_rank:
            row = rows[part.layer].num_in * rows[part.layer].weight.element_size()
            sizes[rank] += row * sum(stop - start for start, stop in part.runs)
    return sizes


def _pieces(tensors: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Return what goes away, by rank. One wait for a device."""
    there = iter(fetched([tensor for of_rank in tensors.values() for tensor in of_rank]) if tensors else ())
    return {rank: as_bytes([next(there) for _ in of_rank]) for rank, of_rank in tensors.items()}


def _at(whole: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    return [whole[start:stop] for start, stop in runs]


def _split(local: torch.Tensor, runs: Runs) -> Sequence[torch.Tensor]:
    return torch.split(local, [stop - start for start, stop in runs]) if runs else ()


def _copy(views: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for view, source in zip(views, sources, strict=True):
        view.copy_(source)


def _write(piece: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Write into ``views``, of one device, what was joined of as many elements of the same dtypes."""
    if views:
        _copy(views, from_bytes(sent(piece, views[0].device), views))
