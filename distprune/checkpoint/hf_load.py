"""A Hugging Face directory straight into a model's shards: no rank ever holds the model.

The model is built on the meta device, sharded there, given memory, and then every rank reads its own
slices of every tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from distprune.checkpoint.computed_buffers import compute_buffers
from distprune.checkpoint.hf_directory import HfDirectory, open_directory
from distprune.checkpoint.meta_model import build_on_meta
from distprune.checkpoint.naming import model_names
from distprune.checkpoint.stored_slices import Stored, stored_slices
from distprune.collectives import Group, agree, communicator, together
from distprune.models import decoder_blocks
from distprune.shards import local_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["load_model"]


def load_model(
    path: str | Path | HfDirectory,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group = None,
    progress: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Return the causal language model of a Hugging Face directory, in evaluation mode.

    With ``mesh`` (one axis, or replicate x shard for HSDP) every decoder block and then the root is
    ``fully_shard``\\ ed over it (FSDP2), and each rank reads only the slices it holds; without, the
    model is plain and whole on every rank that loads it. Buffers that are not in the checkpoint (rotary
    frequencies) are computed as transformers computes them.

    Args:
        dtype: of the parameters; default: what the checkpoint holds them in.
        device: where the parameters live.
        group: the ranks that load together; every one of them must call it.
        progress: called with (bytes read so far, bytes to read) of this rank.

    Communicates four rounds of 64 bytes, to agree on the arguments and to raise together.

    Raises:
        FileNotFoundError, ValueError: on every rank: what :func:`open_directory` raises, a tensor
            that is missing, unexpected, or of another shape than the config makes it, weights that the
            config ties and the checkpoint holds twice with different values, a mesh of more than two
            axes, ranks that were given different checkpoints (headers, and samples of every file), dtypes or
            meshes.
        NotImplementedError: on every rank: a model with a buffer that nothing can compute, or whose
            tensors the checkpoint holds in another form.
        ImportError: on every rank: the extra ``hf`` is not installed.
    """
    comm = communicator(group)
    with together(comm):
        if mesh is not None and mesh.ndim > 2:
            raise ValueError(f"a mesh of one axis, or of two (replicate x shard), is called for, not of {mesh.ndim}")
        directory = path if isinstance(path, HfDirectory) else open_directory(path)
        model = build_on_meta(directory, dtype)
        # Before sharding, which changes the names of the classes, by which transformers knows its renamings.
        names = model_names(model, directory)
        _check_tensors(model, directory, names)
        facts = {
            "checkpoint": directory.fingerprint(),
            "weights (256 KiB of each file)": directory.sample(),
            "dtype": str(dtype),
            "mesh": mesh and list(mesh.shape),
        }
    agree(comm, facts)
    with together(comm):
        if mesh is not None:
            _shard(model, mesh)
        model.to_empty(device=device)
        _tie(model)
        _fill(model, directory, names, progress)
    with together(comm):
        compute_buffers(model)
        model.eval()
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    # By default torch leaves the root's own parameters whole after a forward; ours are shards at any time.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _tie(model: Any) -> None:
    """Make tied weights one tensor again; ``to_empty`` parts them."""
    model.tie_weights()


def _check_tensors(model: nn.Module, directory: HfDirectory, names: dict[str, str]) -> None:
    """Compare what is stored with what the model wants, before any memory is taken."""
    state = model.state_dict(keep_vars=True)
    there = set(names.values())
    missing = [aliases[0] for aliases in _names_by_tensor(state) if not there.intersection(aliases)]
    if missing:
        raise ValueError(
            f"{directory.path} lacks {len(missing)} tensors that its config calls for: missing {missing[:5]}"
        )
    for stored, name in names.items():
        _, entry = directory.tensors[stored]
        if entry.shape != tuple(state[name].shape):
            raise ValueError(
                f"tensor {stored!r} is {list(entry.shape)} in the checkpoint and {list(state[name].shape)} in the model"
            )


def _fill(
    model: nn.Module,
    directory: HfDirectory,
    names: dict[str, str],
    progress: Callable[[int, int], None] | None,
) -> None:
    state, held = model.state_dict(keep_vars=True), directory.tensors
    stored_names = {name: stored for stored, name in names.items()}
    # Of tied weights the first that is stored is read; any other must be the same.
    firsts: dict[str, str] = {}
    work: list[Stored] = []
    stored_again: list[Stored] = []
    for aliases in _names_by_tensor(state):
        first, *others = [stored_names[alias] for alias in aliases if alias in stored_names]
        shard = local_shard(aliases[0], state[aliases[0]])
        work.append((shard, *held[first]))
        stored_again += [(shard, *held[other]) for other in others]
        firsts.update(dict.fromkeys(others, first))
    num_total = sum(shard.local.numel() * shard.local.element_size() for shard, _, _ in work)
    num_done = 0
    for shard, _, slices in stored_slices(work):
        for target, part in slices:
            target.copy_(part)
        num_done += shard.local.numel() * shard.local.element_size()
        if progress is not None:
            progress(num_done, num_total)
    for _, entry, slices in stored_slices(stored_again):
        for target, part in slices:
            if not torch.equal(target, part.to(target)):
                raise ValueError(
                    f"{directory.path} holds {firsts[entry.name]!r} and {entry.name!r} with different values, and its "
                    'config ties them; set "tie_word_embeddings" to false in its config.json'
                )


def _names_by_tensor(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names in groups; tied weights are one tensor under several."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
