"""Methods whose elements compete one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives import Communicator, Group, Roster
from distprune.methods.amount import check_amount, check_seed, seeded
from distprune.methods.base import BasePruningMethod, Part, Selecting
from distprune.methods.decide import Candidate, Rule, Scope, decide
from distprune.methods.reparametrize import local_part
from distprune.shards import dtensor_like, is_held, local_shard

__all__ = ["CustomFromMask", "Identity", "L1Unstructured", "RandomUnstructured"]


class Identity(Selecting):
    """Prunes nothing; sets up the mask. See ``torch.nn.utils.prune.Identity``."""

    PRUNING_TYPE = "unstructured"

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        return [torch.ones_like(part.shard.local, dtype=torch.bool) for part in parts]

    @classmethod
    @override
    def apply(cls, module: nn.Module, name: str, *, group: Group = None) -> torch_prune.BasePruningMethod:  # type: ignore[override]
        return super().apply(module, name, group=group)


class RandomUnstructured(Selecting):
    """Prunes ``amount`` elements at random. See ``torch.nn.utils.prune.RandomUnstructured``.

    The mask is a hash of ``seed``, the place of the parameter in the call, its name and the flat index:
    the same on every layout. ``seed=None``: the first rank draws one from torch's default generator.
    """

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: int | float, *, seed: int | None = None) -> None:
        check_amount(amount)
        check_seed(seed)
        self.amount = amount
        self.seed = seed

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        rule = Rule("random", self.amount, scope, self.seed, reads="nothing")
        return _decided(comm, roster, parts, rule)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, amount: int | float, *, group: Group = None, seed: int | None = None
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, amount=amount, group=group, **seeded(seed))


class L1Unstructured(Selecting):
    """Prunes the ``amount`` elements of smallest magnitude. See ``torch.nn.utils.prune.L1Unstructured``."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: int | float) -> None:
        check_amount(amount)
        self.amount = amount

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        return _decided(comm, roster, parts, Rule("magnitude", self.amount, scope, reads="replicas"))

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        amount: int | float,
        importance_scores: torch.Tensor | None = None,
        *,
        group: Group = None,
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, amount=amount, importance_scores=importance_scores, group=group)


class CustomFromMask(BasePruningMethod):
    """Prunes by a given ``mask``. See ``torch.nn.utils.prune.CustomFromMask``.

    For a sharded parameter the mask is of zeros and ones: plain and whole on every rank, or a DTensor in
    the parameter's layout.
    """

    PRUNING_TYPE = "global"

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        if default_mask.shape != self.mask.shape:
            raise AssertionError(
                f"default_mask shape {default_mask.shape} must match self.mask shape {self.mask.shape}"
            )
        shard = local_shard("mask", default_mask) if is_held(default_mask) else None
        if isinstance(default_mask, DTensor):
            return default_mask * dtensor_like(default_mask, local_part(self.mask, default_mask, shard, "mask"))
        return default_mask * local_part(self.mask, default_mask, shard, "mask").to(dtype=default_mask.dtype)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, mask: torch.Tensor, *, group: Group = None
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, mask=mask, group=group)


def _decided(comm: Communicator, roster: Roster, parts: Sequence[Part], rule: Rule) -> list[torch.Tensor]:
    return decide(comm, roster, [Candidate(part.shard, part.mask) for part in parts], rule).masks
