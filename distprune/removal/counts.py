"""How many parameters decoder blocks have at which sizes, and which sizes they can have. No communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from distprune.models import UNIT_KINDS, UnitKind, Units, decoder_blocks, find_all_units
from distprune.removal.plan import step_of
from distprune.removal.readers import num_to_keep
from distprune.removal.rebuild import check_layers
from distprune.removal.sizes import Sizes

__all__ = ["BlockCounts", "can_lose_layers", "possible_sizes"]

_EVEN = 16  # MLP widths are multiples of it, as far as those before are: matrix products are faster


class BlockCounts:
    """Counts the parameters of each decoder block, of whatever sizes."""

    def __init__(self, model: nn.Module) -> None:
        self.found = {kind: found for kind in UNIT_KINDS if (found := _find(model, kind))}
        self._blocks: list[list[tuple[torch.Size, dict[tuple[int, UnitKind], tuple[Units, int]]]]] = []
        for index, (_, block) in enumerate(decoder_blocks(model)):
            cuts: dict[str, dict[tuple[int, UnitKind], tuple[Units, int]]] = {}
            for kind, of_kind in self.found.items():
                for units in of_kind[index][1]:
                    for cut in units.cuts:  # each slice of 3-D weights gets as small as the others
                        cuts.setdefault(cut.parameter, {})[cut.dim, kind] = units, cut.index.shape[1]
            self._blocks.append([(p.shape, cuts.get(name, {})) for name, p in block.named_parameters()])

    def num_units(self, kind: UnitKind) -> list[int]:
        """Return how many units each place has."""
        return [units.num_units for _, of in self.found.get(kind, ()) for units in of]

    def numels(self, sizes: Mapping[UnitKind, int | float]) -> list[int]:
        """Return how many parameters each block has when ``sizes`` stay, of other kinds all."""
        return [sum(_numel(*part, sizes) for part in block) for block in self._blocks]


def possible_sizes(model: nn.Module, kind: UnitKind, found: Sequence[tuple[str, Sequence[Units]]]) -> list[int | float]:
    """Return the sizes that the units ``found`` of ``kind`` can have in this layout, from the most to the least.

    Numbers; where places have unequal numbers, shares. An MLP width is a multiple of 16, as far as the one before is.
    """
    step, places = step_of(model, found), [units for _, of in found for units in of]
    common = math.gcd(*(units.num_units // units.num_groups for units in places))
    sizes: list[int | float] = []
    for part in range(common - 1, 0, -1):
        kept = {units.num_units: units.num_units * part // common for units in places}
        even = math.gcd(_EVEN, *kept) if kind == "mlp" and len(kept) == 1 else 1
        if all(num % math.lcm(step, even) == 0 for num in kept.values()):
            sizes.append(next(iter(kept.values())) if len(kept) == 1 else part / common)
    if kind == "mlp":  # all or none
        return sizes if sizes and _is_possible(model, kind, sizes[0]) else []
    return [size for size in sizes if _is_possible(model, kind, size)]


def can_lose_layers(model: nn.Module) -> bool:
    """Return whether a decoder layer of ``model`` can leave, the first one say."""
    try:
        check_layers(model, range(1, len(decoder_blocks(model))))
    except (ValueError, NotImplementedError):
        return False
    return True


def _find(model: nn.Module, kind: UnitKind) -> list[tuple[str, list[Units]]]:
    try:
        return find_all_units(model, kind)
    except NotImplementedError:
        return []


def _is_possible(model: nn.Module, kind: UnitKind, size: int | float) -> bool:
    try:
        Sizes(**{kind: size}).check(model)
    except (ValueError, NotImplementedError):
        return False
    return True


def _numel(
    shape: torch.Size, cuts: Mapping[tuple[int, UnitKind], tuple[Units, int]], sizes: Mapping[UnitKind, int | float]
) -> int:
    left = list(shape)
    for (dim, kind), (units, width) in cuts.items():
        if kind in sizes:
            left[dim] -= (units.num_units - num_to_keep(units, sizes[kind], units.name)) * width
    return math.prod(left)
