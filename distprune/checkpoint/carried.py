"""Which tensors of its directory a model still has, which may have become smaller since it was loaded."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.hf_directory import HfDirectory, TensorEntry
from distprune.checkpoint.meta_model import build_like, build_on_meta
from distprune.checkpoint.naming import check_complete, renumbered
from distprune.models import decoder_blocks

__all__ = ["Carried", "carried_tensors", "own_config"]


@dataclass(frozen=True)
class Carried:
    """One tensor of the source that the model still has."""

    read: TensorEntry  # in the source
    stored: str  # the name it is written under
    name: str  # the model's


def carried_tensors(
    model: nn.Module, source: HfDirectory, layers: Sequence[int] | None
) -> tuple[dict[str, Carried], int]:
    """Return the tensors to write by their names in ``source``, and how many elements of ``source`` are gone. Local.

    ``layers``: which decoder blocks of ``source`` the model still has, by number, in order; ``None``: all.

    Raises:
        ValueError: the model lacks a tensor that ``source`` holds, or has another one.
        NotImplementedError: tensors are not stored under the numbers of their layers.
    """
    state, tensors = model.state_dict(keep_vars=True), source.tensors
    prefix = f"{decoder_blocks(model)[0][0].rpartition('.')[0]}." if layers is not None else ""
    names = {stored: stored for stored in tensors}
    new_names = _in_smaller(names, prefix, layers)
    if not set(new_names.values()) <= state.keys():
        # Asked of the config's own model: transformers does not know the classes of a sharded one.
        names = build_on_meta(source)[1]
        new_names = _in_smaller(names, prefix, layers)
    absent = [name for name in new_names.values() if name not in state]
    if absent:
        raise ValueError(f"the model has no {absent[:5]} ({len(absent)} in all), which {source.path} holds")
    check_complete(state, source, new_names.values())
    carried = {}
    for old, name in new_names.items():
        stored = old
        if name != names[old]:
            stored = renumbered(old, *(int(of.removeprefix(prefix).partition(".")[0]) for of in (names[old], name)))
        carried[old] = Carried(tensors[old][1], stored, name)
    num_before = sum(math.prod(tensors[stored][1].shape) for stored in names)
    return carried, num_before - sum(math.prod(state[of.name].shape) for of in carried.values())


def own_config(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the config of ``model`` as transformers writes it, having seen that it makes these tensors. Local.

    Raises:
        ValueError: it makes others, or of other shapes.
    """
    made = build_like(model, copy.deepcopy(model.config)).state_dict()
    shapes, wanted = ({name: list(of.shape) for name, of in each.items()} for each in (state, made))
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name!r} is {shapes.get(name)} in the model, and its config makes {wanted.get(name)}"
            )
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    return config


def _in_smaller(names: Mapping[str, str], prefix: str, layers: Sequence[int] | None) -> dict[str, str]:
    """Return the names in the smaller model of those tensors that it has; its list of layers is ``prefix``."""
    if layers is None:
        return dict(names)
    numbers = {str(old): str(new) for new, old in enumerate(layers)}
    found = {}
    for stored, name in names.items():
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            found[stored] = name
        elif number in numbers:
            found[stored] = f"{prefix}{numbers[number]}{dot}{rest}"
    return found
