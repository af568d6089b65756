"""What a pruning call looks at before it decides.

Nouns: a *target* is a (module, name) of the call with what is there now. Its *label* names it among
all ranks: its place in the call and its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.masks.hooks import pruning_hooks
from distprune.masks.reparametrized import product_of_hook
from distprune.patterns.base import Pattern
from distprune.scores.base import LocalScores, Score
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import dtensor_like, is_flattened, is_held, local_of, local_part, local_shard
from distprune.shards.local_shard import LocalShard

Pairs = Sequence[tuple[nn.Module, str]]
Scores = Mapping[tuple[nn.Module, str], torch.Tensor]
Hook = torch_prune.BasePruningMethod


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return what elements are ranked by: integers as float64."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


class Target:
    """What is at ``name`` in ``module``; what FSDP2 left unsharded is put back. No communication.

    ``original``: the parameter as it is now. ``shard``: its part here, or that of the importance scores, by which its
    elements are ranked; ``None`` where this rank holds none. ``whole_mask``: the buffer as it is, ``mask`` (bool, local
    shape) what is kept so far, ``scores`` (local shape) the importance scores; ``None`` where there are none.

    Raises:
        AttributeError, TypeError: ``name`` is no attribute, or no parameter.
        AssertionError: scores of another shape; more than one hook on the parameter.
        NotImplementedError, ValueError: layouts this library cannot work in, or a name that a mask needs is taken.
    """

    def __init__(
        self, fsdp2: Fsdp2Params, module: nn.Module, name: str, index: int, scores: torch.Tensor | None = None
    ) -> None:
        self.module, self.name, self.label, kind = module, name, f"{index}.{name}", type(module).__name__
        self.old_hooks = pruning_hooks(module, name)
        if len(self.old_hooks) > 1:
            raise AssertionError(
                f"Avoid adding multiple pruning hooks to the same tensor {name} of module {module}. Use a "
                "PruningContainer."
            )
        for taken in (name + "_orig", name + "_mask"):
            if not self.old_hooks and hasattr(module, taken):
                raise ValueError(
                    f"{kind} has a {taken!r} of its own, which a mask of {name!r} would replace; prune it in place "
                    "with distprune.prune_model"
                )
        held_as = name + "_orig" if self.old_hooks else name
        self.managed = fsdp2.release(module, held_as)
        if self.managed is not None and self.managed.is_shared:
            raise NotImplementedError(
                f"FSDP2 shares parameter {name!r} of {kind} between several modules, and prunes it in all of them or "
                "in none; prune it in place with distprune.prune_model, or untie it before fully_shard"
            )
        if held_as not in module._parameters:
            getattr(module, name)  # AttributeError, if there is no such thing at all
            raise TypeError(
                f"{name!r} of {kind} is no torch.nn.Parameter of it; FSDP1 without use_orig_params, and "
                "torch.nn.utils.parametrize, hide parameters: prune those in place with distprune.prune_model"
            )
        if module._parameters[held_as] is None:
            raise TypeError(f"parameter {name!r} of {kind} is None")
        self.original = cast(nn.Parameter, module._parameters[held_as])
        if is_flattened(self.original):
            raise NotImplementedError(
                f"parameter {name!r} of {kind} is part of a flat parameter of FullyShardedDataParallel (FSDP1), which "
                "has no room for a mask; prune it in place with distprune.prune_model"
            )
        if scores is not None and scores.shape != self.original.shape:
            raise AssertionError(
                f"importance_scores should have the same shape as parameter {name} of {module}, got {scores.shape} vs "
                f"{self.original.shape}"
            )
        self.shard = local_shard(self.label, self.original, module, name) if is_held(self.original) else None
        self.whole_mask = cast(torch.Tensor, getattr(module, name + "_mask")) if self.old_hooks else None
        mask = self._part(self.whole_mask, "mask")
        self.mask = None if mask is None else mask == 1
        self.scores = self._part(scores, "importance_scores")
        if self.shard is not None and self.scores is not None:
            self.shard = dataclasses.replace(self.shard, local=as_floats(self.scores))

    def _part(self, tensor: torch.Tensor | None, what: str) -> torch.Tensor | None:
        return None if tensor is None else local_part(tensor, self.original, self.shard, what)

    @property
    def values(self) -> torch.Tensor:
        """The parameter as it is used: masked, if it has a mask."""
        return product_of_hook(self.module, self.name) if self.old_hooks else self.original

    def scores_of(self, shard: LocalShard, kind: str, score: Score) -> LocalScores:
        """Return the scores of the settled ``shard``, for a method whose PRUNING_TYPE is ``kind``."""
        has_scores = self.scores is not None
        if kind == "global":
            return LocalScores(shard, score, {}, None)
        if kind == "structured" and self.whole_mask is not None and not _is_binary(self.whole_mask):
            # Masks need not be binary on plain modules: channels rank by the product, and are left unless all is 0.
            if not has_scores:
                shard = dataclasses.replace(shard, local=self.values.detach())
            return LocalScores(shard, score, {}, self.whole_mask != 0, counts_gone=True)
        # Importance scores of whole channels count as they are; those of blocks are of what is left.
        return LocalScores(shard, score, {}, self.mask, counts_gone=has_scores and kind == "structured")

    def next_mask(self, keep: torch.Tensor | None, kind: str) -> torch.Tensor:
        """Return the next mask: the one that is there and ``keep`` (local; ``None``: this rank holds no part)."""
        if isinstance(self.original, DTensor):
            if keep is None:
                keep = torch.empty(0, dtype=torch.bool, device="cpu")
            elif self.mask is not None:
                keep = self.mask & keep
            return dtensor_like(self.original, keep)
        assert keep is not None  # of plain parameters each rank holds all
        if self.whole_mask is None:
            return keep.to(self.original.dtype)
        if kind == "unstructured":
            keep = keep | (self.whole_mask != 1)  # what is neither 0 nor 1 was not up for selection
        return self.whole_mask.detach() * keep.to(self.whole_mask.dtype)


def find_targets(pairs: Pairs, scores: Scores | None = None) -> list[Target]:
    """Return the target at each of ``pairs``; ``scores``: of any of them. No communication.

    Raises:
        TypeError: something else than a module.
        ValueError: a pair is there twice.
        Exception: what :class:`Target` raises.
    """
    fsdp2 = Fsdp2Params()
    targets: dict[tuple[int, str], Target] = {}
    for index, (module, name) in enumerate(pairs):
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, not {type(module).__name__}")
        if (id(module), name) in targets:
            raise ValueError(f"parameter {name!r} of {type(module).__name__} is in the call twice")
        targets[id(module), name] = Target(fsdp2, module, name, index, (scores or {}).get((module, name)))
    return list(targets.values())


def plain(value: object) -> object:
    """Return a ``value`` as ranks compare it: a method's class and arguments, what has no plain value by its type."""
    if isinstance(value, Hook):
        return [type(value).__name__, {name: plain(part) for name, part in sorted(vars(value).items())}]
    if isinstance(value, DTensor):
        return ["DTensor", list(value.shape), str(value.dtype), str(value.placements)]
    if isinstance(value, torch.Tensor):
        return ["Tensor", list(value.shape), str(value.dtype), int(fetched([checksum([value])])[0])]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    is_plain = value is None or isinstance(value, bool | int | float | str | Pattern | Score)
    return repr(value) if is_plain else type(value).__name__


def facts(targets: Sequence[Target], method: object, scores: Scores | None = None) -> dict[str, object]:
    """Return what all ranks must say alike of a call."""
    return {
        "method": method,
        "pruned before by": [[type(hook).__name__ for hook in target.old_hooks.values()] for target in targets],
        "importance scores": [plain((scores or {}).get((target.module, target.name))) for target in targets],
    }


def check_binary(label: str, mask: torch.Tensor | None) -> None:
    """Raise a ``ValueError`` that names ``label`` if its ``mask`` holds other values than 0 and 1."""
    if mask is not None and not mask.is_meta and not _is_binary(mask):
        raise ValueError(f"the mask of sharded parameter {label!r} holds values other than 0 and 1")


def _is_binary(mask: torch.Tensor) -> bool:
    local = local_of(mask)
    return local.dtype is torch.bool or bool(fetched([((local == 0) | (local == 1)).all()])[0])
