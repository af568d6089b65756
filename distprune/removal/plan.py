"""What removing units makes of every parameter; checked before anything changes. No communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.units import Cut, UnitKind, Units, find_all_units, find_units, head_dim
from distprune.removal.smaller_config import SizeChange, Smaller, shapes_of, smaller_config, tensors_of, text_config
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.fsdp2_resize import even_parts
from distprune.shards.layouts import find_flat_parts
from distprune.shards.select import KeptIndices

# By block, kind and Units.name: the units that stay, ascending.
Kept = Mapping[tuple[str, UnitKind, str], torch.Tensor]

_GROUPED_BYTES = 16  # strides of what torch's grouped_mm takes


@dataclass
class _Cutting:
    """What stays of the tensors of ``model``. ``masks``, by name and dim: (size,), or (slices, size) where each slice
    along dim 0 has its own."""

    model: nn.Module
    managed: Fsdp2Params
    masks: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def cut(self, block: str, cut: Cut, gone: torch.Tensor, units: Units) -> None:
        name = f"{block}.{cut.parameter}"
        shape, expert = attrgetter(name)(self.model).shape, cut.expert
        size, num_kept = shape[cut.dim], units.num_units - len(gone)
        parts, step, of_kernels = _steps(self.model, self.managed, name, cut, units)
        if num_kept % step or (parts and (size - len(gone) * cut.index.shape[1]) % parts):
            raise ValueError(
                f"{num_kept} {units.kind} cannot stay in {block!r}: {name!r} is cut into {parts} equal parts along "
                f"them; possible: multiples of {step}"
            )
        if num_kept % of_kernels:
            raise ValueError(
                f"{num_kept} {units.kind} cannot stay in {name!r}: grouped_mm multiplies rows of multiples of "
                f"{_GROUPED_BYTES} bytes; possible: multiples of {of_kernels}, or any with "
                "model.set_experts_implementation('eager')"
            )
        mask = self.masks.setdefault(
            (name, cut.dim), torch.ones((size,) if expert is None else (shape[0], size), dtype=torch.bool, device="cpu")
        )
        (mask if expert is None else mask[expert])[cut.index[gone].flatten()] = False

    def selections(self) -> dict[str, list[KeptIndices]]:
        """Return by full name of a parameter or buffer what stays of it, dim after dim."""
        found: dict[str, list[KeptIndices]] = {}
        for (name, dim), mask in sorted(self.masks.items()):  # dim 0 comes first: an expert that goes has no channels
            if mask.ndim == 1:
                index = mask.nonzero()[:, 0]
            else:
                if (name, 0) in self.masks:
                    mask = mask[self.masks[name, 0]]
                counts = mask.sum(dim=1)
                if bool((counts != counts[0]).any()):
                    raise ValueError(f"of the slices of {name!r} {counts.tolist()} would stay: equally many must")
                index = mask.nonzero()[:, 1].view(len(mask), -1)
            found.setdefault(name, []).append(KeptIndices(dim, index))
        return found


def check_ascending(layers: Sequence[int], num_layers: int) -> None:
    """Raise a ValueError unless ``layers`` are some of the ``num_layers`` layers, in their order. Local."""
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(f"the layers that stay must be ascending indices of 0 to {num_layers - 1}, not {list(layers)}")


def check_layout(model: nn.Module) -> None:
    """Check that parameters of ``model`` can get another size in the layout they are in. Local.

    Raises:
        NotImplementedError: they cannot, and what to do instead.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise NotImplementedError(
            "DDP keeps buckets of the sizes before: remove from the model inside, and wrap it again"
        )
    if find_flat_parts(model):
        raise NotImplementedError("FSDP1 keeps parameters flattened: shard with FSDP2 (fully_shard), or remove before")
    for path, module in model.named_modules():
        for name in module._buffers:
            if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in module._parameters:
                raise NotImplementedError(f"{path!r} is pruned and reparametrized; make it permanent first (remove)")


def step_of(model: nn.Module, kind: UnitKind) -> int:
    """Return of what the number of units of ``kind`` that stay must be a multiple in this layout. Local."""
    managed, found = Fsdp2Params(), find_all_units(model, kind)
    cuts = [(f"{block}.{cut.parameter}", cut, units) for block, of in found for units in of for cut in units.cuts]
    return math.lcm(*(step for cut in cuts for step in _steps(model, managed, *cut)[1:]))


