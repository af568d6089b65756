"""Which ranks run the same samples.

Noun: a *sample group* is the ranks that need each other to run one sample, since each holds a part of every matrix:
one tensor-parallel group. Sample groups share the samples out among themselves; the ranks of a sample group run the
same ones and share out their statistics, each taking some of the input features. Without tensor parallelism
every rank is a sample group.

It is read off the layout. FSDP2 gathers a parameter over its own mesh before it is used, so the ranks of that
mesh run samples of their own; a DTensor axis that is not FSDP2's is never gathered, so its ranks share them.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distprune.collectives.agree import told_by_all
from distprune.collectives.base import Communicator, out_of_step
from distprune.collectives.tensors import gather_features
from distprune.models.matrices import expert_weights
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import local_of


@dataclass(frozen=True)
class Axis:
    """The mesh axis along which this rank shares its samples: the global ranks in order, and their group."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class SampleGroup:
    """This rank's sample group, the ``number``-th of ``num_groups``; this rank is the ``rank``-th of its ``size``."""

    number: int = 0
    num_groups: int = 1
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: a sample group of one

    def passing(self) -> AbstractContextManager[None]:
        """Return the context of what runs parts of a model: if its layers communicate, an error is raised at once."""
        return out_of_step() if self.size > 1 else nullcontext()

    def features(self, num_in: int) -> tuple[int, int]:
        """Return the features, first and one past the last, that this rank takes of an input of ``num_in``.

        They are those that tensor parallelism gives it of an input that is cut, as ``torch.chunk`` does. Local.
        """
        step = -(-num_in // self.size)
        return min(self.rank * step, num_in), min((self.rank + 1) * step, num_in)

    def check_cut(self, x: torch.Tensor, num_in: int, what: str) -> None:
        """Check that ``x`` (..., ``num_in``) is whole on this rank, or cut evenly along its features. Local.

        Raises:
            NotImplementedError: it is not; ``what`` begins the message.
        """
        start, stop = self.features(num_in)
        layouts = [p for i, p in enumerate(x.placements) if x.device_mesh.size(i) > 1] if isinstance(x, DTensor) else []
        is_known = all(p.is_replicate() or p.is_shard(x.ndim - 1) for p in layouts)
        if not is_known or local_of(x).shape[-1] not in (num_in, stop - start):
            layout = f" laid out as {x.placements}" if isinstance(x, DTensor) else ""
            raise NotImplementedError(
                f"{what} {type(x).__name__} {tuple(x.shape)}{layout} where {num_in} features were expected, or, of "
                f"ranks that share a sample, {stop - start}; inputs cut in another way are not supported"
            )

    def own_features(self, x: torch.Tensor, num_in: int) -> torch.Tensor:
        """Return this rank's features (tokens, features) of ``x`` (..., ``num_in``), which may be cut. Local."""
        local = flat_local(x)
        return local[:, slice(*self.features(num_in))] if local.shape[1] == num_in else local

    def all_features(self, comm: Communicator, x: torch.Tensor, num_in: int) -> torch.Tensor:
        """Return all of ``x`` as (tokens, ``num_in``), where ``x`` (..., ``num_in``) may be cut.

        If it is, or ``num_in`` is 1, every rank of the sample group must call it: one round, of the input's bytes.
        """
        local = flat_local(x)
        # Of one feature the first rank's share is all: it cannot tell that there is none on the others.
        if local.shape[1] == num_in and (num_in > 1 or self.group is None):
            return local
        assert self.group is not None  # a sample group of one holds all features
        return gather_features(comm, self.group, local, num_in)


def flat_local(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``x`` (..., features), as (tokens, features). Local."""
    local = local_of(x.detach())
    return local.reshape(math.prod(local.shape[:-1]), local.shape[-1])


def shared_axis(model: nn.Module) -> Axis | None:
    """Return the mesh axis along which this rank shares its samples, ``None`` if it runs its own. No communication.

    ``model`` must be in its shards.

    Raises:
        NotImplementedError: it names the parameter: experts that are cut beyond FSDP2, several such axes,
            or one whose ranks FSDP2 gives samples of their own (expert parallelism).
    """
    managed_by = Fsdp2Params()
    found: Axis | None = None
    own_samples: set[int] = set()  # ranks that FSDP2 gives samples of their own
    for full_name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is None:
            continue
        path, _, parameter_name = full_name.rpartition(".")
        module = model.get_submodule(path)
        managed = managed_by.find(module, parameter_name)
        data_ranks = frozenset[int]() if managed is None else managed.ranks
        own_samples |= data_ranks
        axes = _axes_beyond(data_ranks, parameter.device_mesh)
        if axes and parameter_name in expert_weights(module):
            raise NotImplementedError(
                f"the experts {full_name!r} are laid out as {parameter.placements}, which is more than FSDP2: "
                "leave experts out of the tensor-parallel plan"
            )
        if len(axes) > 1 or (axes and found is not None and axes[0].ranks != found.ranks):
            raise NotImplementedError(
                f"{full_name!r} is laid out as {parameter.placements} on {parameter.device_mesh}: ranks may share "
                "samples along one mesh axis beyond FSDP2's, the same for all parameters"
            )
        if axes and list(axes[0].ranks) != sorted(axes[0].ranks):
            raise NotImplementedError(f"{full_name!r} lies on ranks out of order: {list(axes[0].ranks)}")
        found = axes[0] if axes else found
        if found is not None and len(own_samples & set(found.ranks)) > 1:
            raise NotImplementedError(
                f"{full_name!r}: ranks {list(found.ranks)} hold parts that are never gathered, and FSDP2 gives "
                "them samples of their own; expert parallelism is not supported"
            )
    return found


def find_sample_group(comm: Communicator, model: nn.Module) -> SampleGroup:
    """Return the sample group of ``model``, in its shards, that this rank is in.

    Every rank of ``comm`` must call it: the rounds of ``told_by_all``, of 64 bytes where no ranks share samples.

    Raises:
        NotImplementedError: on every rank: what :func:`shared_axis` refuses.
        ValueError: on every rank: ranks disagree on who shares samples, or ``comm`` does not span a sample group.
    """
    group: dist.ProcessGroup | None = None

    def sharing() -> tuple[int, ...] | None:
        nonlocal group
        axis = shared_axis(model)
        group = None if axis is None else axis.group
        return None if axis is None else axis.ranks

    ids = [comm.global_rank(rank) for rank in range(comm.size)]
    # What is told is the same on every rank from here on, so every rank raises the same error.
    group_of = {rank: [rank] for rank in ids}
    for ranks, told in told_by_all(comm, sharing):
        if told is not None:
            group_of |= {ids[rank]: told for rank in ranks}
    for rank, sample_group in group_of.items():
        for other in sample_group:
            if group_of.get(other) != sample_group:
                shares = f"shares with {group_of[other]}" if other in group_of else "is not in the group"
                raise ValueError(
                    f"ranks disagree on who runs the same samples: rank {rank} shares with {sample_group}, rank "
                    f"{other} {shares}; lay out the model alike on every rank, and pass a group that spans all of them"
                )
    groups = sorted({tuple(sample_group) for sample_group in group_of.values()})
    own = tuple(group_of[ids[comm.rank]])
    return SampleGroup(groups.index(own), len(groups), own.index(ids[comm.rank]), len(own), group)


def _axes_beyond(data_ranks: frozenset[int], mesh: DeviceMesh) -> list[Axis]:
    """Return the axes of ``mesh`` through this rank on which there are other ranks than ``data_ranks`` and itself."""
    coordinate = list(mesh.get_coordinate() or ())
    found = []
    for axis in range(mesh.ndim):
        line = mesh.mesh[tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))].tolist()
        if len(line) > 1 and not set(line) <= data_ranks:
            found.append(Axis(tuple(line), mesh.get_group(axis)))
    return found
