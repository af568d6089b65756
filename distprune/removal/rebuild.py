"""A model made smaller in the layout it is in: its parameters cut and evenly spread again, its configuration with them.

Parameter by parameter each rank hands over at most its shard to ranks that hold it then; nothing is gathered. What can
be wrong with the arguments is found before anything changes. An error later than that, out of memory say, is raised on
every rank, and leaves a model that has to be loaded again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distprune.collectives import Communicator, Group, communicator, together
from distprune.models import decoder_blocks
from distprune.removal.plan import Kept, check_ascending, check_layout, plan_units
from distprune.removal.select import KeptIndices, select
from distprune.removal.smaller_config import SizeChange, Smaller, smaller_config, text_config
from distprune.shards import Fsdp2Params, drop_modules, local_shard, resize

__all__ = ["check_layers", "remove_layers", "remove_units"]


def remove_units(model: nn.Module, kept: Kept, *, group: Group = None) -> None:
    """Remove all units but ``kept`` from ``model``, in place: by block, kind and ``Units.name`` the indices that stay.

    Of what ``kept`` does not name everything stays. Parameters become new ones, without gradients: make the optimizer
    afterwards. Module attributes and the text configuration follow, so that the model is of the same class, and what is
    saved of it loads. Every rank of ``group``, by default all, must call it with the same ``kept``. Two rounds of 64
    bytes, and for each parameter two and those of :func:`select` for each of its dims that gets smaller.

    Raises:
        ValueError: units that are not there, or fewer than must stay; sizes that the architecture or the layout cannot
            have; a weight that is shared with another place; ranks disagree.
        NotImplementedError: units that cannot be removed, or a layout in which they cannot.
    """
    comm = communicator(group)
    facts = {"kept": [[*key, index.tolist()] for key, index in kept.items()]}
    with together(comm, **facts):
        reshard(model)
        plan = plan_units(model, kept)
        managed = Fsdp2Params()
    for name, selections in plan.selections.items():
        _cut(comm, model, managed, name, selections)
    with together(comm):
        _follow(model, plan.smaller)


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
    changes = [SizeChange("layers", num_blocks, len(kept), ("layer", "block", "depth"))]
    for name, value in vars(text).items():
        if isinstance(value, list) and not name.startswith("_"):
            if len(value) == num_blocks and any(word in name for word in ("layer", "type", "pattern", "block")):
                changes.append(SizeChange(name, value, [value[i] for i in kept], (name,)))
            if name.endswith("layers") and all(isinstance(v, int) and v in range(num_blocks) for v in value):
                changes.append(SizeChange(name, value, [kept.index(v) for v in value if v in kept], (name,)))
    shapes = {
        new_name: tuple(tensor.shape)
        for of in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in of
        if (new_name := rename(name)) is not None
    }
    smaller = smaller_config(model, [change for change in changes if change.before != change.after], shapes, rename)
    for (path, name), (before, after) in smaller.attributes.items():
        index = path[len(prefix) + 1 :].partition(".")[0] if path.startswith(f"{prefix}.") else ""
        if index and (type(before) is not int or after != before - int(index) + int(place[index])):
            raise NotImplementedError(
                f"{name!r} of {path!r} would go from {before} to {after}: what a block of {type(model).__name__} "
                "computes depends on its place, so that no other can leave"
            )
    return smaller


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
        for key, index in zip(keys, kept, strict=False):
            holder._modules[key] = blocks[index][1]


def reshard(model: nn.Module) -> None:
    """Put back to their shards what FSDP2 left gathered after a forward. Local."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _cut(
    comm: Communicator, model: nn.Module, managed: Fsdp2Params, name: str, selections: Sequence[KeptIndices]
) -> None:
    with together(comm):
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = getattr(module, attribute)
        local, shape = local_shard(name, tensor).local, list(tensor.shape)
    for selection in selections:
        local = select(comm, tensor, local, shape, selection)
        shape[selection.dim] = selection.index.shape[-1]
    with together(comm):
        found = managed.find(module, attribute)
        if found is not None:
            resize(found, shape, local)
            return
        whole = local
        if isinstance(tensor, DTensor):
            stride = torch.empty(shape, device="meta").stride()
            whole = DTensor.from_local(
                local, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride
            )
        if isinstance(tensor, nn.Parameter):
            module._parameters[attribute] = nn.Parameter(whole, tensor.requires_grad)
        else:
            module._buffers[attribute] = whole


def _follow(model: nn.Module, smaller: Smaller) -> None:
    """Let the attributes of modules and the configuration say the new sizes."""
    for (path, name), (_, after) in smaller.attributes.items():
        setattr(model.get_submodule(path), name, after)
    text = text_config(model)
    configs = {id(c): c for module in model.modules() if type(c := getattr(module, "config", None)) is type(text)}
    for config in ({id(text): text} | configs).values():
        for name, value in smaller.fields.items():
            setattr(config, name, value)
