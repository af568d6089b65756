"""What transformers makes of stored tensors on loading, followed without their values: where each of them goes.

Its own converters run, on tensors of which only the shape is known, and which parts of stored tensors they are made of.
A converter that does more than placing (a permutation by reshaping, dequantization) is not followed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.regions import Region

T = TypeVar("T")


class Placed:
    """A tensor of known ``shape``, made of ``regions`` of stored ones. Transformers takes it for a tensor."""

    def __init__(self, shape: Iterable[int], regions: list[Region]) -> None:
        self.shape, self.regions = torch.Size(shape), regions

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function not in _FUNCTIONS:
            raise NotImplementedError(function.__name__)
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def contiguous(self) -> Placed:
        """Return itself: where elements lie in memory does not matter."""
        return self


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
    places = {place for names in parts for place, of in enumerate(zip(*names, strict=False)) if len(set(of)) > 1}
    place = places.pop() if len(places) == 1 else 0
    if not place or any(len(name) <= place for names in parts for name in names):
        return []
    there = [{name[place] for name in names} for names in parts]
    wanted = set().union(*there, map(str, range(min(num, max(map(len, there)) + 1))))
    return [
        ".".join([*names[0][:place], number, *names[0][place + 1 :]])
        for names, of in zip(parts, there, strict=True)
        for number in sorted(wanted - of)
    ]


def _stack(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    _check_alike(tensors, None)
    return _cat([_unsqueezed(placed, dim) for placed in tensors], dim)


def _unsqueezed(tensor: Placed, dim: int) -> Placed:
    regions = [
        region._replace(
            bounds=(*region.bounds[:dim], (0, 1), *region.bounds[dim:]), dims=tuple(d + (d >= dim) for d in region.dims)
        )
        for region in tensor.regions
    ]
    return Placed((*tensor.shape[:dim], 1, *tensor.shape[dim:]), regions)


def _cat(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    _check_alike(tensors, dim)
    starts = itertools.accumulate((placed.shape[dim] for placed in tensors), initial=0)
    regions = [
        _moved(region, dim, start) for placed, start in zip(tensors, starts, strict=False) for region in placed.regions
    ]
    return Placed(_with(tensors[0].shape, dim, sum(placed.shape[dim] for placed in tensors)), regions)


def _split(tensor: Placed, sizes: Sequence[int], dim: int = 0) -> list[Placed]:
    if sum(sizes) != tensor.shape[dim]:
        stored = tensor.regions[0].stored
        raise ValueError(f"tensor {stored!r} is {list(tensor.shape)}, and its parts are {list(sizes)} along dim {dim}")
    starts = itertools.accumulate(sizes, initial=0)
    return [
        Placed(
            _with(tensor.shape, dim, size),
            [_moved(part, dim, -start) for of in tensor.regions if (part := _narrowed(of, dim, start, size)).numel],
        )
        for size, start in zip(sizes, starts, strict=False)
    ]


def _chunk(tensor: Placed, chunks: int, dim: int = 0) -> list[Placed]:
    whole = torch.empty(tensor.shape[dim], dtype=torch.uint8, device="meta")
    return _split(tensor, [len(part) for part in whole.chunk(chunks)], dim)


def _transpose(tensor: Placed, dim0: int, dim1: int) -> Placed:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    regions = [
        region._replace(bounds=tuple(region.bounds[d] for d in order), dims=tuple(order.index(d) for d in region.dims))
        for region in tensor.regions
    ]
    return Placed((tensor.shape[d] for d in order), regions)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}


def _check_alike(tensors: Sequence[Placed], dim: int | None) -> None:
    """Raise a ValueError unless ``tensors`` are of one shape but for ``dim``."""
    first = tensors[0]
    for other in tensors[1:]:
        if len(other.shape) != len(first.shape) or any(
            one != two and d != dim for d, (one, two) in enumerate(zip(first.shape, other.shape, strict=True))
        ):
            raise ValueError(
                f"{first.regions[0].stored!r} makes {list(first.shape)} and {other.regions[0].stored!r} "
                f"{list(other.shape)}: they are parts of one weight, and do not go together"
            )


def _with(values: Sequence[T], dim: int, value: T) -> tuple[T, ...]:
    """Return ``values`` of all dims, with ``value`` for ``dim``."""
    return (*values[:dim], value, *values[dim + 1 :])


def _moved(region: Region, dim: int, by: int) -> Region:
    start, stop = region.bounds[dim]
    return region._replace(bounds=_with(region.bounds, dim, (start + by, stop + by)))


def _narrowed(region: Region, dim: int, start: int, size: int) -> Region:
    """Return what of ``region`` is in ``size`` indices from ``start`` on along ``dim``."""
    low, high = region.bounds[dim]
    new_low = max(low, start)
    bounds = _with(region.bounds, dim, (new_low, max(min(high, start + size), new_low)))
    firsts = zip(region.dims, region.stored_start, strict=True)
    return region._replace(
        bounds=bounds, stored_start=tuple(first + (new_low - low) * (d == dim) for d, first in firsts)
    )
