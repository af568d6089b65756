"""Which tensor of a checkpoint is which of the model: transformers renames some on loading, and puts some together."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.conversion import Placed, converted
from distprune.checkpoint.hf_directory import HfDirectory
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.regions import Region, extents, regions_by_name

Regions = dict[str, list[Region]]  # by the name of a stored tensor: where it is in the model


def model_regions(model: Any, shapes: Mapping[str, Sequence[int]], path: Path) -> Regions:
    """Return where in ``model`` every tensor of the checkpoint ``path`` is, in the order of their ``shapes``. Local.

    Tensors that transformers leaves out on loading (its ``_keys_to_ignore_on_load_unexpected``) are left out here too.

    Raises:
        NotImplementedError: a tensor is stored in another form than the model holds it, which transformers converts
            on loading by more than placing it.
        ValueError: the model has no tensor of that name; parts of one are missing, or do not go together.
    """
    # As convert_and_load_state_dict_in_model of transformers.core_model_loading does it.
    loading = import_extra("transformers.core_model_loading", "hf")
    transforms = import_extra("transformers.conversion_mapping", "hf").get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, loading.WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    found: Regions = {}
    collecting: dict[str, Any] = {}  # by the first tensor that is made
    unexpected: list[tuple[str, str]] = []  # the model's name, and the stored one
    for stored in sorted(shapes, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = loading.rename_source_key(stored, [], [], prefix, state)
        whole = [Region.whole(stored, name, shapes[stored])]
        if name not in state:
            unexpected.append((name, stored))
        elif pattern is None:
            found[stored] = whole
        else:
            if name not in collecting:
                collecting[name] = copy.deepcopy(converter_of[pattern])
            collecting[name].add_tensor(name, stored, pattern, Placed(shapes[stored], whole))
    for first, converter in collecting.items():
        try:
            made = converted(converter, first, state[first].shape, model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        for name, placed in made.items():
            for region in placed.regions:
                if name in state:
                    found.setdefault(region.stored, []).append(region._replace(name=name))
                else:
                    unexpected.append((name, region.stored))
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    extra = [stored for name, stored in unexpected if not any(pattern.search(name) for pattern in ignored)]
    if extra:
        raise ValueError(
            f"{path} holds {len(extra)} tensors that are unexpected in a {type(model).__name__} of its config: "
            f"{extra[:5]}"
        )
    for name, of_name in regions_by_name(found.values()).items():
        if sum(region.numel for region in of_name) > math.prod(extents(of_name)):
            raise ValueError(f"{path} holds {name!r} twice, as {of_name[0].stored!r} and as {of_name[-1].stored!r}")
    return {stored: found[stored] for stored in shapes if stored in found}


def check_tensors(state: Mapping[str, torch.Tensor], directory: HfDirectory, regions: Regions) -> None:
    """Check that every tensor of ``state`` is in the directory, under one of its names at least. Local.

    Raises:
        ValueError: one is not, or has another shape there.
    """
    by_name = regions_by_name(regions.values())
    check_complete(state, directory, by_name)
    for name, of_name in by_name.items():
        shape, wanted = list(extents(of_name)), list(state[name].shape)
        if shape == wanted:
            continue
        stored = list(dict.fromkeys(region.stored for region in of_name))
        if len(stored) == 1:
            raise ValueError(f"tensor {stored[0]!r} is {shape} in {directory.path} and {wanted} in the model")
        raise ValueError(
            f"tensors {stored[0]!r} to {stored[-1]!r} make {name!r} {shape} in {directory.path}, and it is {wanted} in "
            "the model"
        )


def check_complete(state: Mapping[str, torch.Tensor], directory: HfDirectory, names: Iterable[str]) -> None:
    """Raise a ValueError unless every tensor of ``state`` has one of the ``names`` that the directory holds. Local."""
    there = set(names)
    missing = [aliases[0] for aliases in names_by_tensor(state) if not there.intersection(aliases)]
    if missing:
        raise ValueError(
            f"{directory.path} lacks {len(missing)} tensors that the model calls for: missing {missing[:5]}"
        )


def names_by_tensor(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
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
