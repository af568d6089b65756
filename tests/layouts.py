"""The layouts of the contract: how a test's whole tensors are spread over the ranks.

Every layout is a function ``spread(whole, rank)`` that returns this rank's tensor, or ``None`` where the
rank does not hold the parameter. It relies on torch alone, never on the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["LAYOUTS", "Layout"]

DEVICE_TYPE = "cpu"  # of the meshes; tests/device/ has another

Spread = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Layout:
    """``make(world_size)`` is called once on every rank; ``spread(i, whole)`` for every parameter ``i``."""

    name: str
    world_sizes: tuple[int, ...]
    make: Callable[[int], Spread]

    @property
    def default_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that are run without ``--whole``."""
        return tuple(size for size in self.world_sizes if size < 5) or self.world_sizes


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh(DEVICE_TYPE, shape)


def _on(mesh: DeviceMesh, *placements: Placement) -> Spread:
    return lambda _, whole: distribute_tensor(whole.clone(), mesh, _fitting(whole, placements), src_data_rank=None)


def _fitting(whole: torch.Tensor, placements: tuple[Placement, ...]) -> list[Placement]:
    """Shard a one-dim tensor on the dim it has, and leave a scalar whole."""
    fitting: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            placement = Shard(min(placement.dim, whole.ndim - 1)) if whole.ndim else Replicate()
        fitting.append(placement)
    return fitting


def _plain(_: int) -> Spread:
    return lambda _, whole: whole.clone()


def _strided(world_size: int) -> Spread:
    """What FSDP2 on top of tensor parallel leaves: cut by the inner axis first, then by the outer."""
    mesh = _mesh(2, world_size // 2)

    def spread(_: int, whole: torch.Tensor) -> torch.Tensor:
        if whole.ndim == 0:
            return distribute_tensor(whole.clone(), mesh, [Replicate(), Replicate()], src_data_rank=None)
        outer, inner = mesh.get_coordinate() or []
        local = _piece(_piece(whole, mesh.size(1), inner), mesh.size(0), outer)
        placements = (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
        return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())

    return spread


def _piece(whole: torch.Tensor, num_pieces: int, index: int) -> torch.Tensor:
    pieces = whole.chunk(num_pieces)
    return (pieces[index] if index < len(pieces) else whole[:0]).clone()


def _stages(world_size: int) -> Spread:
    """A pipeline without replicas: every rank holds some of the parameters, whole."""
    return lambda i, whole: whole.clone() if i * world_size // 8 % world_size == dist.get_rank() else None


def _sharded_stages(world_size: int) -> Spread:
    """A pipeline of sharded stages: each parameter on the sub-mesh of one stage."""
    mesh = init_device_mesh(DEVICE_TYPE, (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    stage = (mesh.get_coordinate() or [0])[0]
    sub_mesh = mesh["dp"]

    def spread(i: int, whole: torch.Tensor) -> torch.Tensor | None:
        if i // 4 % 2 != stage:
            return None
        return distribute_tensor(whole.clone(), sub_mesh, _fitting(whole, (Shard(0),)), src_data_rank=None)

    return spread


def _copies(world_size: int) -> Spread:
    """What tensor parallelism leaves alone in FSDP x TP: sharded over each of several meshes, side by side."""
    mesh = init_device_mesh(DEVICE_TYPE, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    return _on(mesh["dp"], Shard(0))


def _last_half(world_size: int) -> Spread:
    """A DTensor that all ranks have, on a mesh that only the last ranks are in."""
    mesh = DeviceMesh(DEVICE_TYPE, torch.arange(world_size // 2, world_size))
    on_mesh = _on(mesh, Shard(0))
    here = mesh.get_coordinate() is not None

    def spread(i: int, whole: torch.Tensor) -> torch.Tensor:
        if here:
            held = on_mesh(i, whole)
            assert held is not None
            return held
        placements = _fitting(whole, (Shard(0),))
        return DTensor.from_local(whole.new_empty(0), mesh, placements, shape=whole.shape, stride=whole.stride())

    return spread


_ANY = tuple(range(1, 9))
_EVEN = (2, 4, 6, 8)

LAYOUTS = (
    Layout("plain", _ANY, _plain),
    Layout("shard0", _ANY, lambda n: _on(_mesh(n), Shard(0))),
    Layout("shard1", _ANY, lambda n: _on(_mesh(n), Shard(1))),
    Layout("replicate", (2, 3), lambda n: _on(_mesh(n), Replicate())),
    Layout("hsdp", _EVEN, lambda n: _on(_mesh(2, n // 2), Replicate(), Shard(0))),
    Layout("shard0-shard1", _EVEN, lambda n: _on(_mesh(n // 2, 2), Shard(0), Shard(1))),
    Layout("shard0-shard0", _EVEN, lambda n: _on(_mesh(2, n // 2), Shard(0), Shard(0))),
    Layout("shard0-replicate", _EVEN, lambda n: _on(_mesh(n // 2, 2), Shard(0), Replicate())),
    Layout("3d", (8,), lambda _: _on(_mesh(2, 2, 2), Replicate(), Shard(1), Shard(0))),
    Layout("strided", _EVEN, _strided),
    Layout("copies", _EVEN, _copies),
    Layout("last-half", (2, 4), _last_half),
    Layout("stages", _ANY, _stages),
    Layout("sharded-stages", _EVEN, _sharded_stages),
)
