"""The channels of a block that can change places: it puts out the same in any order of them.

An MLP's, all of them; and values, within each key and value head, where the query heads that share it read them alike.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from distprune.models.units import Cut, UnitKind, Units, find_units, head_dim
from distprune.oneshot.block_layers import num_places


@dataclass(frozen=True)
class MovableChannels:
    """Channels that change places within ``num_heads`` parts of equally many consecutive ones.

    ``cuts``: what of each parameter goes with each channel; ``reader_index`` (channels, copies): which of the inputs of
    the linear layer ``reader``.
    """

    num_heads: int
    cuts: tuple[Cut, ...]
    reader: str
    reader_index: torch.Tensor  # int64

    @property
    def num_channels(self) -> int:
        return len(self.reader_index)


def find_channels(model: nn.Module, block: nn.Module, readers: Collection[str], m: int) -> dict[str, MovableChannels]:
    """Return the channels of ``block`` that can change places, by which of the ``readers`` reads them. Local.

    None of experts; none with a parameter that ``model`` has in another place, too; none where buffers or parameters
    are not known, such as masks and adapters; none of which a part is not a multiple of ``m``, or a single group; no
    values that other blocks may read, too.
    """
    places = num_places(model)
    parameters = dict(block.named_parameters(remove_duplicate=False))

    def can_move(channels: MovableChannels) -> bool:
        length = channels.num_channels // channels.num_heads
        return make_groups(length, m) and all(places[id(parameters.get(cut.parameter))] == 1 for cut in channels.cuts)

    of_kind: list[tuple[UnitKind, Callable[[nn.Module, Units], MovableChannels | None]]]
    of_kind = [("kv_groups", _values), ("mlp", _all_of_mlp)]
    found = [channels_of(block, units) for kind, channels_of in of_kind for units in _units(block, kind)]
    return {of.reader: of for of in found if of is not None and of.reader in readers and can_move(of)}


def make_groups(length: int, m: int) -> bool:
    """Return whether ``length`` channels are whole groups of ``m``, and more than one."""
    return length % m == 0 and length > m


def _units(block: nn.Module, kind: UnitKind) -> list[Units]:
    try:
        return [units for units in find_units(block, kind) if units.cuts[0].expert is None]
    except NotImplementedError:  # they are not each other's like
        return []


def _all_of_mlp(block: nn.Module, units: Units) -> MovableChannels | None:
    module, num = block.get_submodule(units.name), units.num_units
    others = {name for name, of in module.named_parameters(units.name) if num in of.shape} - _known(units)
    if units.reader is None or units.reader_index is None or others or next(module.buffers(), None) is not None:
        return None
    return MovableChannels(1, units.cuts, units.reader, units.reader_index)


def _values(block: nn.Module, units: Units) -> MovableChannels | None:
    """Return the values of KV groups: of each group the last rows of the layer that makes them."""
    module = block.get_submodule(units.name)
    others = {name for name, _ in module.named_parameters(units.name)} - _known(units)
    are_others_of_queries = all(name.removeprefix(f"{units.name}.")[0] in "qk" for name in others)
    is_shared = hasattr(module, "is_kv_shared_layer")  # of Gemma 3n and others, whose later blocks read them, too
    if units.reader is None or units.reader_index is None or not are_others_of_queries or is_shared:
        return None
    size, num_heads = head_dim(module), units.num_units
    read = units.reader_index.view(num_heads, -1, size).transpose(1, 2).reshape(num_heads * size, -1)
    *made, reader = units.cuts
    cuts = [dataclasses.replace(cut, index=cut.index[:, -size:].reshape(-1, 1)) for cut in made if _is_of_values(cut)]
    cuts.append(dataclasses.replace(reader, index=read))
    holders = [block.get_submodule(cut.parameter.rpartition(".")[0]) for cut in cuts]
    if any(next(of.buffers(), None) is not None for of in holders):
        return None
    return MovableChannels(num_heads, tuple(cuts), units.reader, read)


def _known(units: Units) -> set[str]:
    """Return which parameters are known: those that have channels, and what the reader adds behind them."""
    return {cut.parameter for cut in units.cuts} | {f"{units.reader}.bias"}


def _is_of_values(cut: Cut) -> bool:
    return re.search(r"(^|\.)(qkv_proj|v[^.]*)\.(weight|bias)$", cut.parameter) is not None
