"""What was chosen, as a value: the mask of every parameter, in its layout."""

from __future__ import annotations

import copy
import dataclasses
import glob
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.checkpoint.stored_slices import fill_shards, stored_in, write_together
from distprune.checkpoint.weight_file import read_weight_file
from distprune.collectives.agree import max_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, Group, communicator
from distprune.collectives.roster import Roster
from distprune.formatting import one_line, share
from distprune.masks.in_place import zero_where_pruned
from distprune.models.find_shards import NamePattern, is_sharded
from distprune.pruning.agreement import NamedWeights, sum_zeros
from distprune.pruning.present import present, values_now
from distprune.pruning.torch_api.functions import put_masks
from distprune.shards.device import own_settings
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import dtensor_like
from distprune.shards.local_shard import LocalShard, no_values
from distprune.shards.parts import check_parts


@dataclass(frozen=True)
class Overlap:
    """How much of what two masks prune is the same: intersection over union, ``total`` and ``by_name``; 1: all.

    >>> masks = compute_masks(torch.nn.Linear(8, 4), 0.5)
    >>> masks.overlap(masks)
    <Overlap: 100.0 % of what either prunes, 1 parameters>
    """

    total: float
    by_name: dict[str, float]

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.total)} of what either prunes, {len(self.by_name)} parameters")


