"""Which tensor of a checkpoint is which of the model: transformers renames some on loading, and puts some together.

Its converters are followed without values: a stored tensor is a *Placed*, which they take for a tensor.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.regions import Region, extents, regions_by_name

Regions = dict[str, list[Region]]  # by the name of a stored tensor: where it is in the model


class Placed:
    """A tensor that is made of ``regions`` of stored ones; ``meta``: of its shape, on the meta device.

    A converter that does more than placing (a permutation by reshaping, dequantization) fails.
    """

    def __init__(self, meta: torch.Tensor, regions: Sequence[Region]) -> None:
        self.meta, self.shape, self.regions = meta, meta.shape, regions

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _FUNCTIONS:
            raise NotImplementedError(function.__name__)
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def contiguous(self) -> Placed:
        """Return itself: where elements lie in memory does not matter."""
        return self


def _stack(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    regions = [
        region.unsqueezed(dim).moved(dim, place) for place, placed in enumerate(tensors) for region in placed.regions
    ]
    return Placed(_joined(torch.stack, tensors, dim), regions)


def _cat(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    starts = itertools.accumulate((placed.shape[dim] for placed in tensors), initial=0)
    regions = [
        region.moved(dim, start) for placed, start in zip(tensors, starts, strict=False) for region in placed.regions
    ]
    return Placed(_joined(torch.cat, tensors, dim), regions)


def _joined(join: Callable[..., torch.Tensor], tensors: Sequence[Placed], dim: int) -> torch.Tensor:
    try:
        return join([placed.meta for placed in tensors], dim)
    except RuntimeError as error:
        first = {str(list(placed.shape)): placed.regions[0].stored for placed in tensors[::-1]}
        shapes = " and ".join(f"{stored!r} {shape}" for shape, stored in first.items())
        raise ValueError(f"{shapes} are parts of one weight, and do not go together") from error


def _split(tensor: Placed, sizes: Sequence[int], dim: int = 0) -> list[Placed]:
    if sum(sizes) != tensor.shape[dim]:
        stored = tensor.regions[0].stored
        raise ValueError(f"tensor {stored!r} is {list(tensor.shape)}, and its parts are {list(sizes)} along dim {dim}")
    return _parts(tensor, torch.split(tensor.meta, list(sizes), dim), dim)


def _parts(tensor: Placed, metas: Iterable[torch.Tensor], dim: int) -> list[Placed]:
    parts, start = [], 0
    for meta in metas:
        inside = [region.narrowed(dim, start, meta.shape[dim]) for region in tensor.regions]
        parts.append(Placed(meta, [region for region in inside if region.numel]))
        start += meta.shape[dim]
    return parts


def _transpose(tensor: Placed, dim0: int, dim1: int) -> Placed:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return Placed(tensor.meta.transpose(dim0, dim1), [region.permuted(order) for region in tensor.regions])


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: lambda tensor, chunks, dim=0: _parts(tensor, tensor.meta.chunk(chunks, dim), dim),
    torch.transpose: _transpose,
}


def _converted(converter: Any, name: str, model: Any) -> dict[str, Placed]:
    """Return what ``converter`` makes of all it has collected for the tensor ``name``, by name.

    Raises:
        NotImplementedError: it does more than placing.
        ValueError: tensors are missing, or those that are there do not go together.
    """
    absent = [pattern for pattern in converter.source_patterns if pattern not in converter.collected_tensors]
    stored = next(iter(converter.collected_tensors.values()))[0].regions[0].stored
    try:
        made = converter.convert(name, model=model, config=model.config)
    except Exception as error:  # of whatever it makes of tensors that it does not expect
        if absent:
            raise ValueError(f"tensors of {name!r} are missing: all that are called as {absent}") from error
        if isinstance(error, ValueError):
            raise
        steps = ", ".join(type(step).__name__ for step in converter.operations)
        raise NotImplementedError(
            f"tensor {stored!r} is stored in another form than {type(model).__name__} holds it, and is not only "
            f"put in its place on loading ({steps}: {error}); such checkpoints cannot be read in shards"
        ) from error
    return {target: placed[0] if isinstance(placed, list) else placed for target, placed in made.items()}


def _ignored(model: Any) -> list[re.Pattern[str]]:
    """Return the names that ``PreTrainedModel._adjust_missing_and_unexpected_keys`` of transformers leaves out."""
    patterns, buffers = {*(model._keys_to_ignore_on_load_unexpected or ())}, [name for name, _ in model.named_buffers()]
    old = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}  # once stored
    patterns |= {old[end] for end in old if any(name.endswith(end) for name in buffers)}
    return [re.compile(pattern) for pattern in patterns]


def model_regions(model: Any, shapes: Mapping[str, Sequence[int]], path: Path) -> Regions:
    """Return where in ``model`` every tensor of the checkpoint ``path`` is, in the order of their ``shapes``. Local.

    Tensors that transformers leaves out on loading are left out here too.

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
    placed: list[tuple[str, Placed]] = []  # by the model's name
    collecting: dict[str, Any] = {}  # by the first tensor that is made
    for stored in sorted(shapes, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = loading.rename_source_key(stored, [], [], prefix, state)
        shape = shapes[stored]
        whole = Placed(torch.empty(shape, dtype=torch.uint8, device="meta"), [Region.whole(stored, name, shape)])
        if name not in state or pattern is None:
            placed.append((name, whole))
            continue
        if name not in collecting:
            collecting[name] = copy.deepcopy(converter_of[pattern])
        collecting[name].add_tensor(name, stored, pattern, whole)
    for first, converter in collecting.items():
        try:
            placed += _converted(converter, first, model).items()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    regions: Regions = defaultdict(list)
    unexpected: list[str] = []
    ignored = _ignored(model)
    for name, made in placed:
        for region in made.regions:
            if name in state:
                regions[region.stored].append(region._replace(name=name))
            elif not any(pattern.search(name) for pattern in ignored):
                unexpected.append(region.stored)
    if unexpected:
        raise ValueError(
            f"{path} holds {len(unexpected)} tensors that are unexpected in a {type(model).__name__} of its config: "
            f"{unexpected[:5]}"
        )
    for name, parts in regions_by_name(regions.values()).items():
        if sum(region.numel for region in parts) > math.prod(extents(parts)):
            raise ValueError(f"{path} holds {name!r} twice, as {parts[0].stored!r} and as {parts[-1].stored!r}")
    return {stored: regions[stored] for stored in shapes if stored in regions}


def check_tensors(state: Mapping[str, torch.Tensor], where: object, regions: Regions) -> None:
    """Check that every tensor of ``state``, of a config's model, is there, under one of its names at least. Local.

    ``where``: what holds the tensors of ``regions``.

    Raises:
        ValueError: one is not, or has another shape there.
    """
    by_name = regions_by_name(regions.values())
    check_complete(state, where, by_name)
    for name, parts in by_name.items():
        shape, wanted = list(extents(parts)), list(state[name].shape)
        if shape != wanted:
            stored = [*dict.fromkeys(region.stored for region in parts)]
            raise ValueError(
                f"tensor {name!r}, made of {stored[:5]}, is {shape} in {where}, and {wanted} in the model of its config"
            )


def check_complete(state: Mapping[str, torch.Tensor], where: object, names: Iterable[str]) -> None:
    """Raise a ValueError unless every tensor of ``state`` has one of the ``names`` that are ``where``. Local."""
    there = set(names)
    missing = [aliases[0] for aliases in names_by_tensor(state) if not there.intersection(aliases)]
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} tensors that the model calls for: missing {missing[:5]}")


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
