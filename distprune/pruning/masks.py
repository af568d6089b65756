"""What was chosen, as a value: the mask of every parameter, in its layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives import Alone, Communicator, Group, Roster, communicator, max_together, sum_together, together
from distprune.masks import mask_of, zero_where_pruned
from distprune.models import NamePattern, is_sharded
from distprune.patterns import check_parts
from distprune.pruning.agreement import agree_on_model
from distprune.pruning.torch_api.functions import put_masks
from distprune.shards import (
    Fsdp2Params,
    LocalShard,
    count_zeros,
    dtensor_like,
    flat_chunks,
    is_laid_out_like,
    local_of,
    local_shard,
    own_settings,
)


@final
class Masks(Mapping[str, torch.Tensor]):
    """The masks of a call, by parameter name: bool, True = keep, this rank's part of each.

    A mask has its parameter's layout. It is a DTensor if the parameter is one; on FSDP1 and for rows spread by hand it
    is the local part alone. Later changes of the model do not change it. Every rank of the group that chose the masks
    must call ``&``, ``==`` and the methods that say so.
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
        include: NamePattern | Sequence[NamePattern] = (),
        exclude: NamePattern | Sequence[NamePattern] = (),
        group: Group = None,
    ) -> Masks:
        """Return the masks that ``model`` has: of a reparametrized parameter its mask, of others what is not zero.

        Arguments, and who must call it: as :func:`distprune.prune_model`. Two rounds; on pipelines up to four more.

        Raises:
            ValueError: on every rank: arguments that differ between ranks, or a name pattern that matches nothing.
            NotImplementedError: on every rank: a ``Partial`` placement.
        """
        agreed = agree_on_model(communicator(group), model, include, exclude)
        return cls._made(agreed.comm, agreed.roster, agreed.shards, _present)

    @classmethod
    def _made(
        cls,
        comm: Communicator,
        roster: Roster,
        shards: Callable[[], Sequence[LocalShard]],
        make: Callable[[LocalShard], torch.Tensor],
    ) -> Masks:
        """Return the masks that ``make`` makes of ``shards``, the same on replicas: one round (see ``check_parts``)."""
        held: list[LocalShard] = []
        made: list[LocalShard] = []

        def masked() -> Sequence[LocalShard]:
            held[:] = shards()
            made[:] = [dataclasses.replace(shard, local=make(shard)) for shard in held]
            return made

        check_parts(comm, roster, masked)
        return cls(comm, roster, held, [shard.local for shard in made])

    @classmethod
    def read(cls, comm: Communicator, roster: Roster, shards: Sequence[LocalShard]) -> Masks:
        """Return the masks that the weights of ``shards`` have now, on which all ranks agreed before. Local."""
        fsdp2 = Fsdp2Params()
        held = [dataclasses.replace(shard, local=_values_now(fsdp2, shard)) for shard in shards]
        return cls(comm, roster, shards, [_present(shard) for shard in held])

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
            ValueError: on every rank: masks of other parameters, or laid out otherwise.
        """

        def both(shard: LocalShard) -> torch.Tensor:
            if not self._is_like(other, shard.name):
                raise ValueError(f"the masks of {shard.name!r} are laid out differently and cannot be combined")
            return self._local[shard.name] & other._local[shard.name]

        def held() -> list[LocalShard]:
            if other._whole_shapes != self._whole_shapes:
                raise ValueError("masks of different parameters cannot be combined; choose them for the same ones")
            return self._held()

        return self._made(self._comm, self._roster, held, both)

    def equal(self, other: Masks) -> bool:
        """Return whether both keep the same of the same parameters, laid out alike.

        Every rank must call it: one round.
        """

        def fill(differ: torch.Tensor) -> None:
            differ[0] = other._whole_shapes != self._whole_shapes or not all(
                self._is_like(other, name) and torch.equal(local, other._local[name])
                for name, local in self._local.items()
            )

        return not bool(max_together(self._comm, (1,), fill)[0])

    @override
    def __eq__(self, other: object) -> bool:
        """Raise a TypeError for other masks: ranks would have to talk, and ``==`` is often asked on one alone."""
        if isinstance(other, Masks):
            raise TypeError("masks are spread over ranks; on every rank call masks.equal(other) in the place of ==")
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def _whole_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """By name, over all ranks."""
        return [(member.name, member.global_shape) for member in self._roster.members]

    def _held(self) -> list[LocalShard]:
        return [*self._shards.values()]

    def _is_like(self, other: Masks, name: str) -> bool:
        return name in other and self._shards[name].geometry == other._shards[name].geometry

    def sparsity(self) -> float:
        """Return the share of elements that are pruned, over all ranks. Every rank must call it: one round."""

        def fill(num_pruned: torch.Tensor) -> None:
            num_pruned[0] = sum(count_zeros([mask for name, mask in self._local.items() if self._shards[name].owned]))

        num_elements = sum(math.prod(member.global_shape) for member in self._roster.members)
        return int(sum_together(self._comm, (1,), fill)[0]) / max(num_elements, 1)

    @own_settings()
    def apply_(self) -> None:
        """Write zeros into the weights where the masks say so. Every rank must call it: one round.

        Raises:
            ValueError: on every rank, nothing changed: a parameter is gone, or laid out otherwise than its mask.
        """
        work: list[tuple[torch.Tensor, torch.Tensor]] = []
        with together(self._comm):
            fsdp2 = Fsdp2Params()
            for shard, mask in zip(self._shards.values(), self._local.values(), strict=True):
                weights = _values_now(fsdp2, shard)
                work.append((weights, mask.to(weights.device)))
        for weights, mask in work:
            zero_where_pruned(weights, mask)

    def reparametrize(self) -> None:
        """Make every parameter the product of itself and its mask, as ``torch.nn.utils.prune`` does.

        Every rank must call it: one round. A mask that is there stays, and this one comes on top.

        Raises:
            NotImplementedError: on every rank: FSDP1, rows spread by hand, or what FSDP2 shares between modules.
            ValueError: on every rank: a parameter is laid out otherwise than its mask.
        """
        put_masks(self._comm, [*self._shards.values()], self._local)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return name: mask, as ``torch.distributed.checkpoint`` saves and loads it, at another world size too. Local.

        To load: ``state = masks.state_dict()``, ``load(state, ...)``, ``masks.load_state_dict(state)``.

        Raises:
            NotImplementedError: FSDP1 and rows spread by hand: their place is nothing a checkpoint knows.
        """
        for name, shard in self._shards.items():
            if shard.tensor is None:
                raise NotImplementedError(
                    f"the mask of {name!r} has a place that no checkpoint knows (FSDP1, rows spread by hand); save the "
                    "pruned weights, and read the masks from their zeros"
                )
        return dict(self.items())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the masks by those of a :meth:`state_dict` in the same layout. Every rank must call it: one round.

        Raises:
            ValueError: on every rank, nothing changed: other names, shapes or types.
        """

        def taken(shard: LocalShard) -> torch.Tensor:
            if state_dict.keys() != self.keys():
                raise ValueError(f"masks of other parameters: {sorted(state_dict.keys() ^ self.keys())[:4]}")
            mask, own = state_dict[shard.name], self[shard.name]
            is_like = is_laid_out_like(mask, own) if isinstance(own, DTensor) else not isinstance(mask, DTensor)
            is_mask = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.shape == own.shape
            if not is_like or not is_mask:
                raise ValueError(f"the mask of {shard.name!r} must be {_described(own)}, not {_described(mask)}")
            return local_of(mask).to(own.device).reshape(shard.geometry.local_shape).clone()

        self._local = self._made(self._comm, self._roster, self._held, taken)._local


def sparsity(
    model: nn.Module,
    *,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> float:
    """Return the share of zeros of ``model``, in any layout.

    Arguments as in :func:`distprune.prune_model`: by default the weights that it prunes are counted. Pruned elements of
    reparametrized parameters count as zeros. Every rank of ``group`` must call it: three rounds; on pipelines up to
    four more. Without ``group`` a model that is neither FSDP's nor made of DTensors is counted alone: any rank may
    ask, and one with a pipeline stage hears of its own. Errors are those of :meth:`Masks.of`.
    """
    comm = Alone() if group is None and not is_sharded(model) else communicator(group)
    return Masks.of(model, include=include, exclude=exclude, group=comm).sparsity()


def _present(shard: LocalShard) -> torch.Tensor:
    """Return what is left of a shard, bool: its mask if it is reparametrized, else where it is not zero."""
    mask = mask_of(shard)
    if mask is not None:
        return mask
    present = torch.empty(shard.geometry.local_shape, dtype=torch.bool, device=shard.local.device)
    for start, values in flat_chunks(shard.local):
        torch.ne(values, 0, out=present.view(-1)[start : start + values.numel()])
    return present


def _values_now(fsdp2: Fsdp2Params, shard: LocalShard) -> torch.Tensor:
    """Return the local part of the shard's parameter, which another may have replaced. What FSDP2 left whole is cut."""
    if shard.module is None or shard.tensor is None:  # rows spread by hand, FSDP1
        return shard.local
    for name in (shard.attribute, f"{shard.attribute}_orig"):
        fsdp2.release(shard.module, name)
        tensor = shard.module._parameters.get(name)
        if tensor is not None and (now := local_shard(shard.name, tensor)).geometry == shard.geometry:
            return now.local
    raise ValueError(f"{shard.name!r} is gone, or laid out otherwise than its mask; choose the masks anew")


def _described(mask: object) -> str:
    if isinstance(mask, DTensor):
        return f"a DTensor {mask.dtype} {list(mask.shape)} {mask.placements} on {mask.device_mesh}"
    return f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
