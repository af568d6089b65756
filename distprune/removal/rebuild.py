"""A model made smaller in the layout it is in: its parameters cut and evenly spread again, its configuration with them.

Parameter by parameter each rank hands over at most its shard to ranks that hold it then; nothing is gathered. What can
be wrong is found before anything changes. An error later than that, out of memory say, is raised on every rank, and
leaves a model that has to be loaded again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.checkpoint.naming import names_by_tensor
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.models.decoder_blocks import decoder_blocks, shared_by_blocks
from distprune.models.units import Cut, UnitKind, Units, find_all_units, find_units, head_dim
from distprune.removal.smaller_config import (
    SizeChange,
    Smaller,
    layers_of_their_own,
    shapes_of,
    smaller_config,
    tensors_of,
    text_config,
)
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.fsdp2_resize import drop_modules, even_parts, resize
from distprune.shards.layouts import find_flat_parts, local_shard
from distprune.shards.select import KeptIndices, select

# By block, kind and Units.name: the units that stay, ascending, as many of each group.
Kept = Mapping[tuple[str, UnitKind, str], torch.Tensor]
Selections = Mapping[str, list[KeptIndices]]  # by full name of a parameter or buffer: what stays of it, dim after dim

_GROUPED_BYTES = 16  # strides of what torch's grouped_mm takes


def remove_units(model: nn.Module, kept: Kept, *, group: Group = None) -> None:
    """Remove all units but ``kept`` from ``model``, in place: by block, kind and ``Units.name`` the indices that stay.

    Of what ``kept`` does not name everything stays. Parameters become new ones, without gradients: make the optimizer
    afterwards. Module attributes and the text configuration follow, so that the model is of the same class, and what is
    saved of it loads. Every rank of ``group``, by default all, must call it with the same ``kept``. Two rounds of 64
    bytes, and for each parameter two and those of :func:`select` for each of its dims that gets smaller.

    Raises:
        ValueError: sizes that the architecture or the layout cannot have; a weight that is shared with another place;
            ranks disagree.
        NotImplementedError: units that cannot be removed, or a layout in which they cannot.
    """
    comm = communicator(group)
    facts = {"kept": [[*key, index.tolist()] for key, index in kept.items()]}
    with together(comm, **facts):
        reset_forward(model)
        selections, smaller = plan_units(model, kept)
        managed = Fsdp2Params()
    for name, of_tensor in selections.items():
        with together(comm):
            module, attribute = holder_of(model, name)
            tensor = getattr(module, attribute)
            local, shape = local_shard(name, tensor).local, list(tensor.shape)
        for selection in of_tensor:
            local = select(comm, tensor, local, shape, selection)
            shape[selection.dim] = selection.index.shape[-1]
        with together(comm):
            if (parameter := managed.find(module, attribute)) is not None:
                resize(parameter, shape, local)
                continue
            if isinstance(tensor, DTensor):
                mesh, size = tensor.device_mesh, torch.Size(shape)
                stride = torch.empty(size, dtype=local.dtype, device="meta").stride()
                local = DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=size, stride=stride)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, attribute, nn.Parameter(local, tensor.requires_grad) if is_parameter else local)
    with together(comm):
        _follow(model, smaller)


def remove_layers(model: nn.Module, kept: Sequence[int], *, group: Group = None) -> None:
    """Remove all decoder blocks but ``kept`` from ``model``, in place, and number them anew.

    The configuration follows, its lists by layer too. Make the optimizer afterwards. Every rank of ``group``, by
    default all, must call it with the same ``kept``: two rounds of 64 bytes.

    Raises:
        ValueError, NotImplementedError: as :func:`check_layers` does; or ranks disagree. Nothing is changed.
    """
    comm = communicator(group)
    with together(comm, layers=list(kept)):
        smaller = check_layers(model, kept)
        blocks = decoder_blocks(model)
        dropped = [block for index, (_, block) in enumerate(blocks) if index not in kept]
    with together(comm):
        drop_modules(model, dropped)
        _follow(model, smaller)
        holder = model.get_submodule(blocks[0][0].rpartition(".")[0])
        keys = [name.rpartition(".")[2] for name, _ in blocks]
        holder._modules.clear()
        holder._modules.update(zip(keys, (blocks[index][1] for index in kept), strict=False))


def _follow(model: nn.Module, smaller: Smaller) -> None:
    """Let the attributes of modules and the configuration say the new sizes."""
    for (path, name), (_, after) in smaller.attributes.items():
        setattr(model.get_submodule(path), name, after)
    kind, copies = type(text_config(model)), dict[int, Any]()
    for module in model.modules():  # another model may have been made of the same configuration
        for name, config in [*vars(module).items()]:
            if hasattr(config, "model_type"):
                setattr(module, name, copy.deepcopy(config, copies))
    configs = {id(c): c for module in model.modules() if type(c := getattr(module, "config", None)) is kind}
    for config in ({id(text := text_config(model)): text} | configs).values():
        for name, value in smaller.fields.items():
            setattr(config, name, value)


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


def plan_units(model: nn.Module, kept: Kept) -> tuple[Selections, Smaller]:
    """Return what stays of ``model`` when only ``kept`` do of the units it names, and what its configuration says.

    Local; nothing is changed.

    Raises:
        ValueError: sizes that the architecture or the layout cannot have; a weight that is shared with another place.
        NotImplementedError: units that cannot be removed, or a layout in which they cannot.
    """
    selections, changes = select_units(model, kept)
    return selections, smaller_config(model, changes, cut_shapes(model, selections))


def select_units(model: nn.Module, kept: Kept) -> tuple[Selections, list[SizeChange]]:
    """Return what stays, and which sizes change, as :func:`plan_units` does; the configuration is not asked."""
    check_layout(model)
    blocks, managed = dict(decoder_blocks(model)), Fsdp2Params()
    places = {key: {units.name: units for units in find_units(blocks[key[0]], key[1])} for key in {k[:2] for k in kept}}
    masks: dict[tuple[str, int], torch.Tensor] = {}  # by name and dim: (size,); (slices, size) where each has its own
    changes: dict[SizeChange, None] = {}
    for (name, kind, place), index in kept.items():
        units = places[name, kind][place]
        gone = torch.ones(units.num_units, dtype=torch.bool, device="cpu")
        gone[index] = False
        for cut in units.cuts:
            path = f"{name}.{cut.parameter}"
            for step, why in _steps(model, managed, path, cut, units):
                if len(index) % step:
                    raise ValueError(f"{len(index)} {kind} cannot stay in {name!r}: {why}")
            module, attribute = holder_of(model, path)
            shape = getattr(module, attribute).shape
            size = (shape[cut.dim],) if cut.expert is None else (shape[0], shape[cut.dim])
            mask = masks.setdefault((path, cut.dim), torch.ones(size, dtype=torch.bool, device="cpu"))
            (mask if cut.expert is None else mask[cut.expert])[cut.index[gone].flatten()] = False
        if kind in ("mlp", "experts"):
            changes[SizeChange(kind, units.num_units, len(index))] = None
        else:
            changes |= dict.fromkeys(_head_changes(blocks[name], units, len(index)))
    selections: dict[str, list[KeptIndices]] = {}
    for (path, dim), mask in sorted(masks.items()):  # dim 0 comes first: an expert that goes has no channels
        left = mask[masks[path, 0]] if mask.ndim > 1 and (path, 0) in masks else mask
        least, most = (int(num) for num in torch.aminmax(left.sum(dim=-1)))
        if least < most:  # experts that are not named, or that nothing reads
            raise ValueError(
                f"of the experts in {path!r} some would keep {least} and others {most} of their size: as many "
                "must stay of all"
            )
        index = left.nonzero()[:, -1].view(*left.shape[:-1], -1)
        selections.setdefault(path, []).append(KeptIndices(dim, index))
    _check_not_shared(model, selections)
    return selections, list(changes)


def _head_changes(block: nn.Module, units: Units, num_kept: int) -> list[SizeChange]:
    """Return how the numbers of query heads and of KV heads change when ``num_kept`` of ``units`` stay."""
    assert units.reader_index is not None
    size = head_dim(block.get_submodule(units.name))
    num_heads = units.reader_index.numel() // size
    num_groups = next(groups.num_units for groups in find_units(block, "kv_groups") if groups.name == units.name)
    changes = [SizeChange("heads", num_heads, num_heads * num_kept // units.num_units, size)]
    if units.num_units == num_groups:  # with their query heads
        changes.append(SizeChange("kv_groups", num_groups, num_kept, size))
    return changes


def step_of(model: nn.Module, kind: UnitKind) -> int:
    """Return of what the number of units of ``kind`` that stay must be a multiple in this layout. Local."""
    managed, blocks = Fsdp2Params(), find_all_units(model, kind)
    cuts = [
        (f"{name}.{cut.parameter}", cut, units) for name, places in blocks for units in places for cut in units.cuts
    ]
    return math.lcm(*(step for cut in cuts for step, _ in _steps(model, managed, *cut)))


def _steps(model: nn.Module, managed: Fsdp2Params, name: str, cut: Cut, units: Units) -> Iterator[tuple[int, str]]:
    """Yield of what the number of ``units`` that stay must be a multiple because of tensor ``name``, and why."""
    module, attribute = holder_of(model, name)
    tensor, parameter = getattr(module, attribute), managed.find(module, attribute)
    parts, unit_parts = even_parts(tensor, parameter, cut.dim)
    if tensor.shape[cut.dim] % parts == 0 and units.num_units % unit_parts == 0:  # else they are uneven as it is
        step = math.lcm(parts // math.gcd(parts, cut.index.shape[1]), unit_parts)
        yield step, f"{name!r} is cut into {parts} equal parts along them; possible: multiples of {step}"
    in_row = _GROUPED_BYTES // (tensor.dtype if parameter is None else parameter.compute_dtype).itemsize
    implementations: Collection[str] = getattr(model, "get_experts_implementation", dict)().values()
    if cut.expert is not None and units.num_units % in_row == 0 and "grouped_mm" in implementations:
        why = f"grouped_mm multiplies rows of multiples of {_GROUPED_BYTES} bytes; possible: multiples of {in_row}"
        yield in_row, f"{why}, or any with model.set_experts_implementation('eager')"


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
    if len(kept) < num_blocks and (shared := shared_by_blocks(blocks)):
        raise NotImplementedError(f"{shared}: no block of {type(model).__name__} can leave")
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
    for name, value in layers_of_their_own(text).items():
        layers = {int(layer): fields for layer, fields in value.items()}
        changes.append(SizeChange(name, value, {i: layers[layer] for i, layer in enumerate(kept) if layer in layers}))
    smaller = smaller_config(model, changes, shapes_of(model, rename), rename)
    lists = [(change.before, change.after) for change in changes if isinstance(change.before, list)]
    for (path, name), (before, after) in smaller.attributes.items():
        if (before, after) in lists:  # a block reads its own place of it
            continue
        index = path[len(prefix) + 1 :].partition(".")[0] if path.startswith(f"{prefix}.") else ""
        if index and (type(before) is not int or after != before - int(index) + int(place[index])):
            raise NotImplementedError(
                f"{name!r} of {path!r} would go from {before} to {after}: what a block of {type(model).__name__} "
                "computes depends on its place, so that no other can leave"
            )
    return smaller


def _check_not_shared(model: nn.Module, selections: Mapping[str, list[KeptIndices]]) -> None:
    for aliases in names_by_tensor(dict(tensors_of(model))):
        if len(aliases) > 1 and any(name in selections for name in aliases):
            raise ValueError(f"{' and '.join(map(repr, aliases))} are one weight: it cannot be cut for one of them")


def holder_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the parameter or buffer ``name``, and what it is called there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
