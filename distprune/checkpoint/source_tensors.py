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
from distprune.checkpoint.meta_model import build_like, build_on_meta
from distprune.checkpoint.naming import check_complete, check_tensors, model_regions
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
    prefix = f"{decoder_blocks(model)[0][0].rpartition('.')[0]}." if layers is not None else ""
    numbers = {str(old): str(new) for new, old in enumerate(layers or ())}  # of layers, before and now
    number_of = {  # of the layer that a tensor of the model is in; None: it is in none
        name: name.removeprefix(prefix).partition(".")[0] if prefix and name.startswith(prefix) else None
        for name in before
    }
    new_names = {
        name: name if number is None else f"{prefix}{numbers[number]}{name[len(prefix) + len(number) :]}"
        for name, number in number_of.items()
        if number is None or number in numbers
    }
    absent = [name for name in new_names.values() if name not in state]
    if absent:
        raise ValueError(f"the model has no {absent[:5]} ({len(absent)} in all), which {source.path} holds")
    check_complete(state, source, new_names.values())
    shapes = {old: tuple(state[name].shape) for old, name in new_names.items()}
    stored_names = {
        stored: _renumbered(stored, number_of[of_stored[0].name], numbers)
        for stored, of_stored in regions.items()
        if of_stored[0].name in new_names
    }
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
    shapes, wanted = ({name: list(of.shape) for name, of in each.items()} for each in (state, made.state_dict()))
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name!r} is {shapes.get(name)} in the model, and its config makes {wanted.get(name)}"
            )
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    return config, made


def _renumbered(stored: str, number: str | None, numbers: Mapping[str, str]) -> str:
    """Return the stored name of a tensor of layer ``number``, whose number is another one now.

    Raises:
        NotImplementedError: the first number in ``stored`` is not that of the layer.
    """
    if number is None or numbers[number] == number:
        return stored
    first = re.search(r"(?<![^.])\d+(?![^.])", stored)
    if first is None or first[0] != number:
        raise NotImplementedError(
            f"tensor {stored!r} of layer {number} is not named after it: layers cannot be removed"
        )
    return f"{stored[: first.start()]}{numbers[number]}{stored[first.end() :]}"
