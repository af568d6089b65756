"""What is asked of each linear layer that reads units, the *readers*: checked before anything changes. Local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.models.units import UnitKind, Units, find_all_units, find_units
from distprune.oneshot.block_layers import BlockLayers
from distprune.removal.plan import check_ascending
from distprune.removal.remover import Asked


@dataclass(frozen=True)
class Readers:
    """``asked`` by the reader's name in the model; ``linears`` are the readers of each block; ``skipped`` blocks go.

    ``healed`` names, by block, the linear layer that makes up for the blocks that go behind it.
    """

    asked: dict[str, Asked]
    linears: list[BlockLayers]
    skipped: frozenset[int]
    healed: dict[int, str]


def find_readers(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    keep: Mapping[UnitKind, int | float],
    layers: Sequence[int] | None,
    *,
    heals: bool,
) -> Readers:
    """Return what ``keep`` and ``layers`` ask of each reader, by the blocks that stay.

    Raises:
        ValueError, TypeError, NotImplementedError: see ``choose_units``.
    """
    if "experts" in keep:
        raise ValueError("experts are chosen by choose_experts, before the units of those that stay")
    if layers is not None:
        check_ascending(layers, len(blocks))
    kept = range(len(blocks)) if layers is None else layers
    of_kinds = {kind: dict(find_all_units(model, kind)) for kind in keep}
    asked: dict[str, Asked] = {}
    healed: dict[int, str] = {}
    of_blocks: list[BlockLayers] = []
    following = dict(pairwise([*kept, len(blocks)]))
    for index, (name, block) in enumerate(blocks):
        linears = linear_layers(block)
        of_block: dict[str, Asked] = {}
        for kind, share in keep.items() if index in following else ():
            for units in of_kinds[kind][name]:
                assert units.reader is not None  # only experts have none
                if units.reader in of_block:
                    raise ValueError(
                        f"{kind} and {of_block[units.reader].units.kind} are both inputs of "
                        f"'{name}.{units.reader}': remove one of them, then the other"
                    )
                num_kept = num_to_keep(units, share, f"{name}.{units.name}")
                of_block[units.reader] = Asked(name, units, num_kept, linears[units.reader])
        if heals and following.get(index, 0) > index + 1 and (last := _last_mlp(block, linears)) is not None:
            assert last.reader is not None
            healed[index] = last.reader
            of_block.setdefault(last.reader, Asked(name, last, last.num_units, linears[last.reader]))
        asked |= {f"{name}.{reader}": of for reader, of in of_block.items()}
        of_blocks.append(BlockLayers({reader: of.linear for reader, of in of_block.items()}, {}))
    return Readers(asked, of_blocks, frozenset(range(len(blocks))) - following.keys(), healed)


def num_to_keep(units: Units, share: int | float, name: str) -> int:
    """Return how many of ``units`` stay: a number, or a share of them, rounded to as many in each group.

    Raises:
        TypeError: ``share`` is no number.
        ValueError: more than are there, none, or not as many in each group; it says which are possible.
    """
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"keep {units.kind}: a number of units or a share of them, not {share!r}")
    num_groups, size = units.num_groups, units.num_units // units.num_groups
    if isinstance(share, float):
        if not 0 < share <= 1:
            raise ValueError(f"keep {units.kind}: the share {share} is not in (0, 1]")
        return max(1, round(share * size)) * num_groups
    if not 1 <= share <= units.num_units or share % num_groups:
        multiples = "" if num_groups == 1 else f"multiples of {num_groups}, one for each group, "
        raise ValueError(
            f"keep {units.kind}: {share} of the {units.num_units} of {name!r} cannot stay; possible are {multiples}"
            f"up to {units.num_units}"
        )
    return share


def _last_mlp(block: nn.Module, linears: Mapping[str, LinearLayer]) -> Units | None:
    """Return the units of the MLP whose outputs are the last to be added to hidden states, if that is known."""
    try:
        found = [units for units in find_units(block, "mlp") if units.reader in linears]
    except NotImplementedError:
        return None
    return found[0] if len(found) == 1 else None
