"""What transformers makes of a model directory: its tokenizer, and the model of its config without its memory.

No code of the directory is run. Whatever transformers raises becomes one line.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distprune.checkpoint.hf_directory import CONFIG_NAME, HfDirectory, TensorEntry, read_json
from distprune.checkpoint.naming import Regions, check_tensors, model_regions
from distprune.checkpoint.optional_packages import import_extra
from distprune.shards.device import own_settings

_MAX_MESSAGE = 500  # characters
# transformers builds under a default dtype of the whole process: two threads at once would keep each other's.
_building = threading.Lock()


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
    check_config(path)
    with one_line_errors(path, "model"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if (getattr(config, "num_hidden_layers", 0) or 0) > len(tensors):
            raise ValueError(f"{config.num_hidden_layers} layers cannot be made of {len(tensors)} tensors")
        dtypes = {} if dtype is None else {"dtype": dtype}
        with _building, torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False, **dtypes)
        if (path / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    state = model.state_dict(keep_vars=True)
    regions = model_regions(model, {name: entry.shape for name, (_, entry) in tensors.items()}, path)
    held: dict[str, TensorEntry] = {}  # one that each of the model's tensors is made of
    for stored, of_stored in regions.items():
        entry = tensors[stored][1]
        for name in (region.name for region in of_stored):
            other = held.setdefault(name, entry)
            if state[name].is_floating_point() and not entry.dtype.is_floating_point:
                raise ValueError(
                    f"tensor {stored!r} of {path} is {entry.dtype}: integer weights (quantized ones) cannot be pruned"
                )
            if dtype is None and entry.dtype is not other.dtype:
                raise ValueError(
                    f"tensors {other.name!r} and {stored!r} of {path} are parts of one weight, {name!r}, and stored "
                    f"as {other.dtype} and {entry.dtype}: say which it is to have (dtype=..., --dtype)"
                )
            if dtype is None:
                state[name].data = state[name].data.to(entry.dtype)
    check_tensors(state, directory, regions)
    return model, regions


def build_like(model: nn.Module, config: Any) -> nn.Module:
    """Return a model of the class of ``model``, made of ``config``, on the meta device, its weights tied. Local."""
    kind: Any = next(of for of in type(model).__mro__ if not issubclass(of, FSDPModule))
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
    # What is computed does not depend on what was there before.
    low, high = (_computed_over(model, names, value) for value in (0, 1))
    for name in names:
        if not torch.equal(low[name], high[name]):
            raise NotImplementedError(
                f"the buffer {name!r} of {type(model).__name__} is in no checkpoint and transformers does not compute "
                "it for a model built on the meta device; this architecture cannot be loaded in shards"
            )


def _computed_over(model: Any, names: list[str], value: int) -> dict[str, torch.Tensor]:
    """Compute the buffers after filling them with ``value``, and return their bytes."""
    owners = {name.rpartition(".")[0] for name in names}
    for prefix, module in model.named_modules():
        module._is_hf_initialized = prefix not in owners
    for name in names:
        owner, _, attribute = name.rpartition(".")
        filled = torch.full_like(model.get_buffer(name), value, device="cpu")
        model.get_submodule(owner).register_buffer(attribute, filled, persistent=False)
    with own_settings(), torch.device("cpu"):
        model.initialize_weights()
    return {name: model.get_buffer(name).clone().reshape(-1).view(torch.uint8) for name in names}
