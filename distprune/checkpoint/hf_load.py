"""A Hugging Face directory straight into a model's shards: no rank ever holds the model.

The model is built on the meta device, sharded there, given memory, and then every rank reads its own
slices of every tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distprune.checkpoint.hf_directory import HfDirectory, open_together, sample_together
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.naming import Regions, different_values, names_by_tensor
from distprune.checkpoint.pretrained import build_on_meta, compute_buffers
from distprune.checkpoint.regions import regions_by_name
from distprune.checkpoint.stored_slices import Progress, Stored, fill_shards, stored_slices
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.shards.device import as_device
from distprune.shards.layouts import local_shard


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
        name: a directory, or an id of the hub, ``org/name`` or ``org/name@revision``, which is fetched once on each
            machine. Its tokenizer is ``transformers.AutoTokenizer.from_pretrained(name)``.
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
        kind = as_device(device or (mesh.device_type if mesh is not None else "cpu"))
        mesh = mesh_of(group, comm.size, kind) if mesh is None else mesh
    path = resolve_model(str(name), group=comm)
    return load_model(path, mesh=mesh, dtype=dtype, device=kind, group=comm)


def load_model(
    path: str | Path | HfDirectory,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group = None,
    progress: Progress = None,
) -> nn.Module:
    """Return the causal language model of a Hugging Face directory, in evaluation mode.

    With ``mesh`` (one axis, or replicate x shard for HSDP) every decoder block and then the root is
    ``fully_shard``\\ ed over it (FSDP2), and each rank reads only the slices it holds; without, the
    model is plain and whole on every rank that loads it. Buffers that are not in the checkpoint (rotary
    frequencies) are computed as transformers computes them.

    Args:
        dtype: of the parameters; default: what the checkpoint holds them in.
        compute_dtype: what FSDP2 gathers them in; gradients are reduced in float32. Default: their own.
        device: where the parameters live.
        group: the ranks that load together; every one of them must call it.
        progress: called with (bytes read so far, bytes to read) of this rank.

    Communicates two rounds of 64 bytes, to agree on the arguments and to raise together, and what
    :func:`open_together` (but for a directory that is open) and :func:`sample_together` do.

    Raises:
        OSError: on every rank: a weight file was changed or replaced since the directory was opened.
        FileNotFoundError, ValueError: on every rank: what :func:`open_together` raises, a tensor
            that is missing, unexpected, or of another shape than the config makes it, parts of one weight in
            several dtypes (and no ``dtype``), weights that the config ties and the checkpoint holds twice with
            different values, a mesh of more than two axes, ranks that were given different checkpoints (headers,
            and samples of every file), dtypes or meshes.
        NotImplementedError: on every rank: a model with a buffer that nothing can compute, or whose
            tensors the checkpoint holds in a form that transformers converts by more than placing it.
        ImportError: on every rank: the extra ``hf`` is not installed.
    """
    comm = communicator(group)
    facts = {"dtype": str(dtype), "compute_dtype": str(compute_dtype), "mesh": mesh and list(mesh.shape)}
    with together(comm, is_open=isinstance(path, HfDirectory), **facts):
        if mesh is not None and mesh.ndim > 2:
            raise ValueError(f"a mesh of one axis, or of two (replicate x shard), is called for, not of {mesh.ndim}")
    directory = path if isinstance(path, HfDirectory) else open_together(comm, path)
    sample_together(comm, directory)
    with together(comm):
        model, regions = build_on_meta(directory, dtype)
        compute_buffers(model)
        model._apply(lambda t: t if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
        if mesh is not None:
            precision = MixedPrecisionPolicy(compute_dtype, None if compute_dtype is None else torch.float32)
            for _, block in decoder_blocks(model):
                fully_shard(block, mesh=mesh, mp_policy=precision)
            # By default torch leaves the root's own parameters whole after a forward; ours are shards at any time.
            fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)  # type: ignore[no-untyped-call]
        model.tie_weights()  # type: ignore[operator]  # they have been parted
        work, stored_again = slices_to_read(model, directory, regions)
        fill_shards(work, progress)
        for shard, entry, slices in stored_slices(stored_again):
            for local, stored in slices:
                if not torch.equal(local, stored.to(local)):
                    raise different_values(directory.path, shard.name, entry.name)
        directory.check_unchanged()
        model.eval()
    return model


def slices_to_read(model: nn.Module, directory: HfDirectory, regions: Regions) -> tuple[list[Stored], list[Stored]]:
    """Return what this rank reads of ``directory`` into ``model``, and what must be the same, of tied weights. Local.

    Of tied weights the first that is stored is read.
    """
    state, held = model.state_dict(keep_vars=True), directory.tensors
    by_name = regions_by_name(regions.values())
    work, stored_again = list[Stored](), list[Stored]()
    for aliases in names_by_tensor(state):
        shard = local_shard(aliases[0], state[aliases[0]])
        first, *others = [
            [(region.part_of(shard, held[region.stored][1].shape), *held[region.stored]) for region in by_name[alias]]
            for alias in aliases
            if alias in by_name
        ]
        work += first
        for again, file, entry in itertools.chain.from_iterable(others):
            stored_again.append((dataclasses.replace(again, name=first[0][2].name), file, entry))
    return work, stored_again
