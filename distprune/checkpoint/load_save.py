"""A model from a Hugging Face directory, or from the hub, into memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hf_save import save_model
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.output_directory import writing
from distprune.checkpoint.shared_reading import open_together
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.models.find_shards import check_model
from distprune.shards.device import as_device


def mesh_of(group: Group, num_ranks: int, device: torch.device) -> DeviceMesh | None:
    """Return the mesh of all ranks of ``group``, over which a model is sharded; ``None`` on one rank. Local."""
    ranks = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if num_ranks == 1 or ranks is None:
        return None
    return DeviceMesh.from_group(ranks, device.type, mesh_dim_names=("shard",))


def load(
    name: str | Path,
    mesh: DeviceMesh | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: Group = None,
) -> nn.Module:
    """Return the causal language model ``name``, in FSDP2 shards where there are several ranks, in evaluation mode.

    >>> model = load(folder / "model")
    >>> report = prune_model(model, 0.5)
    >>> save(model, folder / "pruned")
    >>> sparsity(load(folder / "pruned"))
    0.5

    Args:
        name: a directory, or an id of the hub, ``org/name`` or ``org/name@revision``, which one rank on each machine
            fetches. Its tokenizer is ``transformers.AutoTokenizer.from_pretrained(name)``.
        mesh: one axis, or replicate x shard (HSDP). Default: all ranks of ``group``; one rank has the model whole.
        dtype: of the parameters. Default: what the checkpoint holds them in.
        device: where the parameters live. Default: the mesh's kind of device, or the CPU.
        group: the ranks that load together; default: the default group, or this process alone.

    Each rank reads the slices that it holds; no rank has the whole model in memory. Every rank of ``group`` must call
    it, with equal arguments. Rounds: one of 64 bytes, and those of ``resolve_model`` and ``load_model``.

    Raises:
        ImportError: on every rank: the extra ``hf`` is not installed.
        FileNotFoundError, OSError: on every rank: no such directory, and the hub has no such model or is out of reach.
        ValueError, NotImplementedError: on every rank: there is no such device, or what ``load_model`` raises.
    """
    comm = communicator(group)
    with together(comm):
        import_extra("transformers", "hf")
        kind = as_device(device or (mesh.device_type if mesh is not None else "cpu"))
    path = resolve_model(str(name), group=comm)
    with together(comm):
        mesh = mesh_of(group, comm.size, kind) if mesh is None else mesh
    return load_model(path, mesh=mesh, dtype=dtype, device=kind, group=comm)


def save(
    model: nn.Module,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    source: str | Path | None = None,
    layers: Sequence[int] | None = None,
    overwrite: bool = False,
    group: Group = None,
) -> None:
    """Write ``model`` to a Hugging Face ``directory``, from whatever shards it is in; ``from_pretrained`` reads it.

    >>> model = load(folder / "model")
    >>> report = prune_model(model, 0.5)
    >>> save(model, folder / "half")

    Args:
        model: plain, FSDP2, HSDP or tensor parallel, pruned in place; of :func:`load`, or of ``from_pretrained``.
        directory: must not exist, or be empty; all ranks must see it.
        tokenizer: of transformers, written beside the model. Default: that of ``source``.
        source: the directory, or the hub's id, whose config, tokenizer and division into files the output has.
            Default: where ``model`` was loaded from.
        layers: which decoder layers of the source are left, as ``Shrunk.layers`` says. Default: all.
        overwrite: replace the model in ``directory``.
        group: the ranks that hold parts of the model.

    Every rank writes its own elements; nothing is gathered. It is written beside ``directory`` and renamed when all is
    on the disk. Every rank of ``group`` must call it, with equal arguments. Rounds: two of 64 bytes, and those of
    ``resolve_model``, ``open_together``, ``writing`` and ``save_model``.

    Raises:
        ImportError: on every rank: the extra ``hf`` is not installed.
        FileExistsError, OSError: on every rank: ``directory`` is not empty, or cannot be written.
        ValueError: on every rank: the source is not known, or holds other tensors than ``model``, such as those of a
            model whose masks are not removed; ``directory`` is the source.
    """
    comm = communicator(group)
    with together(comm):
        import_extra("transformers", "hf")
        check_model(model)
        known = source or getattr(getattr(model, "config", None), "name_or_path", None)
        if not known:
            raise ValueError(f"where this {type(model).__name__} was loaded from is not known: say source='DIRECTORY'")
        if masked := [name for name, _ in model.named_parameters() if name.endswith("_orig")]:
            raise ValueError(f"{masked[0]!r} has a mask beside it: make zeros of the masks first, by prune.remove")
    path = resolve_model(str(known), group=comm)
    read = open_together(comm, path)
    with writing(directory, comm, overwrite=overwrite, inputs=[path]) as staging:
        save_model(model, read, staging, layers=layers, group=comm)
        with together(comm):
            if tokenizer is not None and comm.rank == 0:
                tokenizer.save_pretrained(staging)
