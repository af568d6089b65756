"""The units that stay, as a journal and a report have them: a list of entries for each block, with ranges as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distprune.models import UnitKind, find_all_units
from distprune.removal import Kept

__all__ = ["as_text", "by_block", "entries_of", "kept_of", "num_units"]


def num_units(model: nn.Module, kinds: Sequence[UnitKind]) -> dict[tuple[str, UnitKind, str], int]:
    """Return how many units there are, by block, kind and place."""
    return {
        (name, kind, units.name): units.num_units
        for kind in kinds
        for name, of_block in find_all_units(model, kind)
        for units in of_block
    }


def by_block(kept: Kept) -> dict[str, Kept]:
    """Return what stays of each block, by its name."""
    found: dict[str, dict[tuple[str, UnitKind, str], torch.Tensor]] = {}
    for key, units in kept.items():
        found.setdefault(key[0], {})[key] = units
    return dict(found)


def entries_of(kept: Kept, num_before: Mapping[tuple[str, UnitKind, str], int]) -> list[dict[str, Any]]:
    """Return what stays of one block as the journal and the report have it."""
    return [
        {"kind": key[1], "place": key[2], "num_before": num_before[key], "num": len(of), "units": as_text(of.tolist())}
        for key, of in kept.items()
    ]


def kept_of(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> Kept:
    """Return what stays, of the names of blocks and their entries."""
    return {(block, of["kind"], of["place"]): torch.tensor(list(_from_text(of["units"]))) for block, of in entries}


def as_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``"0-4,7"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _from_text(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
