"""A Hugging Face directory: its tokenizer, and its model straight into shards: no rank ever holds the model.

The model is built on the meta device, sharded there, given memory, and then every rank reads its own slices of every
tensor. No code of the directory is run. Whatever transformers raises becomes one line.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from distprune.checkpoint.hf_directory import CONFIG_NAME, HfDirectory, open_together, read_json, sample_together
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.naming import Regions, check_tensors, different_values, model_regions, names_by_tensor
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.regions import regions_by_name
from distprune.checkpoint.stored_slices import Progress, Stored, fill_shards, stored_slices
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, ProcessGroup, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.shards.device import as_device, own_settings
from distprune.shards.layouts import local_shard

_MAX_MESSAGE = 500  # characters
# transformers builds under a default dtype of the whole process: two threads at once would keep each other's.
_building = threading.Lock()


def mesh_of(comm: Communicator, device: torch.device) -> DeviceMesh | None:
    """Return the mesh of all ranks of ``comm``, over which a model is sharded; ``None`` on one rank. Local.

    Raises:
        ValueError: they are not all ranks of torch.distributed, nor a group of it.
    """
    group = comm.group if isinstance(comm, ProcessGroup) else dist.group.WORLD
    if comm.size == 1 or group is None:
        return None
    if group.size() != comm.size:
        raise ValueError(f"{comm.size} of {group.size()} ranks: give their group of torch.distributed, or a mesh of it")
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))


def load(
    name: str | Path,
    mesh: DeviceMesh | None = None,
    *,
    dtype: torch.dtype | str | None = None,
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
        dtype: of the parameters, or its name. Default, and ``"auto"``: what the checkpoint holds them in.
        device: where the parameters live. Default: the mesh's kind of device, or the CPU.
        group: the ranks that load together; default: the default group, or this process alone.

    Each rank reads the slices that it holds; no rank has the whole model in memory. Every rank of ``group`` must call
    it, with equal arguments. Rounds: one of 64 bytes, and those of ``resolve_model`` and ``load_model``.

    Raises:
        ImportError: on every rank: the extra ``hf`` is not installed.
        FileNotFoundError, OSError: on every rank: no such directory, and the hub has no such model or is out of reach.
        TypeError: on every rank: no such dtype.
        ValueError, NotImplementedError: on every rank: there is no such device, ranks that are no group, or what
            ``load_model`` raises.
    """
    comm = communicator(group)
    with together(comm):
        kind = as_device(device or (mesh.device_type if mesh is not None else "cpu"))
        mesh = mesh_of(comm, kind) if mesh is None else mesh
    path = resolve_model(str(name), group=comm)
    return load_model(path, mesh=mesh, dtype=dtype, device=kind, group=comm)


