"""The units that stay, as a journal and a report have them: a list of entries for each block, with ranges as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distprune.models.units import UnitKind, find_all_units
from distprune.removal.plan import Kept


def num_units(model: nn.Module, kinds: Sequence[UnitKind]) -> dict[tuple[str, UnitKind, str], int]:
    """Return how many units there are, by block, kind and place."""
    return {
        (name, kind, units.name): units.num_units
        for kind in kinds
        for name, of_block in find_all_units(model, kind)
        for units in of_block
    }


def entries_of(kept: Kept, num_before: Mapping[tuple[str, UnitKind, str], int]) -> dict[str, list[dict[str, Any]]]:
    """Return what stays of each block, by its name, as the journal and the report have it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, units in kept.items():
        block, kind, place = key
        entry = {"kind": kind, "place": place, "num_before": num_before[key], "num": len(units)}
        found.setdefault(block, []).append({**entry, "units": as_text(units.tolist())})
    return found


def kept_of(entries: Mapping[str, Iterable[Mapping[str, Any]]]) -> Kept:
    """Return what stays, of what :func:`entries_of` returned."""
    return {
        (block, of["kind"], of["place"]): torch.tensor(list(_from_text(of["units"])), dtype=torch.int64, device="cpu")
        for block, of_block in entries.items()
        for of in of_block
    }


def as_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``"0-4,7"``."""
    # Within a run a number and its position differ by the same.
    runs = (list(run) for _, run in itertools.groupby(enumerate(numbers), lambda of: of[1] - of[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


def _from_text(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