@final
class Masks(Mapping[str, torch.Tensor]):
    """The masks of a call, by parameter name: bool, True = keep, this rank's part of each.

    A mask has its parameter's layout: a DTensor if the parameter is one; on FSDP1 and for rows spread by hand the local
    part alone. Later changes of the model do not change it. ``torch.distributed.checkpoint`` saves ``dict(masks)``, but
    for those local parts, and loads into it in place, at another number of ranks too. Every rank of the group that
    chose the masks must call ``&``, ``|``, ``^`` and the methods that say so. Masks keep the weights they are of alive.

    >>> model = torch.nn.Linear(4, 4)
    >>> masks = compute_masks(model, 0.5)
    >>> (masks & ~masks).sparsity(), (masks | ~masks).sparsity(by="name")
    (1.0, {'weight': 0.0})
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
        """Return the masks that ``model`` has: what is not zero, nor masked.

        Arguments, and who must call it: as :func:`distprune.prune_model`. Two rounds; on pipelines up to four more.

        Raises:
            ValueError: on every rank: arguments that differ between ranks, or a name pattern that matches nothing.
            NotImplementedError: on every rank: a ``Partial`` placement.
        """
        agreed = NamedWeights(model, include, exclude).agree(communicator(group))
        return cls._made(agreed.comm, agreed.roster, agreed.shards, present)

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
        held = [dataclasses.replace(shard, local=values_now(fsdp2, shard)) for shard in shards]
        return cls(comm, roster, shards, [present(shard) for shard in held])

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

    def __copy__(self) -> Masks:
        return Masks(self._comm, self._roster, [*self._shards.values()], [*self._local.values()])

    def __deepcopy__(self, memo: dict[int, Any]) -> Masks:
        """Return masks of the same model, or of its copy, if it was copied before together with this."""
        copied = copy.copy(self)
        copied._local = copy.deepcopy(self._local, memo)
        if any(id(shard.tensor) in memo for shard in self._shards.values()):
            copied._shards = copy.deepcopy(self._shards, memo)
        return copied

    @override
    def __reduce__(self) -> Any:
        raise TypeError("masks belong to a model; keep them in a file by masks.save(path), or dict(masks)")

    @override
    def __repr__(self) -> str:
        return f"Masks of {len(self._roster.members)} parameters, {len(self)} of them on this rank"

    def __and__(self, other: Masks) -> Masks:
        """Return what both keep. Every rank must call it: one round.

        Raises:
            ValueError: on every rank: masks of other parameters, or laid out otherwise.
        """
        return self._combined(other, torch.bitwise_and)

    def __or__(self, other: Masks) -> Masks:
        """Return what at least one keeps. Every rank must call it: as ``&``."""
        return self._combined(other, torch.bitwise_or)

    def __xor__(self, other: Masks) -> Masks:
        """Return what one alone keeps. Every rank must call it: as ``&``."""
        return self._combined(other, torch.bitwise_xor)

    def __invert__(self) -> Masks:
        """Return what these prune. Local."""
        return Masks(self._comm, self._roster, [*self._shards.values()], [~mask for mask in self._local.values()])

    def _combined(self, other: Masks, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Masks:
        def held() -> list[LocalShard]:
            if unlike := self._unlike(other):
                raise ValueError(unlike)
            return [*self._shards.values()]

        def combined(shard: LocalShard) -> torch.Tensor:
            return combine(self._local[shard.name], other._local[shard.name])

        return self._made(self._comm, self._roster, held, combined)

    def _unlike(self, other: Masks) -> str:
        """Return why these cannot be combined with ``other``, empty if they can. Local.

        Raises:
            TypeError: ``other`` is something else.
        """
        if not isinstance(other, Masks):
            raise TypeError(f"masks go with masks, not with a {type(other).__name__}")
        if other._whole_shapes != self._whole_shapes:
            return "masks of different parameters cannot be combined; choose them for the same ones"
        for name, shard in self._shards.items():
            if name not in other or other._shards[name].geometry != shard.geometry:
                return f"the masks of {name!r} are laid out differently and cannot be combined"
        return ""

    def overlap(self, other: Masks) -> Overlap:
        """Return how much of what these and ``other`` prune is the same, over all ranks.

        >>> masks = compute_masks(torch.nn.Linear(4, 4), 0.5)
        >>> masks.overlap(masks).total, masks.overlap(~masks).by_name
        (1.0, {'weight': 0.0})

        Every rank must call it: four rounds. Where neither prunes anything it is 1.

        Raises:
            ValueError: on every rank: masks of other parameters, or laid out otherwise.
        """
        in_both, in_either = (self | other)._num_pruned(), (self & other)._num_pruned()
        total = sum(in_both.values()) / sum(in_either.values()) if any(in_either.values()) else 1.0
        return Overlap(total, {name: in_both[name] / num if num else 1.0 for name, num in in_either.items()})

    def equal(self, other: Masks) -> bool:
        """Return whether both keep the same of the same parameters, laid out alike.

        Every rank must call it: one round.
        """

        def fill(differ: torch.Tensor) -> None:
            differ[0] = self._unlike(other) != "" or any(
                not torch.equal(mask, other._local[name]) for name, mask in self._local.items()
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
        return [(member.name, member.global_shape) for member in self._roster.members]  # over all ranks

    @overload
    def sparsity(self) -> float: ...

    @overload
    def sparsity(self, by: Literal["name"]) -> dict[str, float]: ...

    def sparsity(self, by: Literal["name"] | None = None) -> float | dict[str, float]:
        """Return the share of elements that are pruned, over all ranks, of all together or ``by="name"``.

        Every rank must call it, with the same ``by``: one round of 8 bytes a parameter.

        Raises:
            ValueError: on every rank: another ``by``.
        """
        num_pruned = self._num_pruned(by)
        numels = {member.name: math.prod(member.global_shape) for member in self._roster.members}
        if by is None:
            return sum(num_pruned.values()) / max(sum(numels.values()), 1)
        return {name: num_pruned[name] / max(numel, 1) for name, numel in numels.items()}

    def _num_pruned(self, by: str | None = None) -> dict[str, int]:
        """Return how many elements of each parameter are pruned, over all ranks. Every rank must call it."""

        def owned() -> dict[str, torch.Tensor]:
            if by not in (None, "name"):
                raise ValueError(f"by={by!r} is neither 'name' nor None")
            return {name: mask for name, mask in self._local.items() if self._shards[name].owned}

        return sum_zeros(self._comm, self._roster, owned)

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
                weights = values_now(fsdp2, shard)
                work.append((weights, mask.to(weights.device)))
        for weights, mask in work:
            zero_where_pruned(weights, mask)

    def reparametrize(self) -> None:
        """Make every parameter the product of itself and its mask, as ``torch.nn.utils.prune`` does.

        Every rank must call it: one round. A mask that is there stays, and this one comes on top.

        Raises:
            NotImplementedError: on every rank, nothing changed: FSDP1, rows spread by hand, or tied weights.
            ValueError: on every rank: a parameter is laid out otherwise than its mask.
        """
        put_masks(self._comm, [*self._shards.values()], self._local)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the masks to one safetensors file: whole, bool, by name, and the same bytes in every layout.

        >>> masks.save("masks.safetensors")  # doctest: +SKIP
        >>> masks = Masks.load("masks.safetensors", model)  # doctest: +SKIP

        Every rank must call it, and see ``path``: one round of 64 bytes, and those of
        ``write_together``, which renames it when it is whole. ``overwrite``: replace a file that is there.

        Raises:
            FileExistsError: on every rank, nothing changed: there is something at ``path``, and ``overwrite`` is off.
            OSError: on every rank, nothing changed: ``path`` cannot be written.
            ValueError: on every rank, nothing changed: ``path`` is a link, or lies in a model's directory.
        """
        with together(self._comm):
            shapes = {member.name: member.global_shape for member in self._roster.members}
            owned = {name: shard for name, shard in self._shards.items() if shard.owned}
            parts = [dataclasses.replace(shard, local=self._local[name]) for name, shard in owned.items()]
        write_together(self._comm, path, shapes, torch.bool, parts, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, group: Group = None) -> Masks:
        """Return the masks in a file of :meth:`save`, in the layout that ``model`` has now, on any number of ranks.

        Every rank of ``group`` must call it, and see ``path``; each reads its part. Nothing is unpickled. One round of
        64 bytes, and those of :meth:`of`. The weights stay as they are: see :meth:`apply_`, :meth:`reparametrize`.

        Raises:
            FileNotFoundError: on every rank: no such file.
            ValueError: on every rank: it is not such a file, or ``model`` has no such parameters.
            ImportError: on every rank: the extra ``hf`` is not installed.
        """
        comm, loaded = communicator(group), dict[str, torch.Tensor]()
        path = Path(os.path.expanduser(path))
        with together(comm, masks=str(path)):
            if not path.is_file():
                raise FileNotFoundError(f"there is no file of masks {path}")
            file = read_weight_file(path)
            names = [glob.escape(entry.name) for entry in file.tensors]
        agreed = NamedWeights(model, names).agree(comm, lambda: file.tensors)

        def read() -> Sequence[LocalShard]:
            held = agreed.shards()
            for shard in held:
                if shard.local.is_meta:
                    raise no_values(shard.name)
                shape, device = shard.geometry.local_shape, shard.local.device
                loaded[shard.name] = torch.empty(shape, dtype=torch.bool, device=device)
            fill_shards(stored_in(file, [dataclasses.replace(shard, local=loaded[shard.name]) for shard in held]))
            return held

        return cls._made(comm, agreed.roster, read, lambda shard: loaded[shard.name])


def sparsity(
    model: nn.Module,
    *,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> float:
    """Return the share of zeros of ``model``, in any layout.

    >>> sparsity(torch.nn.Linear(8, 8))
    0.0

    Arguments and errors: as of :meth:`Masks.of`. Every rank of ``group`` must call it: three rounds; on pipelines four
    more. Without ``group`` a model that is neither FSDP's nor made of DTensors is counted alone: any rank may ask, and
    one with a pipeline stage hears of its own. Where other stages are sharded, all ranks give ``group``.
    """
    comm = Alone() if group is None and not is_sharded(model) else communicator(group)
    return Masks.of(model, include=include, exclude=exclude, group=comm).sparsity()