def load_model(
    path: str | Path | HfDirectory,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | str | None = None,
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
        dtype: of the parameters, or its name; default, and ``"auto"``: what the checkpoint holds them in.
        compute_dtype: what FSDP2 gathers them in; gradients are reduced in float32. Default: their own.
        device: where the parameters live.
        group: the ranks that load together; every one of them must call it.
        progress: called with (bytes read so far, bytes to read) of this rank.

    Communicates two rounds of 64 bytes, to agree on the arguments and to raise together, and what
    :func:`open_together` (but for a directory that is open) and :func:`sample_together` do.

    Raises:
        OSError: on every rank: a weight file was changed or replaced since the directory was opened.
        TypeError: on every rank: no such dtype.
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
    if isinstance(dtype, str):  # as transformers has it
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
    facts = {"dtype": str(dtype), "compute_dtype": str(compute_dtype), "mesh": mesh and list(mesh.shape)}
    with together(comm, is_open=isinstance(path, HfDirectory), **facts):
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
            raise TypeError(f"dtype takes a floating-point torch.dtype, or None: as it is stored; not {dtype!r}")
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
            stored_again.append((again.having(name=first[0][2].name), file, entry))
    return work, stored_again


@contextmanager
def one_line_errors(path: Path, what: str) -> Iterator[None]:
    """Turn whatever transformers raises in the body over a damaged or foreign file into one line. Local.

    Raises:
        ValueError: the body raised anything but a NotImplementedError, which stays what it is.
    """
    try:
        yield
    except NotImplementedError:
        raise
    except BaseException as error:
        # The tokenizers library reports what it did not expect as a BaseException of its own.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if "trust_remote_code" in said:
            said = f"it needs code that comes with it ({_auto_map(path)}), and no such code is run here"
            way_out = "if you trust it, load it yourself with trust_remote_code=True and call distprune.prune_model"
            raise ValueError(f"{path} holds no {what} that transformers knows: {said}; {way_out}") from error
        if "AutoModelForCausalLM" in said:  # and all classes that it knows
            kind = read_json(path / CONFIG_NAME).get("model_type")
            said = f"it builds no causal language model of type {kind!r}; --streamed prunes the weights alone, and "
            said += "distprune.prune_model a model that you load yourself; its own save_pretrained saves it"
        raise ValueError(f"{path} holds no {what} that transformers can load: {said[:_MAX_MESSAGE]}") from error


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a model directory. Local; no code of the directory is run.

    Raises:
        ValueError: there is none that transformers can load.
        ImportError: the extra ``hf`` is not installed.
    """
    transformers = import_extra("transformers", "hf")
    with one_line_errors(path, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # Texts are cut into windows after they are tokenized: it need not warn that they are long.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer


def check_config(path: Path) -> None:
    """Check the config of the model directory ``path`` for what must not reach transformers. Local.

    Raises:
        ValueError: it is no JSON object, or names an attention or experts implementation from the hub.
        NotImplementedError: the weights are quantized.
    """
    config = path / CONFIG_NAME

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if "implementation" in key and "/" in str(value):
                raise ValueError(
                    f"{config} asks for {key}={value!r}, code from the hub, which is not run here; remove it"
                )
            if key in ("quantization_config", "compression_config") and value:
                method = value.get("quant_method", "an unknown method") if isinstance(value, dict) else value
                raise NotImplementedError(
                    f"the weights of {path} are quantized ({key}: {method}) and cannot be pruned; take the model they "
                    "were quantized from, or dequantize them first (model.dequantize() and save_pretrained() of "
                    "transformers)"
                )
        return dict(pairs)

    read_json(config)
    json.loads(config.read_bytes(), object_pairs_hook=check)  # of every object in it


def _auto_map(path: Path) -> str:
    files = [path / name for name in (CONFIG_NAME, "tokenizer_config.json") if (path / name).is_file()]
    return "; ".join(f"auto_map of {file.name}: {read_json(file).get('auto_map')}" for file in files)


def load_config(path: Path) -> Any:
    """Return the configuration of the model directory ``path``, as transformers reads it. Local; no code of it is run.

    Raises:
        ValueError, NotImplementedError: as :func:`check_config`, or transformers cannot read it.
        ImportError: the extra ``hf`` is not installed.
    """
    transformers = import_extra("transformers", "hf")
    check_config(path)
    with one_line_errors(path, "model"):
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def build_on_meta(directory: HfDirectory, dtype: torch.dtype | None = None) -> tuple[nn.Module, Regions]:
    """Return the causal language model of the directory's config on the meta device, its weights tied.

    With it comes where every tensor of the checkpoint is in it (:func:`model_regions`). Parameters have ``dtype``, or
    else the dtypes of the checkpoint. Local; nothing is communicated.

    Raises:
        ImportError: the extra ``hf`` is not installed.
        NotImplementedError: the checkpoint holds the model's tensors in a form that is not read, or quantized.
        ValueError: transformers knows no such model, or would run code from elsewhere for it; the checkpoint
            has tensors it has not, lacks some, or has them in other shapes, or integers for its weights, or several
            dtypes for one.
    """
    transformers = import_extra("transformers", "hf")
    path, tensors = directory.path, directory.tensors
    config = load_config(path)
    with one_line_errors(path, "model"):
        if (getattr(config, "num_hidden_layers", 0) or 0) > len(tensors):
            raise ValueError(f"{config.num_hidden_layers} layers cannot be made of {len(tensors)} tensors")
        dtypes = {} if dtype is None else {"dtype": dtype}
        with _building, torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False, **dtypes)
        if (path / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    state = model.state_dict(keep_vars=True)
    regions = model_regions(model, {name: entry.shape for name, (_, entry) in tensors.items()}, path)
    for name, parts in regions_by_name(regions.values()).items():
        stored = {tensors[region.stored][1].dtype: region.stored for region in reversed(parts)}  # the first of each
        for kind, tensor in stored.items():
            if state[name].is_floating_point() and not kind.is_floating_point:
                raise ValueError(
                    f"tensor {tensor!r} of {path} is {kind}: integer weights (quantized ones) cannot be pruned"
                )
        if dtype is None:
            if len(stored) > 1:
                raise ValueError(
                    f"tensors {' and '.join(map(repr, stored.values()))} of {path} are parts of one weight, {name!r}, "
                    f"and stored as {' and '.join(map(str, stored))}: say which it is to have (dtype=..., --dtype)"
                )
            state[name].data = state[name].data.to(next(iter(stored)))
    check_tensors(state, path, regions)
    return model, regions


def build_like(model: nn.Module, config: Any) -> nn.Module:
    """Return a model of the class of ``model``, made of ``config``, on the meta device, its weights tied. Local."""
    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with _building, own_settings(), torch.device("meta"):
        built: nn.Module = kind(config)
    return built


def compute_buffers(model: Any) -> None:
    """Let transformers compute what no checkpoint of ``model`` holds, on the CPU: rotary frequencies, causal masks.

    It does so where it initializes weights, in ``_init_weights``. The model is on the meta device, so weights stay
    what they are. Local; nothing is communicated.

    Raises:
        NotImplementedError: a buffer is not computed.
    """
    persistent = model.state_dict().keys()
    names = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in persistent]
    owners = {name.rpartition(".")[0] for name in names}
    computed: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for value in (0, 1):  # what is computed does not depend on what was there before
        for prefix, module in model.named_modules():
            module._is_hf_initialized = prefix not in owners
        for name in names:
            owner, _, attribute = name.rpartition(".")
            filled = torch.full_like(model.get_buffer(name), value, device="cpu")
            model.get_submodule(owner).register_buffer(attribute, filled, persistent=False)
        with _building, own_settings(), torch.device("cpu"):
            model.initialize_weights()
        for name in names:
            computed[name].append(model.get_buffer(name).clone().reshape(-1).view(torch.uint8))
    for name, (one, other) in computed.items():
        if not torch.equal(one, other):
            raise NotImplementedError(
                f"the buffer {name!r} of {type(model).__name__} is in no checkpoint and transformers does not compute "
                "it for a model built on the meta device; this architecture cannot be loaded in shards"
            )
