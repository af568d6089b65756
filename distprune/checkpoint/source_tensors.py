"""Which tensors of its source a model still has, which may have become smaller since it was loaded."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.hf_directory import HfDirectory
from distprune.checkpoint.naming import check_complete, check_tensors, model_regions
from distprune.checkpoint.pretrained import build_like, build_on_meta
from distprune.checkpoint.regions import Region, Shape, extents, fitted, regions_by_name
from distprune.models.decoder_blocks import decoder_blocks


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the source, under the ``name`` and in the ``shape`` in which it is written.

    ``regions``: where it is in the model.
    """

    name: str
    shape: Shape
    regions: list[Region]


@dataclass(frozen=True)
class Output:
    """``tensors``: those to write, by their names in the source. ``num_removed``: how many elements of the source are
    gone. ``config``: of a model of other sizes than the source's; else ``None``."""

    tensors: dict[str, SourceTensor]
    num_removed: int
    config: dict[str, Any] | None


def output_of(model: nn.Module, source: HfDirectory, layers: Sequence[int] | None) -> Output:
    """Return what is to be written of ``model``, in the form in which ``source`` holds it. Local.

    ``layers``: which decoder blocks of ``source`` the model still has, by number, in order; ``None``: all.

    Raises:
        ValueError: the model lacks a tensor that ``source`` holds, or has another one, or its config makes others.
        NotImplementedError: tensors are not stored under the numbers of their layers, or the form in which they are
            stored does not go with the model's sizes.
    """
    state, entries = model.state_dict(keep_vars=True), source.tensors
    # Of the config's own model: transformers does not know the classes of a sharded one.
    regions = build_on_meta(source, torch.float32)[1]  # of whatever dtype
    before = {name: extents(of_name) for name, of_name in regions_by_name(regions.values()).items()}
    blocks = f"{decoder_blocks(model)[0][0].rpartition('.')[0]}." if layers is not None else ""
    numbers = {str(old): str(new) for new, old in enumerate(layers or ())}  # of layers, before and now
    new_names: dict[str, str] = {}  # of the model's tensors that are left
    stored_names: dict[str, str] = {}  # of the stored ones
    for stored, of_stored in regions.items():
        name = of_stored[0].name
        number = name.removeprefix(blocks).partition(".")[0] if blocks and name.startswith(blocks) else None
        if number is None or number in numbers:
            stored_names[stored] = _renumbered(stored, number, numbers)
            new_names |= {region.name: _renumbered(region.name, number, numbers) for region in of_stored}
    absent = [name for name in new_names.values() if name not in state]
    if absent:
        raise ValueError(f"the model has no {absent[:5]} ({len(absent)} in all), which {source.path} holds")
    check_complete(state, source, new_names.values())
    shapes = {old: tuple(state[name].shape) for old, name in new_names.items()}
    config, now, stored_shapes = None, regions, {stored: entries[stored][1].shape for stored in regions}
    if shapes != before:
        config, smaller = _config_and_model(model, state)
        stored_shapes = {old: shape for old, shape in fitted(regions, shapes).items() if old in stored_names}
        now = model_regions(smaller, {stored_names[old]: shape for old, shape in stored_shapes.items()}, source.path)
        check_tensors(smaller.state_dict(keep_vars=True), source, now)
    tensors = {
        old: SourceTensor(stored_names[old], shape, now[stored_names[old]]) for old, shape in stored_shapes.items()
    }
    num_before = sum(math.prod(entries[stored][1].shape) for stored in regions)
    return Output(tensors, num_before - sum(map(math.prod, stored_shapes.values())), config)


def _config_and_model(model: Any, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], nn.Module]:
    """Return the config of ``model`` as transformers writes it, and what it makes, which has these tensors. Local.

    Raises:
        ValueError: it makes others, or of other shapes.
    """
    made = build_like(model, copy.deepcopy(model.config))
    shapes, wanted = ({name: list(t.shape) for name, t in tensors.items()} for tensors in (state, made.state_dict()))
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name!r} is {shapes.get(name)} in the model, and its config makes {wanted.get(name)}"
            )
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    return config, made


def _renumbered(name: str, number: str | None, numbers: Mapping[str, str]) -> str:
    """Return the name of a tensor of layer ``number`` (``None``: of no layer), which has another number now.

    Raises:
        NotImplementedError: the first number in ``name`` is not that of the layer.
    """
    if number is None or numbers[number] == number:
        return name
    first = re.search(r"(?<![^.])\d+(?![^.])", name)
    if first is None or first[0] != number:
        raise NotImplementedError(f"tensor {name!r} of layer {number} is not named after it: layers cannot be removed")
    return f"{name[: first.start()]}{numbers[number]}{name[first.end() :]}"
