"""A model made smaller in the layout it is in: its parameters cut and evenly spread again, its configuration with them.

Parameter by parameter each rank hands over at most its shard to ranks that hold it then; nothing is gathered. What can
be wrong with the arguments is found before anything changes. An error later than that, out of memory say, is raised on
every rank, and leaves a model that has to be loaded again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.removal.plan import Kept, check_layers, holder_of, plan_units
from distprune.removal.smaller_config import Smaller, text_config
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.fsdp2_resize import drop_modules, resize
from distprune.shards.layouts import local_shard
from distprune.shards.select import select


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
            if (found := managed.find(module, attribute)) is not None:
                resize(found, shape, local)
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
    text = text_config(model)
    configs = {id(c): c for module in model.modules() if type(c := getattr(module, "config", None)) is type(text)}
    for config in ({id(text): text} | configs).values():
        for name, value in smaller.fields.items():
            setattr(config, name, value)
