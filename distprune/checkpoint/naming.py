"""Which tensor of a checkpoint is which of the model: transformers renames some on loading."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.extras import import_extra
from distprune.checkpoint.hf_directory import HfDirectory

__all__ = ["check_complete", "check_tensors", "different_values", "model_names", "names_by_tensor", "renumbered"]


def model_names(model: Any, directory: HfDirectory) -> dict[str, str]:
    """Return the model's name for every tensor of the checkpoint, in the checkpoint's order.

    Tensors that transformers leaves out on loading (its ``_keys_to_ignore_on_load_unexpected``) are
    left out here too.

    Raises:
        NotImplementedError: a tensor is stored in another form than the model holds it (experts apart,
            fused projections), which transformers converts on loading.
        ValueError: the model has no tensor of that name.
    """
    state = model.state_dict(keep_vars=True)
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names: dict[str, str] = {}
    unexpected = []
    for stored in directory.tensors:
        name = stored if stored in state else _renamed(model, stored, state)
        if name in state:
            names[stored] = name
        elif not any(pattern.search(stored) for pattern in ignored):
            unexpected.append(stored)
    if unexpected:
        raise ValueError(
            f"{directory.path} holds {len(unexpected)} tensors that are unexpected in a {type(model).__name__} of its "
            f"config: {unexpected[:5]}"
        )
    return names


def renumbered(name: str, index: int, new_index: int) -> str:
    """Return the stored name ``name``, of a tensor of layer ``index``, as it is where the layer is ``new_index``.

    Raises:
        NotImplementedError: the first number in the name is not that of the layer.
    """
    parts = name.split(".")
    place = next((number for number, part in enumerate(parts) if part.isdecimal()), None)
    if place is None or int(parts[place]) != index:
        raise NotImplementedError(f"tensor {name!r} of layer {index} is not named after it: layers cannot be removed")
    parts[place] = str(new_index)
    return ".".join(parts)


def check_tensors(state: dict[str, torch.Tensor], directory: HfDirectory, names: dict[str, str]) -> None:
    """Check that every tensor of ``state`` is in the directory, under one of its ``names`` at least. Local.

    Raises:
        ValueError: one is not, or has another shape there.
    """
    check_complete(state, directory, names.values())
    tensors = directory.tensors
    for stored, name in names.items():
        shape, wanted = list(tensors[stored][1].shape), list(state[name].shape)
        if shape != wanted:
            raise ValueError(f"tensor {stored!r} is {shape} in {directory.path} and {wanted} in the model")


def check_complete(state: dict[str, torch.Tensor], directory: HfDirectory, names: Iterable[str]) -> None:
    """Raise a ValueError unless every tensor of ``state`` has one of the ``names`` that the directory holds. Local."""
    there = set(names)
    missing = [aliases[0] for aliases in names_by_tensor(state) if not there.intersection(aliases)]
    if missing:
        raise ValueError(
            f"{directory.path} lacks {len(missing)} tensors that the model calls for: missing {missing[:5]}"
        )


def names_by_tensor(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names in groups; tied weights are one tensor under several."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def different_values(path: Path, first: str, other: str) -> ValueError:
    """Return what is raised where two tensors that the config ties are not the same."""
    return ValueError(
        f"{path} holds {first!r} and {other!r} with different values, and its config ties them; "
        'set "tie_word_embeddings" to false in its config.json'
    )


def _renamed(model: Any, stored: str, state: dict[str, Any]) -> str:
    loading = import_extra("transformers.core_model_loading", "hf")
    transforms = import_extra("transformers.conversion_mapping", "hf").get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, loading.WeightConverter)]
    name, converter = loading.rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
    if converter is not None:
        raise NotImplementedError(
            f"tensor {stored!r} is stored in another form than {type(model).__name__} holds it; checkpoints that "
            "transformers converts on loading cannot be read in shards"
        )
    return str(name)
