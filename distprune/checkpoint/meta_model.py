"""The model of a checkpoint's config without its memory."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.extras import import_extra
from distprune.checkpoint.hf_directory import HfDirectory
from distprune.checkpoint.naming import model_names

__all__ = ["build_on_meta"]

# transformers builds under a default dtype of the whole process: two threads at once would keep each other's.
_building = threading.Lock()


def build_on_meta(directory: HfDirectory, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the causal language model of the directory's config on the meta device, its weights tied.

    Parameters have ``dtype``, or else the dtypes of the checkpoint. Local; nothing is communicated.

    Raises:
        ImportError: the extra ``hf`` is not installed.
        NotImplementedError: the checkpoint holds the model's tensors in another form.
        ValueError, OSError: transformers knows no such model, or the checkpoint has tensors it has not.
    """
    transformers = import_extra("transformers", "hf")
    config = transformers.AutoConfig.from_pretrained(directory.path, local_files_only=True)
    with _building, torch.device("meta"):
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
