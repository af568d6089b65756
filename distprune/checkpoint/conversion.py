"""What transformers makes of stored tensors on loading, followed without their values: where each of them goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.regions import Region


class Placed:
    """A tensor of known ``shape``, made of ``regions`` of stored ones. Transformers' converters take it for a tensor.

    They run on the shapes alone. One that does more than placing (a permutation by reshaping, dequantization) fails.
    """

    def __init__(self, shape: Iterable[int], regions: list[Region]) -> None:
        self.shape, self.regions = torch.Size(shape), regions

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
    _check_alike(tensors, None)
    rows = [
        Placed(_with(placed.shape, dim, dim, 1), [region.unsqueezed(dim) for region in placed.regions])
        for placed in tensors
    ]
    return _cat(rows, dim)


def _cat(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    _check_alike(tensors, dim)
    starts = itertools.accumulate((placed.shape[dim] for placed in tensors), initial=0)
    regions = [
        region.moved(dim, start) for placed, start in zip(tensors, starts, strict=False) for region in placed.regions
    ]
    size = sum(placed.shape[dim] for placed in tensors)
    return Placed(_with(tensors[0].shape, dim, dim + 1, size), regions)


def _split(tensor: Placed, sizes: Sequence[int], dim: int = 0) -> list[Placed]:
    if sum(sizes) != tensor.shape[dim]:
        stored = tensor.regions[0].stored
        raise ValueError(f"tensor {stored!r} is {list(tensor.shape)}, and its parts are {list(sizes)} along dim {dim}")
    parts, start = [], 0
    for size in sizes:
        inside = [region.narrowed(dim, start, size) for region in tensor.regions]
        parts.append(Placed(_with(tensor.shape, dim, dim + 1, size), [region for region in inside if region.numel]))
        start += size
    return parts


def _chunk(tensor: Placed, chunks: int, dim: int = 0) -> list[Placed]:
    whole = torch.empty(tensor.shape[dim], dtype=torch.uint8, device="meta")
    return _split(tensor, [len(part) for part in whole.chunk(chunks)], dim)


def _transpose(tensor: Placed, dim0: int, dim1: int) -> Placed:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return Placed((tensor.shape[dim] for dim in order), [region.permuted(order) for region in tensor.regions])


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}


def _with(shape: Sequence[int], low: int, high: int, size: int) -> tuple[int, ...]:
    """Return ``shape`` with ``size`` in the place of its dims from ``low`` to ``high``."""
    return (*shape[:low], size, *shape[high:])


def _check_alike(tensors: Sequence[Placed], dim: int | None) -> None:
    """Raise a ValueError unless ``tensors`` are of one shape but for ``dim``."""
    first, *others = tensors
    for other in others:
        sizes = itertools.zip_longest(first.shape, other.shape)
        if any(one != two and number != dim for number, (one, two) in enumerate(sizes)):
            raise ValueError(
                f"{first.regions[0].stored!r} makes {list(first.shape)} and {other.regions[0].stored!r} "
                f"{list(other.shape)}: they are parts of one weight, and do not go together"
            )


def converted(converter: Any, name: str, shape: Sequence[int], model: Any) -> dict[str, Placed]:
    """Return what ``converter`` makes of all it has collected for the tensor ``name``, of ``shape``, by name. Local.

    Raises:
        NotImplementedError: it does more than placing.
        ValueError: tensors are missing, or those that are there do not go together.
    """
    loading = import_extra("transformers.core_model_loading", "hf")
    lists = [[placed.regions[0].stored for placed in tensors] for tensors in converter.collected_tensors.values()]
    stacked = (shape[step.dim] for step in converter.operations if isinstance(step, loading.MergeModulelist))
    missing = _missing(lists, next(stacked, 0))
    if missing:
        raise ValueError(f"tensors of {name!r} are missing: {missing[:5]}")
    absent = [pattern for pattern in converter.source_patterns if pattern not in converter.collected_tensors]
    try:
        made = converter.convert(name, model=model, config=model.config)
    except Exception as error:  # of whatever it makes of tensors that it does not expect
        if absent:
            raise ValueError(f"tensors of {name!r} are missing: all that are called as {absent}") from error
        if isinstance(error, ValueError):
            raise
        steps = ", ".join(type(step).__name__ for step in converter.operations)
        raise NotImplementedError(
            f"tensor {lists[0][0]!r} is stored in another form than {type(model).__name__} holds it, and is not only "
            f"put in its place on loading ({steps}: {error}); such checkpoints cannot be read in shards"
        ) from error
    return {target: of[0] if isinstance(of, list) else of for target, of in made.items()}


def _missing(lists: Sequence[Sequence[str]], num: int) -> list[str]:
    """Return some of the names that are missing from lists of names that differ in a number alone.

    A number that is in one list, or less than ``num``, is to be in all of them.
    """
    parts = [[name.split(".") for name in names] for names in lists]
    places = {place for names in parts for place, words in enumerate(zip(*names, strict=False)) if len({*words}) > 1}
    if len(places) != 1 or any(len(name) <= max(places) for names in parts for name in names):
        return []
    (place,) = places
    there = [{name[place] for name in names} for names in parts]
    wanted = set().union(*there, map(str, range(min(num, max(map(len, there)) + 1))))
    return [
        ".".join([*names[0][:place], number, *names[0][place + 1 :]])
        for names, numbers in zip(parts, there, strict=True)
        for number in sorted(wanted - numbers)
    ]