def _steps(model: nn.Module, managed: Fsdp2Params, name: str, cut: Cut, units: Units) -> tuple[int, int, int]:
    """Return (parts, step, kernel step) of tensor ``name`` along its units.

    ``parts``: into how many equal parts it is cut; 0: into uneven ones. The number of units must be a multiple of
    ``step``, so that parts stay equal, and of the kernel step for the kernels that read the tensor.
    """
    module, attribute = holder_of(model, name)
    tensor, found = getattr(module, attribute), managed.find(module, attribute)
    in_row = _GROUPED_BYTES // (tensor.dtype if found is None else found.compute_dtype).itemsize
    is_grouped = cut.expert is not None and units.num_units % in_row == 0 and _is_grouped(model)
    of_kernels = in_row if is_grouped else 1
    parts, unit_parts = even_parts(tensor, found, cut.dim)
    if tensor.shape[cut.dim] % parts or units.num_units % unit_parts:
        return 0, 1, of_kernels
    return parts, math.lcm(parts // math.gcd(parts, cut.index.shape[1]), unit_parts), of_kernels


Selections = Mapping[str, list[KeptIndices]]  # by full name of a parameter or buffer: what stays of it, dim after dim


def plan_units(model: nn.Module, kept: Kept) -> tuple[Selections, Smaller]:
    """Return what stays of ``model`` when only ``kept`` do of the units it names, and what its configuration says.

    Local; nothing is changed.

    Raises:
        ValueError: units that are not there, or none that stay; sizes that the architecture or the layout cannot have;
            a weight that is shared with another place.
        NotImplementedError: units that cannot be removed, or a layout in which they cannot.
    """
    selections, changes = select_units(model, kept)
    return selections, smaller_config(model, changes, cut_shapes(model, selections))


def select_units(model: nn.Module, kept: Kept) -> tuple[Selections, list[SizeChange]]:
    """Return what stays, and which sizes change, as :func:`plan_units` does; the configuration is not asked."""
    check_layout(model)
    blocks = dict(decoder_blocks(model))
    cutting, changes = _Cutting(model, Fsdp2Params()), dict[SizeChange, None]()
    places: dict[tuple[str, UnitKind], dict[str, Units]] = {}
    for (name, kind, place), index in kept.items():
        if name not in blocks:
            raise ValueError(f"{name!r} is no block of the model; they are {', '.join(map(repr, blocks))}")
        if (name, kind) not in places:
            places[name, kind] = {units.name: units for units in find_units(blocks[name], kind)}
        if place not in places[name, kind]:
            raise ValueError(f"{name!r} has no {kind} at {place!r}; it has some at {sorted(places[name, kind])}")
        units = places[name, kind][place]
        _check_index(f"{name}.{place}", units, index)
        gone = torch.ones(units.num_units, dtype=torch.bool, device="cpu")
        gone[index] = False
        for cut in units.cuts:
            cutting.cut(name, cut, gone.nonzero()[:, 0], units)
        if kind in ("mlp", "experts"):
            changes[SizeChange(kind, units.num_units, len(index))] = None
    attentions = dict.fromkeys((name, place) for name, kind, place in kept if kind in ("heads", "kv_groups"))
    for name, place in attentions:
        changes |= dict.fromkeys(_heads(cutting, name, blocks[name], place))
    selections = cutting.selections()
    _check_not_shared(model, selections)
    return selections, list(changes)


def cut_shapes(model: nn.Module, selections: Selections) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and buffers when ``selections`` stay, by name."""
    shapes = shapes_of(model)
    for name, of_tensor in selections.items():
        now = {selection.dim: selection.index.shape[-1] for selection in of_tensor}
        shapes[name] = tuple(now.get(dim, size) for dim, size in enumerate(shapes[name]))
    return shapes


def check_layers(model: nn.Module, kept: Sequence[int]) -> Smaller:
    """Return what changes when only the decoder blocks ``kept`` stay. Local; nothing is changed.

    Raises:
        ValueError: blocks that are not there, or none; or the configuration cannot say which stay.
        NotImplementedError: what a block computes depends on its place, or a layout in which no block can leave.
    """
    check_layout(model)
    blocks = decoder_blocks(model)
    num_blocks, prefix = len(blocks), blocks[0][0].rpartition(".")[0]
    check_ascending(kept, num_blocks)
    place = {str(before): str(after) for after, before in enumerate(kept)}

    def rename(name: str) -> str | None:
        if not name.startswith(f"{prefix}."):
            return name
        key, dot, rest = name[len(prefix) + 1 :].partition(".")
        return f"{prefix}.{place[key]}{dot}{rest}" if key in place else None

    text = text_config(model)
    changes = [SizeChange("layers", num_blocks, len(kept))]
    for name, value in vars(text).items():
        if isinstance(value, list) and not name.startswith("_"):
            if len(value) == num_blocks and any(word in name for word in ("layer", "type", "pattern", "block")):
                changes.append(SizeChange(name, value, [value[i] for i in kept]))
            if name.endswith("layers") and all(isinstance(v, int) and v in range(num_blocks) for v in value):
                changes.append(SizeChange(name, value, [kept.index(v) for v in value if v in kept]))
    smaller = smaller_config(model, changes, shapes_of(model, rename), rename)
    for (path, name), (before, after) in smaller.attributes.items():
        index = path[len(prefix) + 1 :].partition(".")[0] if path.startswith(f"{prefix}.") else ""
        if index and (type(before) is not int or after != before - int(index) + int(place[index])):
            raise NotImplementedError(
                f"{name!r} of {path!r} would go from {before} to {after}: what a block of {type(model).__name__} "
                "computes depends on its place, so that no other can leave"
            )
    return smaller


def _heads(cutting: _Cutting, name: str, block: nn.Module, place: str) -> list[SizeChange]:
    """Return how the numbers of query heads and of key and value heads change in the attention at ``place``."""
    size = head_dim(block.get_submodule(place))
    groups = next(units for units in find_units(block, "kv_groups") if units.name == place)
    is_kept = cutting.masks[f"{name}.{groups.cuts[-1].parameter}", groups.cuts[-1].dim].view(groups.num_units, -1)
    per_group = is_kept.sum(dim=1) // size
    per_group = per_group[per_group > 0]
    if bool((per_group != per_group[0]).any()):
        raise ValueError(f"of the KV groups of {name}.{place} {per_group.tolist()} heads would stay: equally many must")
    return [
        SizeChange("heads", is_kept.numel() // size, int(per_group.sum()), size),
        SizeChange("kv_groups", groups.num_units, len(per_group), size),
    ]


def _is_grouped(model: Any) -> bool:
    ask = getattr(model, "get_experts_implementation", None)
    return ask is not None and "grouped_mm" in ask().values()


def _check_index(place: str, units: Units, index: torch.Tensor) -> None:
    what = f"the {units.kind} that stay in {place!r}"
    if index.ndim != 1 or index.dtype != torch.int64 or bool((index.diff() <= 0).any()):
        raise ValueError(f"{what} must be ascending int64 indices, not {index}")
    if len(index) and not 0 <= int(index[0]) <= int(index[-1]) < units.num_units:
        raise ValueError(f"{what} must be of 0 to {units.num_units - 1}, not {int(index[0])} to {int(index[-1])}")
    if len(index) < units.min_kept:
        raise ValueError(f"{what} are {len(index)}: at least {units.min_kept} of {units.num_units} must stay")
    counts = torch.bincount(index // (units.num_units // units.num_groups), minlength=units.num_groups)
    if bool((counts != counts[0]).any()):
        raise ValueError(f"{what} are {counts.tolist()} of its groups: equally many of each must stay")


def _check_not_shared(model: nn.Module, selections: Mapping[str, list[KeptIndices]]) -> None:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model):
        names.setdefault(id(tensor), []).append(name)
    for aliases in names.values():
        if len(aliases) > 1 and any(name in selections for name in aliases):
            raise ValueError(f"{' and '.join(map(repr, aliases))} are one weight: it cannot be cut for one of them")


def holder_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the parameter or buffer ``name``, and what it is called there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
