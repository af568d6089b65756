"""What is asked of each linear layer that reads units, the *readers*, and how large the weights of units are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import LinearLayer, expert_place, linear_layers
from distprune.models.units import Cut, UnitKind, Units, find_all_units, find_units
from distprune.oneshot.block_layers import BlockLayers
from distprune.removal.rebuild import check_ascending
from distprune.shards.device import fetched
from distprune.shards.geometry import indices_of
from distprune.shards.local_shard import LocalShard


@dataclass
class Asked:
    """What is asked of one reader: ``num_kept`` of ``units`` of block ``block`` stay.

    ``norms`` (num_units,) and ``gradients`` (out,) are found later, where the criterion needs them.
    """

    block: str
    units: Units
    num_kept: int
    linear: LinearLayer
    norms: torch.Tensor | None = None
    gradients: torch.Tensor | None = None


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
    model: nn.Module, keep: Mapping[UnitKind, int | float], layers: Sequence[int] | None, *, heals: bool
) -> Readers:
    """Return what ``keep`` and ``layers`` ask of each reader, by the blocks that stay. Local.

    Raises:
        ValueError, TypeError, NotImplementedError: see ``choose_units``.
    """
    if "experts" in keep:
        raise ValueError("experts are chosen by choose_experts, before the units of those that stay")
    blocks = decoder_blocks(model)
    if layers is not None:
        check_ascending(layers, len(blocks))
    following = dict(pairwise([*(range(len(blocks)) if layers is None else layers), len(blocks)]))
    units_of = {kind: dict(find_all_units(model, kind)) for kind in keep}
    readers = Readers({}, [], frozenset(range(len(blocks))) - following.keys(), {})
    for index, (name, block) in enumerate(blocks):
        linears, asked = linear_layers(block), dict[str, Asked]()
        for kind, share in keep.items() if index in following else ():
            for units in units_of[kind][name]:
                assert units.reader is not None  # only experts have none
                if units.reader in asked:
                    raise ValueError(
                        f"{kind} and {asked[units.reader].units.kind} are both inputs of '{name}.{units.reader}': "
                        "remove one of them, then the other"
                    )
                num_kept = num_to_keep(units, share, f"{name}.{units.name}")
                asked[units.reader] = Asked(name, units, num_kept, linears[units.reader])
        last = _last_mlp(block, linears) if heals and following.get(index, 0) > index + 1 else None
        if last is not None and last.reader is not None:
            readers.healed[index] = last.reader
            asked.setdefault(last.reader, Asked(name, last, last.num_units, linears[last.reader]))
        readers.asked.update((f"{name}.{reader}", of_reader) for reader, of_reader in asked.items())
        readers.linears.append(BlockLayers({reader: of_reader.linear for reader, of_reader in asked.items()}, {}))
    return readers


def num_to_keep(units: Units, size: int | float, place: str) -> int:
    """Return how many of ``units`` at ``place`` stay, as many of each group; raises as :func:`number_of`. Local."""
    return number_of(size, units.num_units, units.kind, f" of {place!r}", units.num_groups, units.min_kept)


def number_of(size: int | float, num_all: int, kind: str, where: str = "", num_groups: int = 1, least: int = 1) -> int:
    """Return how many of ``num_all`` stay: ``size``, or as a float a share, rounded to as many of each group. Local.

    Raises:
        TypeError: ``size`` is no number.
        ValueError: more than are there, too few, or not as many of each group; it says which are possible.
    """
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"{kind}: a number of units or a share of them, not {size!r}")
    if isinstance(size, float) and not 0 < size <= 1:
        raise ValueError(f"{kind}: the share {size} is not in (0, 1]")
    num = max(1, round(size * (num_all // num_groups))) * num_groups if isinstance(size, float) else size
    if not least <= num <= num_all or num % num_groups:
        multiples = "" if num_groups == 1 else f"multiples of {num_groups}, one for each group, from "
        raise ValueError(
            f"{kind}: {size} of the {num_all}{where} cannot stay; possible are {multiples}{least} to {num_all}"
        )
    return num


def _last_mlp(block: nn.Module, linears: Mapping[str, LinearLayer]) -> Units | None:
    """Return the units of the MLP whose outputs are the last to be added to hidden states, if that is known."""
    try:
        places = [units for units in find_units(block, "mlp") if units.reader in linears]
    except NotImplementedError:
        return None
    return places[0] if len(places) == 1 else None


def find_norms(comm: Communicator, asked: Collection[Asked], shards: Mapping[str, LocalShard]) -> None:
    """Set the ``norms`` of each of ``asked``: the sums of squares of all weights that leave with a unit, float64.

    ``shards``: this rank's part of every parameter that is cut, by name, owners settled. Every rank must call it: a
    round of 8 bytes a unit.
    """
    sizes = [one.units.num_units for one in asked]
    cuts = [
        (number, cut, shard)
        for number, one in enumerate(asked)
        for cut in one.units.cuts
        if (shard := shards[f"{one.block}.{cut.parameter}"]).owned and shard.local.numel()
    ]

    def fill(words: torch.Tensor) -> None:
        parts = torch.split(words, sizes)
        all_squares = fetched([_squares(shard, cut) for _, cut, shard in cuts])
        for (number, cut, shard), squares in zip(cuts, all_squares, strict=True):
            by_place = torch.zeros(shard.shape[cut.dim], dtype=torch.float64, device="cpu")
            by_place[indices_of(shard.geometry.dim_runs[cut.dim])] = squares
            parts[number].add_(by_place[cut.index].sum(dim=1))

    norms = sum_together(comm, (sum(sizes),), fill, torch.float64)
    for one, of_units in zip(asked, torch.split(norms, sizes), strict=True):
        one.norms = of_units


def _squares(shard: LocalShard, cut: Cut) -> torch.Tensor:
    """Return the sums of squares of this rank's weights by their place along the cut's dim, float64."""
    local = shard.local
    if cut.expert is not None:
        if (place := expert_place(shard.geometry.dim_runs[0], cut.expert)) is None:
            return torch.zeros(local.shape[cut.dim], dtype=torch.float64, device=local.device)
        local = local.narrow(0, place, 1)
    by_place = local.movedim(cut.dim, 0).reshape(local.shape[cut.dim], -1)
    norms: torch.Tensor = torch.linalg.vector_norm(by_place, dim=1, dtype=torch.float64)
    return norms.square()
