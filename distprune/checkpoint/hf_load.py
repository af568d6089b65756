"""A Hugging Face directory straight into a model's shards: no rank ever holds the model.

The model is built on the meta device, sharded there, given memory, and then every rank reads its own
slices of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from distprune.checkpoint.extras import import_extra
from distprune.checkpoint.hf_directory import HfDirectory, TensorEntry, WeightFile, open_directory
from distprune.checkpoint.naming import model_names
from distprune.collectives import Group, communicator, together
from distprune.shards import LocalShard, decoder_blocks, local_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["load_model"]

_COPY_BYTES = 8 << 20  # read at a time; what is mapped from the file is not counted as ours


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

    Communicates one round of 72 bytes for each of three steps, to raise together; reads otherwise.

    Raises:
        FileNotFoundError, ValueError: on every rank: what :func:`open_directory` raises, a tensor
            that is missing, unexpected, or of another shape than the config makes it.
        NotImplementedError: on every rank: a model with a buffer that nothing can compute.
        ImportError: the extra ``hf`` is not installed.
    """
    comm = communicator(group)
    with together(comm):
        directory = path if isinstance(path, HfDirectory) else open_directory(path)
        model = _build_on_meta(directory, dtype)
    if mesh is not None:
        # Communicates inside torch (mesh set-up): outside of together().
        _shard(model, mesh)
    with together(comm):
        model.to_empty(device=device)
        _tie(model)
        _fill(model, directory, progress)
    with together(comm):
        _compute_missing_buffers(model)
    return model.eval()


def _build_on_meta(directory: HfDirectory, dtype: torch.dtype | None) -> nn.Module:
    transformers = import_extra("transformers", "hf")
    config = transformers.AutoConfig.from_pretrained(directory.path, local_files_only=True)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or _main_dtype(directory))
    if dtype is None:
        tensors, state = directory.tensors, model.state_dict(keep_vars=True)
        for stored, name in model_names(model, directory).items():
            state[name].data = state[name].data.to(tensors[stored][1].dtype)
    if (directory.path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory.path, local_files_only=True)
    if not isinstance(model, nn.Module):
        raise TypeError(f"transformers built a {type(model).__name__}, not a module")
    return model


def _main_dtype(directory: HfDirectory) -> torch.dtype:
    """Return the floating dtype that most bytes of the checkpoint are in."""
    sizes: dict[torch.dtype, int] = {}
    for _, entry in directory.tensors.values():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.stop - entry.start
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tie(model: Any) -> None:
    """Make tied weights one tensor again; ``to_empty`` parts them."""
    model.tie_weights()


def _fill(model: nn.Module, directory: HfDirectory, progress: Callable[[int, int], None] | None) -> None:
    names, held = model_names(model, directory), directory.tensors
    stored_as = {name: stored for stored, name in names.items()}
    by_alias = _tensors_by_alias(model)
    missing = [aliases[0] for aliases in by_alias if not any(alias in stored_as for alias in aliases)]
    if missing:
        raise ValueError(
            f"{directory.path} lacks {len(missing)} tensors that its config calls for: missing {missing[:5]}"
        )
    work = [
        (local_shard(alias, tensor), *held[stored_as[alias]])
        for aliases, tensor in by_alias.items()
        for alias in aliases
        if alias in stored_as
    ]
    num_total = sum(shard.local.numel() * shard.local.element_size() for shard, _, _ in work)
    num_done = 0
    for file, of_file in _by_file(work):
        with _safe_open(file) as handle:
            for shard, entry in of_file:
                _read_into(shard, entry, handle.get_slice(entry.name))
                num_done += shard.local.numel() * shard.local.element_size()
                if progress is not None:
                    progress(num_done, num_total)


def _tensors_by_alias(model: nn.Module) -> dict[tuple[str, ...], torch.Tensor]:
    """Return parameters and persistent buffers by all their names; tied ones have several."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return {tuple(aliases): tensors[key] for key, aliases in names.items()}


def _by_file(
    work: list[tuple[LocalShard, WeightFile, TensorEntry]],
) -> Iterator[tuple[WeightFile, list[tuple[LocalShard, TensorEntry]]]]:
    files = {file.path: file for _, file, _ in work}
    for path, file in files.items():
        yield file, sorted(((s, e) for s, f, e in work if f.path == path), key=lambda pair: pair[1].start)


def _safe_open(file: WeightFile) -> Any:
    safetensors = import_extra("safetensors", "hf")
    try:
        return safetensors.safe_open(file.path, framework="pt", device="cpu")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file.path} is corrupt: {error}") from error


def _read_into(shard: LocalShard, entry: TensorEntry, stored: Any) -> None:
    """Copy this rank's part of a stored tensor, a bounded number of rows at a time."""
    if entry.shape != shard.geometry.global_shape:
        raise ValueError(
            f"tensor {entry.name!r} is {list(entry.shape)} in the checkpoint and "
            f"{list(shard.geometry.global_shape)} in the model"
        )
    if shard.local.numel() == 0:
        return
    with torch.no_grad():
        if not entry.shape:
            shard.local.copy_(stored[...])
            return
        row_bytes = max(1, shard.local[0].numel() * entry.dtype.itemsize)
        step = max(1, _COPY_BYTES // row_bytes)
        local_start = 0
        for run_start, run_stop in shard.geometry.dim_runs[0]:
            for start in range(run_start, run_stop, step):
                stop = min(start + step, run_stop)
                _copy_columns(shard, stored, (start, stop), local_start)
                local_start += stop - start


def _copy_columns(shard: LocalShard, stored: Any, rows: tuple[int, int], local_start: int) -> None:
    target = shard.local[local_start : local_start + rows[1] - rows[0]]
    runs = shard.geometry.dim_runs[1:]
    # Slices where every dim is one run; the dims of several runs (strided shards of dim 1) are picked out.
    bounds = [slice(*rows), *(slice(dim[0][0], dim[-1][1]) for dim in runs)]
    part = stored[tuple(bounds)]
    for dim, dim_runs in enumerate(runs, start=1):
        if len(dim_runs) > 1:
            first = dim_runs[0][0]
            part = torch.cat([part.narrow(dim, low - first, high - low) for low, high in dim_runs], dim=dim)
    target.copy_(part)


def _compute_missing_buffers(model: Any) -> None:
    """Let transformers compute the buffers that no checkpoint holds, and see that it did."""
    spoilt: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        own = {key: module._buffers.get(key) for key in sorted(module._non_persistent_buffers_set)}
        missing = {key: buffer for key, buffer in own.items() if buffer is not None}
        if not missing:
            continue
        spoilt.update({f"{prefix}.{key}" if prefix else key: _spoil(buffer) for key, buffer in missing.items()})
        # transformers leaves alone what is marked: all that was read from the checkpoint.
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor._is_hf_initialized = not any(tensor is buffer for buffer in missing.values())
        model._init_weights(module)
    for name, before in spoilt.items():
        buffer = model.get_buffer(name)
        if buffer.numel() and torch.equal(buffer, before):
            raise NotImplementedError(
                f"the buffer {name!r} of {type(model).__name__} is in no checkpoint and transformers does not compute "
                "it for a model built on the meta device; this architecture cannot be loaded in shards"
            )


def _spoil(buffer: torch.Tensor) -> torch.Tensor:
    """Fill a buffer with values no model uses, and return a copy to tell by."""
    if buffer.is_floating_point():
        buffer.fill_(torch.finfo(buffer.dtype).min)
    elif buffer.dtype is not torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).min)
    return buffer.clone()
