"""What was chosen, as a value: the mask of every parameter, in its layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives import Communicator, Group, Roster, communicator, max_together, sum_together, together
from distprune.masks import mask_of, zero_where_pruned
from distprune.models import Found, NamePattern, find_shards
from distprune.pruning.agreement import agree_on
from distprune.pruning.torch_api import custom_from_masks
from distprune.scores import Magnitude
from distprune.shards import LocalShard, dtensor_like, flat_chunks

__all__ = ["Masks", "sparsity"]


@final
class Masks(Mapping[str, torch.Tensor]):
    """The masks of a call by name, bool, True = keep: what this rank holds of each.

    A mask has its parameter's layout: a DTensor where that is one; on FSDP1 and for rows spread by hand the local
    part alone. A mask is a value: nothing that happens to the model later changes it. Methods that say so must be
    called by every rank of the group that chose the masks.
    """

    def __init__(self, comm: Communicator, roster: Roster, shards: Sequence[LocalShard], local: Sequence[torch.Tensor]):
        self._comm = comm
        self._roster = roster
        self._shards = {shard.name: shard for shard in shards}
        self._local = dict(zip(self._shards, local, strict=True))

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        include: str | Sequence[NamePattern] = (),
        exclude: str | Sequence[NamePattern] = (),
        group: Group = None,
    ) -> Masks:
        """Return the masks that ``model`` has: those of its reparametrized parameters, and elsewhere its zeros.

        Which parameters, and who must call it: as :func:`distprune.prune_model`. Two rounds; on pipelines up to
        four more.
        """
        comm, error = communicator(group), None
        found = Found([], [], by_default=False, has_blocks=False)
        try:
            found = find_shards(model, include, exclude)
        except Exception as caught:
            error = caught
        agreed = agree_on(comm, found, {}, Magnitude(), error)
        agreed.check_found()
        return cls._made(comm, agreed.roster, agreed.shards(), _present)

    @classmethod
    def _made(
        cls,
        comm: Communicator,
        roster: Roster,
        shards: Sequence[LocalShard],
        make: Callable[[LocalShard], torch.Tensor],
    ) -> Masks:
        with together(comm):
            return cls(comm, roster, shards, [make(shard) for shard in shards])

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, local = self._shards[name].tensor, self._local[name]
        return dtensor_like(tensor, local) if isinstance(tensor, DTensor) else local

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._local)

    @override
    def __len__(self) -> int:
        return len(self._local)

    @override
    def __repr__(self) -> str:
        return f"Masks of {len(self._roster.members)} parameters, {len(self)} of them on this rank"

    def __and__(self, other: Masks) -> Masks:
        """Return what both keep. Every rank must call it: one round.

        Raises:
            ValueError: on every rank: masks of other parameters.
        """
        self._check_alike(other)
        return self._made(
            self._comm, self._roster, list(self._shards.values()), lambda s: self._local[s.name] & other._local[s.name]
        )

    @override
    def __eq__(self, other: object) -> bool:
        """Return whether both keep the same of the same parameters. Every rank must call it: one round."""
        if not isinstance(other, Masks) or other._roster.members != self._roster.members:
            return False

        def fill(differ: torch.Tensor) -> None:
            differ[0] = not all(torch.equal(local, other._local[name]) for name, local in self._local.items())

        return not bool(max_together(self._comm, (1,), fill)[0])

    __hash__ = None  # type: ignore[assignment]

    def _check_alike(self, other: Masks) -> None:
        if other._roster.members != self._roster.members:
            raise ValueError("masks of different parameters cannot be combined; choose them for the same ones")

    def sparsity(self) -> float:
        """Return the share of what is pruned, over all ranks. Every rank must call it: one round of 16 bytes."""

        def fill(num_pruned: torch.Tensor) -> None:
            for name, local in self._local.items():
                if self._shards[name].owned:
                    num_pruned[0] += local.numel() - sum(int(torch.count_nonzero(c)) for _, c in flat_chunks(local))

        num_elements = sum(math.prod(member.global_shape) for member in self._roster.members)
        return int(sum_together(self._comm, (1,), fill)[0]) / max(num_elements, 1)

    def apply_(self) -> None:
        """Write zeros into the weights where the masks say so. Every rank must call it: one round.

        Raises:
            ValueError: on every rank: a parameter is not where it was, or laid out otherwise, since they were chosen.
        """
        with together(self._comm):
            for name, shard in self._shards.items():
                if shard.local.shape != self._local[name].shape:
                    raise ValueError(f"{name!r} has another local shape than its mask; choose the masks anew")
        for name, shard in self._shards.items():
            zero_where_pruned(shard.local, self._local[name])

    def reparametrize(self) -> None:
        """Make every parameter the product of itself and its mask, as ``torch.nn.utils.prune`` does.

        Every rank must call it; rounds and errors are those of :func:`distprune.custom_from_mask` once for all.
        """
        targets = [(shard.module or nn.Module(), shard.attribute) for shard in self._shards.values()]
        custom_from_masks(self._comm, targets, [self[name] for name in self])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return name: mask, as ``torch.distributed.checkpoint`` saves and loads it, at another world size too. Local.

        Raises:
            NotImplementedError: FSDP1 and rows spread by hand: their place is nothing a checkpoint knows.
        """
        for name, shard in self._shards.items():
            if shard.tensor is None:
                raise NotImplementedError(
                    f"the mask of {name!r} is a part of a flat parameter; save the pruned weights"
                )
        return dict(self.items())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over masks from a :meth:`state_dict`, in the layout that these have. Every rank must call it: one round.

        Raises:
            ValueError: on every rank: other names, shapes or layouts; nothing is taken over.
        """
        with together(self._comm):
            if set(state_dict) != set(self):
                raise ValueError(f"masks of other parameters: {sorted(set(state_dict) ^ set(self))[:4]}")
            loaded = {}
            for name, own in self.items():
                mask = state_dict[name]
                if type(mask) is not type(own) or mask.shape != own.shape or mask.dtype is not torch.bool:
                    raise ValueError(f"the mask of {name!r} is {type(mask).__name__} {tuple(mask.shape)} {mask.dtype}")
                loaded[name] = (mask.to_local() if isinstance(mask, DTensor) else mask).clone()
        self._local = {name: local.reshape(self._local[name].shape) for name, local in loaded.items()}


def sparsity(
    model: nn.Module,
    *,
    include: str | Sequence[NamePattern] = (),
    exclude: str | Sequence[NamePattern] = (),
    group: Group = None,
) -> float:
    """Return the share of zeros, in any layout: of what :func:`distprune.prune_model` prunes, or of what is named.

    Pruned elements of reparametrized parameters count as zeros. Every rank of ``group`` must call it: three rounds.
    """
    return Masks.of(model, include=include, exclude=exclude, group=group).sparsity()


def _present(shard: LocalShard) -> torch.Tensor:
    """Return what is left of a shard, bool: by its mask, where it is reparametrized, else by its zeros."""
    mask = mask_of(shard)
    if mask is not None:
        return mask.clone()
    present = torch.empty(shard.geometry.local_shape, dtype=torch.bool, device=shard.local.device)
    for start, values in flat_chunks(shard.local):
        torch.ne(values, 0, out=present.view(-1)[start : start + values.numel()])
    return present
