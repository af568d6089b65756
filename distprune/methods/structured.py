"""Methods whose channels compete: slices along one dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from typing_extensions import override

from distprune.collectives import Communicator, Group, Roster
from distprune.methods.agreement import draw_seed
from distprune.methods.amount import check_amount, check_seed, num_to_prune, seeded
from distprune.methods.base import Part, Selecting
from distprune.methods.decide import Scope, check_replicas
from distprune.scores import ChannelPart, Norm, channel_norms, check_norm, random_channels, unpruned_channels

__all__ = ["LnStructured", "RandomStructured"]


class _Structured(Selecting):
    """What both share: which channels are left, and how many of them go."""

    PRUNING_TYPE = "structured"
    amount: int | float
    dim: int

    @override
    def check(self, shape: Sequence[int]) -> None:
        if len(shape) <= 1:
            raise ValueError(
                "Structured pruning can only be applied to multidimensional tensors. "
                f"Found tensor of shape {tuple(shape)} with {len(shape)} dims"
            )
        if not -len(shape) <= self.dim < len(shape):
            raise IndexError(f"Invalid index {self.dim} for tensor of size {tuple(shape)}")

    def _shapes(self, roster: Roster) -> tuple[list[int], list[int]]:
        """Return every parameter's number of channels, and of elements in a channel."""
        shapes = [member.global_shape for member in roster.members]
        num_channels = [shape[self.dim] for shape in shapes]
        sizes = [math.prod(shape) // max(num, 1) for shape, num in zip(shapes, num_channels, strict=True)]
        return num_channels, sizes

    def _channel_parts(self, parts: Sequence[Part]) -> list[ChannelPart]:
        return [
            ChannelPart(
                part.shard, part.mask, self.dim % len(part.shard.geometry.global_shape), part.index, not part.has_scores
            )
            for part in parts
        ]

    def _masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scores: Sequence[npt.NDArray[Any]]
    ) -> list[torch.Tensor]:
        """Keep the best channels of those that are left; equal scores go from the first channel up."""
        channel_parts = self._channel_parts(parts)
        num_channels, _ = self._shapes(roster)
        left = [np.ones(num, dtype=np.bool_) for num in num_channels]
        if comm.max(torch.tensor([int(any(part.mask is not None for part in parts))]))[0]:
            left = unpruned_channels(comm, channel_parts, num_channels)
        keep = []
        for member, of_parameter, candidates in zip(roster.members, scores, left, strict=True):
            at = np.flatnonzero(candidates)
            num_pruned = num_to_prune(self.amount, len(at), f"{member.name!r} (channels)")
            kept = np.ones(len(candidates), dtype=np.bool_)
            kept[at[np.argsort(of_parameter[at], kind="stable")[:num_pruned]]] = False
            keep.append(torch.from_numpy(kept))
        return [_spread(keep[part.index], part) for part in channel_parts]


class RandomStructured(_Structured):
    """Prunes ``amount`` channels along ``dim`` at random. See ``torch.nn.utils.prune.RandomStructured``.

    Randomness as in :class:`RandomUnstructured`, by the channel's index.
    """

    def __init__(self, amount: int | float, dim: int = -1, *, seed: int | None = None) -> None:
        check_amount(amount)
        check_seed(seed)
        self.amount = amount
        self.dim = dim
        self.seed = seed

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        seed = self.seed if self.seed is not None else draw_seed(comm)
        num_channels, _ = self._shapes(roster)
        scores = [
            random_channels(member.name, num, seed).numpy()
            for member, num in zip(roster.members, num_channels, strict=True)
        ]
        return self._masks(comm, roster, parts, scores)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: int | float,
        dim: int = -1,
        *,
        group: Group = None,
        seed: int | None = None,
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, amount=amount, dim=dim, group=group, **seeded(seed))


class LnStructured(_Structured):
    """Prunes the ``amount`` channels along ``dim`` of smallest L_n norm. See ``torch.nn.utils.prune.LnStructured``.

    ``n``: any number, inf, -inf or ``"fro"``. Norms are compared as exact sums on a common grid, so that
    the ranking is the same in every layout (see ``distprune/scores/channel_norm.py``).
    """

    def __init__(self, amount: int | float, n: Norm, dim: int = -1) -> None:
        check_amount(amount)
        check_norm(n)
        self.amount = amount
        self.n = n
        self.dim = dim

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        num_channels, sizes = self._shapes(roster)
        check_replicas(comm, roster, [part.shard for part in parts])
        names = [member.name for member in roster.members]
        scores = channel_norms(comm, self._channel_parts(parts), names, num_channels, sizes, self.n)
        return self._masks(comm, roster, parts, scores)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: int | float,
        n: Norm,
        dim: int,
        importance_scores: torch.Tensor | None = None,
        *,
        group: Group = None,
    ) -> torch_prune.BasePruningMethod:
        return super().apply(
            module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores, group=group
        )


def _spread(keep: torch.Tensor, part: ChannelPart) -> torch.Tensor:
    """Return the local mask that keeps whole channels (bool, local shape)."""
    local, geometry = part.shard.local, part.shard.geometry
    mask = torch.empty(geometry.local_shape, dtype=torch.bool, device=local.device)
    if geometry.local_numel:
        here = torch.cat([keep[start:stop] for start, stop in geometry.dim_runs[part.dim]]).to(local.device)
        shape = [1] * len(geometry.local_shape)
        shape[part.dim] = -1
        mask.copy_(here.view(shape))
    return mask
