"""The part of one parameter that this rank holds.

Nouns: a *LocalShard* is that part and the place of each of its elements (`Shard` alone is torch's placement).
*Replicas* hold the same elements. Their *owner* is the lowest rank that holds them, and only owners are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from typing_extensions import override

from distprune.collectives.roster import Layout
from distprune.formatting import count, one_line
from distprune.shards.device import chunk_size, on_host
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE = Layout("whole", None, 1)


@dataclass(frozen=True, eq=False)
class Ownership:
    """``owned``: whether this rank counts the elements. ``num_replicas``: how many ranks hold the same elements.

    >>> Ownership(owned=False, num_replicas=2).owned  # a copy, which another rank counts
    False

    ``mesh_ranks``: of which global ranks that is said; ``None``: of all. A DTensor says it of its own mesh, and there
    may be copies on others. (On an FSDP x TP mesh, what tensor parallelism does not cut is sharded once in every
    column.) ``layout``: which ranks hold which parts, if that is known.
    """

    owned: bool = True
    num_replicas: int = 1
    mesh_ranks: frozenset[int] | None = None
    layout: Layout | None = None

    @override
    def __repr__(self) -> str:
        meant = "all ranks" if self.mesh_ranks is None else f"{len(self.mesh_ranks)} ranks of a mesh"
        return one_line(self, f"{'owned' if self.owned else 'not owned'}, {self.num_replicas} replicas, of {meant}")


def no_values(name: str) -> ValueError:
    """Return the error for a parameter that is on the meta device where its values are needed."""
    return ValueError(
        f"{name!r} has no values on this rank (meta): load them first, on all ranks, and without offloading "
        "(Accelerate's device_map)"
    )


@dataclass(frozen=True, eq=False)
class LocalShard:
    """One parameter on this rank. ``local`` shares storage with the parameter, and is detached from gradients.

    >>> shard = LocalShard("weight", torch.ones(2, 3), Geometry.rows((8, 3), 2, 4), Ownership())
    >>> shard.shape
    (8, 3)

    ``ownership``: who counts these elements; a plain tensor leaves that open (``None``), until :meth:`owned_by` says it
    for the group.

    ``matrix``: how the parameter is a matrix; ``None``: dim 0 is the outputs. ``tensor``: the parameter as ``module``
    holds it under ``attribute``; ``None`` for FSDP1 and rows spread by hand. ``original_shape``: the shape of the
    parameter, if the geometry is of the flattened one (FSDP1). ``reshard``: what puts an FSDP1 parameter that a forward
    has gathered back to its shards. ``is_tied``: other modules hold the parameter, too.

    Raises:
        ValueError: ``local`` has another shape than the geometry says.
    """

    name: str
    local: torch.Tensor  # local shape
    geometry: Geometry
    ownership: Ownership | None = None
    matrix: Matrix | None = None
    tensor: torch.Tensor | None = None
    module: nn.Module | None = None
    attribute: str = ""
    original_shape: tuple[int, ...] | None = None
    reshard: Callable[[], None] | None = None
    is_tied: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the parameter."""
        return self.geometry.global_shape if self.original_shape is None else self.original_shape

    @property
    def owned(self) -> bool:
        """Whether this rank counts these elements; not if that is open."""
        return self.ownership is not None and self.ownership.owned

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same elements; 1 if that is open."""
        return 1 if self.ownership is None else self.ownership.num_replicas

    @property
    def layout(self) -> Layout | None:
        """Which ranks hold which parts, if ``tensor`` says so; what leaves its owner open is whole on every rank."""
        if self.ownership is None:
            return _WHOLE
        return None if self.tensor is None else self.ownership.layout

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{count(self.local.numel())} elements of {tuple(self.shape)} here, {self.name}")

    def as_matrix(self) -> Matrix:
        """Return how the parameter is a matrix."""
        return self.matrix or Matrix.of_shape(self.shape)

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != self.geometry.local_shape:
            raise ValueError(
                f"parameter {self.name!r}: the local tensor has shape {tuple(self.local.shape)}, its geometry in "
                f"{self.geometry.global_shape} says {self.geometry.local_shape}"
            )

    def owned_by(self, rank: int, first_holder: int, num_holders: int) -> LocalShard:
        """Return the shard, on global rank ``rank``, with an ownership that holds for all ranks. Local.

        ``first_holder`` is the lowest of the ``num_holders`` global ranks that hold a part of the parameter. Of copies
        on several meshes only the one on the mesh that contains ``first_holder`` is counted.
        """
        ownership = self.ownership
        if ownership is None:
            ownership = Ownership(rank == first_holder, num_holders)
        elif ownership.mesh_ranks is not None:
            num_copies = max(num_holders // len(ownership.mesh_ranks), 1)
            is_counted = ownership.owned and first_holder in ownership.mesh_ranks
            ownership = Ownership(is_counted, ownership.num_replicas * num_copies)
        return self.having(ownership=ownership)

    def having(self, **changes: Any) -> LocalShard:
        """Return the shard with other attributes than ``local`` and ``geometry``, which are not checked again."""
        copy = object.__new__(LocalShard)
        vars(copy).update(vars(self), **changes)
        return copy


def flat_chunk(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements ``start`` to ``stop`` of ``tensor`` in row-major order: a view where it is contiguous.

    Else a copy, which reads no more than three times as many elements.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row_numel = tensor[0].numel()
    first_row, end_row = start // row_numel, -(-stop // row_numel)
    if row_numel > stop - start > 0:  # cut along inner dims
        starts = [(row, row * row_numel) for row in range(first_row, end_row)]
        return torch.cat([flat_chunk(tensor[i], max(start - at, 0), min(stop - at, row_numel)) for i, at in starts])
    rows = tensor[first_row:end_row].reshape(-1)
    return rows[start - first_row * row_numel : stop - first_row * row_numel]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``values`` as integers: a view. Of floats only +0.0 has none set.

    Raises:
        NotImplementedError: no integer has as many (complex128).
    """
    if values.itemsize not in _INTEGER_OF_SIZE:
        raise NotImplementedError(
            f"zeros of {values.dtype} weights cannot be held: no integer has as many bits; convert these weights to "
            "complex64, or leave them out with exclude"
        )
    return values.view(_INTEGER_OF_SIZE[values.itemsize])


def as_array(tensor: torch.Tensor) -> npt.NDArray[np.signedinteger] | None:
    """Return the bits of all elements, 1-D, as integers: a view. ``None`` where they lie elsewhere or scattered."""
    if not (on_host(tensor.device) and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous()):
        return None
    array: npt.NDArray[np.signedinteger] = bits_of(tensor.detach()).numpy().reshape(-1)
    return array


def bytes_of(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of ``values``, on the host, 1-D: a view where they are contiguous."""
    return values.contiguous().view(-1).view(torch.uint8).numpy()


def flat_chunks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first offset, elements) over all of ``tensor``, chunk by chunk."""
    size = chunk_size(tensor.device)
    for start in range(0, tensor.numel(), size):
        yield start, flat_chunk(tensor, start, min(start + size, tensor.numel()))


def cut(whole: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return the local part of ``whole`` that ``geometry`` names: a view where every dim is one run."""
    if tuple(whole.shape) != geometry.global_shape:
        raise ValueError(f"{tuple(whole.shape)=} is not the global shape {geometry.global_shape}")
    if geometry.local_numel == 0:
        return whole.new_empty(geometry.local_shape)
    for dim, runs in enumerate(geometry.dim_runs[: whole.ndim]):
        if len(runs) == 1:
            whole = whole.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
        else:
            whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return whole
