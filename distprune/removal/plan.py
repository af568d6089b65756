"""What removing units makes of every parameter; checked before anything changes. No communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from distprune.models import UNIT_KINDS, Cut, UnitKind, Units, decoder_blocks, find_units, head_dim
from distprune.removal.select import KeptIndices
from distprune.removal.smaller_config import SizeChange, Smaller, smaller_config
from distprune.shards import Fsdp2Params, even_parts, find_flat_parts

__all__ = ["Kept", "UnitPlan", "check_ascending", "check_layout", "plan_units", "step_of"]

# By block, kind and Units.name: the units that stay, ascending.
Kept = Mapping[tuple[str, UnitKind, str], torch.Tensor]

_WORDS: dict[UnitKind, tuple[str, ...]] = {
    "mlp": ("inter", "inner", "ffn", "d_ff", "ff_dim", "mlp_dim"),
    "heads": ("head",),
    "kv_groups": ("head",),
    "experts": ("expert",),
}
_WITHOUT: dict[UnitKind, tuple[str, ...]] = {
    "mlp": (),
    "heads": ("dim", "size"),
    "kv_groups": ("dim", "size"),
    "experts": ("per_tok", "topk", "top_k", "size", "dim"),
}


_GROUPED_BYTES = 16  # strides of what torch's grouped_mm takes


@dataclass(frozen=True)
class UnitPlan:
    """``selections``: by full name of a parameter or buffer, what stays of it, dim after dim."""

    selections: Mapping[str, list[KeptIndices]]
    smaller: Smaller


@dataclass
class _Cutting:
    """What goes from the parameters of the model, gathered cut by cut. Masks: along a dim (size,), or in every slice
    along dim 0 (slices, size)."""

    model: nn.Module
    managed: Fsdp2Params
    masks: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def cut(self, block: str, cut: Cut, gone: torch.Tensor, units: Units) -> None:
        name = f"{block}.{cut.parameter}"
        tensor = _tensor(self.model, name)
        size, expert = tensor.shape[cut.dim], cut.expert
        num_kept = units.num_units - len(gone)
        parts, every = self.parts(name, cut, units)
        if num_kept % every or (parts and (size - len(gone) * cut.index.shape[1]) % parts):
            raise ValueError(
                f"{num_kept} {units.kind} cannot stay in {block!r}: {name!r} is cut into {parts} equal parts along "
                f"them; possible: multiples of {every}"
            )
        aligned = self.aligned(name, cut, units)
        if num_kept % aligned:
            raise ValueError(
                f"{num_kept} {units.kind} cannot stay in {name!r}: grouped_mm multiplies rows of multiples of "
                f"{_GROUPED_BYTES} bytes; possible: multiples of {aligned}, or any with "
                "model.set_experts_implementation('eager')"
            )
        shape = (size,) if expert is None else (tensor.shape[0], size)
        mask = self.masks.setdefault((name, cut.dim), torch.ones(shape, dtype=torch.bool))
        (mask if expert is None else mask[expert])[cut.index[gone].flatten()] = False

    def parts(self, name: str, cut: Cut, units: Units) -> tuple[int, int]:
        """Return into how many equal parts ``name`` is cut along the units, and of what their number is a multiple.

        0 and 1 where it is cut unevenly.
        """
        tensor, width = _tensor(self.model, name), cut.index.shape[1]
        parts, unit_parts = even_parts(tensor, self.managed.find(*_holder(self.model, name)), cut.dim)
        if tensor.shape[cut.dim] % parts or units.num_units % unit_parts:
            return 0, 1
        return parts, next(n for n in range(1, parts * unit_parts + 1) if n * width % parts == n % unit_parts == 0)

    def aligned(self, name: str, cut: Cut, units: Units) -> int:
        """Return of what the number of units is a multiple for the kernels that read ``name``."""
        managed = self.managed.find(*_holder(self.model, name))
        dtype = _tensor(self.model, name).dtype if managed is None else managed.compute_dtype
        aligned = _GROUPED_BYTES // dtype.itemsize
        is_aligned = cut.expert is not None and units.num_units % aligned == 0 and _is_grouped(self.model)
        return aligned if is_aligned else 1

    def selections(self) -> dict[str, list[KeptIndices]]:
        found: dict[str, list[KeptIndices]] = {}
        for (name, dim), mask in sorted(self.masks.items()):  # dim 0 comes first: an expert that goes has no channels
            if mask.ndim == 1:
                index = mask.nonzero()[:, 0]
            else:
                first = self.masks.get((name, 0))
                mask = mask if first is None else mask[first]
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


def step_of(model: nn.Module, found: Sequence[tuple[str, Sequence[Units]]]) -> int:
    """Return of what the number of ``found`` units, by block, that stay must be a multiple in this layout. Local."""
    cutting = _Cutting(model, Fsdp2Params())
    cuts = [(f"{block}.{cut.parameter}", cut, units) for block, of in found for units in of for cut in units.cuts]
    return math.lcm(*(cutting.parts(*of)[1] for of in cuts), *(cutting.aligned(*of) for of in cuts))


def plan_units(model: nn.Module, kept: Kept) -> UnitPlan:
    """Return what becomes of ``model`` when only ``kept`` stay of the units it names. Local; nothing is changed.

    Raises:
        ValueError: units that are not there, or none that stay; sizes that the architecture or the layout cannot have;
            a weight that is shared with another place.
        NotImplementedError: units that cannot be removed, or a layout in which they cannot.
    """
    check_layout(model)
    blocks = dict(decoder_blocks(model))
    cutting, changes = _Cutting(model, Fsdp2Params()), dict[SizeChange, None]()
    for name in dict.fromkeys(block for block, _, _ in kept):
        if name not in blocks:
            raise ValueError(f"{name!r} is no block of the model; they are {', '.join(map(repr, blocks))}")
        of_block = {(kind, place): units for (block, kind, place), units in kept.items() if block == name}
        _plan_block(cutting, changes, name, blocks[name], of_block)
    selections = cutting.selections()
    _check_not_shared(model, selections)
    shapes = {name: tuple(t.shape) for name, t in _tensors(model)}
    for name, of_name in selections.items():
        shape = list(shapes[name])
        for selection in of_name:
            shape[selection.dim] = selection.index.shape[-1]
        shapes[name] = tuple(shape)
    return UnitPlan(selections, smaller_config(model, list(changes), shapes))


def _plan_block(
    cutting: _Cutting,
    changes: dict[SizeChange, None],
    name: str,
    block: nn.Module,
    kept: Mapping[tuple[UnitKind, str], torch.Tensor],
) -> None:
    for kind in UNIT_KINDS:
        places = {place: index for (of_kind, place), index in kept.items() if of_kind == kind}
        found = {units.name: units for units in find_units(block, kind)} if places else {}
        for place, index in places.items():
            if place not in found:
                raise ValueError(f"{name!r} has no {kind} at {place!r}; it has some at {sorted(found)}")
            units = found[place]
            _check_index(f"{name}.{place}", units, index)
            gone = torch.ones(units.num_units, dtype=torch.bool)
            gone[index] = False
            for cut in units.cuts:
                cutting.cut(name, cut, gone.nonzero()[:, 0], units)
            if kind in ("mlp", "experts"):
                number = units.num_units, len(index)
                changes[SizeChange(kind, *number, _WORDS[kind], _WITHOUT[kind], kind == "mlp")] = None
    for place in dict.fromkeys(place for kind, place in kept if kind in ("heads", "kv_groups")):
        changes |= dict.fromkeys(_heads(cutting, name, block, place))


def _heads(cutting: _Cutting, name: str, block: nn.Module, place: str) -> list[SizeChange]:
    """Return how the numbers of query heads and of key and value heads change in the attention at ``place``."""
    size = head_dim(block.get_submodule(place))
    groups = next(units for units in find_units(block, "kv_groups") if units.name == place)
    is_kept = cutting.masks[f"{name}.{groups.cuts[-1].parameter}", groups.cuts[-1].dim].view(groups.num_units, -1)
    per_group = is_kept.sum(dim=1) // size
    per_group = per_group[per_group > 0]
    if bool((per_group != per_group[0]).any()):
        raise ValueError(f"of the KV groups of {name}.{place} {per_group.tolist()} heads would stay: equally many must")
    numbers = {
        "heads": (is_kept.numel() // size, int(per_group.sum())),
        "kv_groups": (groups.num_units, len(per_group)),
    }
    fixed = (("head_dim", size),)
    return [
        SizeChange(what, *number, _WORDS["heads"], _WITHOUT["heads"], fixed=fixed)
        for what, number in numbers.items()
        if number[0] != number[1]
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
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
    for aliases in names.values():
        if len(aliases) > 1 and any(name in selections for name in aliases):
            raise ValueError(f"{' and '.join(map(repr, aliases))} are one weight: it cannot be cut for one of them")


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    module, attribute = _holder(model, name)
    tensor = getattr(module, attribute)
    assert isinstance(tensor, torch.Tensor)
    return tensor
