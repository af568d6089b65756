"""The units that stay, as records and reports have them: a list of entries for each block, with ranges as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distprune.models.units import UnitKind, find_all_units
from distprune.removal.plan import Kept

Entry = dict[str, Any]


def num_units(model: nn.Module, kinds: Sequence[UnitKind]) -> dict[tuple[str, UnitKind, str], int]:
    """Return how many units there are, by block, kind and place."""
    return {
        (name, kind, units.name): units.num_units
        for kind in kinds
        for name, of_block in find_all_units(model, kind)
        for units in of_block
    }


def entries_of(kept: Kept, num_before: Mapping[tuple[str, UnitKind, str], int]) -> dict[str, list[Entry]]:
    """Return what stays of each block, by its name, as records and the report have it."""
    entries: dict[str, list[Entry]] = {}
    for key, units in kept.items():
        block, kind, place = key
        entry = {"kind": kind, "place": place, "num_before": num_before[key], "num": len(units)}
        entries.setdefault(block, []).append({**entry, "units": as_text(units.tolist())})
    return entries


def kept_of(entries: Mapping[str, Iterable[Mapping[str, Any]]]) -> Kept:
    """Return what stays, of what :func:`entries_of` returned."""
    return {
        (block, entry["kind"], entry["place"]): torch.tensor(
            list(_from_text(entry["units"])), dtype=torch.int64, device="cpu"
        )
        for block, some in entries.items()
        for entry in some
    }


def as_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``"0-4,7"``."""
    # Within a run a number and its position differ by the same.
    runs = (list(run) for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


def _from_text(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
