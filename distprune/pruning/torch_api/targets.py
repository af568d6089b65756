"""What a pruning call looks at before it decides.

Nouns: a *target* is a (module, name) of the call with what is there now. Its *label* names it among
all ranks: its place in the call and its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.collectives.base import Communicator
from distprune.masks.hooks import pruning_hooks
from distprune.masks.in_place import as_numbers
from distprune.masks.reparametrized import product_of_hook
from distprune.patterns.base import Pattern
from distprune.scores.base import LocalScores, Score
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.flat_param import is_flattened
from distprune.shards.fsdp2 import Fsdp2Params, Managed
from distprune.shards.layouts import dtensor_like, is_held, local_of, local_part, local_shard
from distprune.shards.local_shard import LocalShard

Pairs = Sequence[tuple[nn.Module, str]]
Scores = Mapping[tuple[nn.Module, str], torch.Tensor]
Hook = torch_prune.BasePruningMethod


@dataclass
class Target:
    """``original`` is the parameter as it is now, ``mask`` (bool, local shape) what is kept of it so far."""

    module: nn.Module
    name: str
    label: str
    original: nn.Parameter
    shard: LocalShard | None  # of the original; None where this rank holds no part of it
    whole_mask: torch.Tensor | None  # the buffer, as it is
    mask: torch.Tensor | None
    scores: torch.Tensor | None  # local shape
    managed: Managed | None
    old_hooks: dict[int, Hook]

    @property
    def values(self) -> torch.Tensor:
        """The parameter as it is used: masked, if it has a mask."""
        return product_of_hook(self.module, self.name) if self.old_hooks else self.original

    @property
    def ranked(self) -> LocalShard | None:
        """What elements are ranked by: the scores, or the original's values."""
        if self.shard is None or self.scores is None:
            return self.shard
        scores = self.scores if self.scores.is_floating_point() else self.scores.to(torch.float64)
        return dataclasses.replace(self.shard, local=scores)


def find_target(
    fsdp2: Fsdp2Params, module: nn.Module, name: str, index: int, importance_scores: torch.Tensor | None
) -> Target:
    """Return what is at ``name`` in ``module``; what FSDP2 left unsharded is put back. No communication.

    Raises:
        AttributeError, TypeError: ``name`` is no attribute, or no parameter.
        AssertionError: scores of another shape; more than one hook on the parameter.
        NotImplementedError, ValueError: layouts this library cannot work in.
    """
    hooks = pruning_hooks(module, name)
    if len(hooks) > 1:
        raise AssertionError(
            f"Avoid adding multiple pruning hooks to the same tensor {name} of module {module}. Use a PruningContainer."
        )
    managed = fsdp2.release(module, name + "_orig" if hooks else name)
    if managed is not None and managed.is_shared:
        raise NotImplementedError(
            f"FSDP2 shares parameter {name!r} of {type(module).__name__} between several modules, and prunes it in "
            "all of them or in none; prune it in place with distprune.prune_model, or untie it before fully_shard"
        )
    if not hooks and name not in module._parameters:
        getattr(module, name)  # AttributeError, if there is no such thing at all
        raise TypeError(
            f"{name!r} of {type(module).__name__} is no torch.nn.Parameter of it; FSDP1 without use_orig_params, and "
            "torch.nn.utils.parametrize, hide parameters: prune those in place with distprune.prune_model"
        )
    original = module._parameters[name + "_orig" if hooks else name]
    if original is None:
        raise TypeError(f"parameter {name!r} of {type(module).__name__} is None")
    if is_flattened(original):
        raise NotImplementedError(
            f"parameter {name!r} of {type(module).__name__} is part of a flat parameter of FullyShardedDataParallel "
            "(FSDP1), which has no room for a mask; prune it in place with distprune.prune_model"
        )
    whole_mask = cast(torch.Tensor, getattr(module, name + "_mask")) if hooks else None
    label, shard = f"{index}.{name}", None
    if is_held(original):
        shard = local_shard(label, original, module, name)
    if importance_scores is not None and importance_scores.shape != original.shape:
        raise AssertionError(
            f"importance_scores should have the same shape as parameter {name} of {module}, got "
            f"{importance_scores.shape} vs {original.shape}"
        )
    return Target(
        module,
        name,
        label,
        original,
        shard,
        whole_mask,
        None if whole_mask is None else local_part(whole_mask, original, shard, "mask") == 1,
        None if importance_scores is None else local_part(importance_scores, original, shard, "importance_scores"),
        managed,
        hooks,
    )


def find_targets(pairs: Pairs, scores: Scores | None = None) -> list[Target]:
    """Return what is at each of ``pairs``, as :func:`find_target` does; ``scores``: of any of them. No communication.

    Raises:
        TypeError: something else than a module.
        ValueError: a pair is there twice.
    """
    fsdp2 = Fsdp2Params()
    targets: dict[tuple[int, str], Target] = {}
    for index, (module, name) in enumerate(pairs):
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, not {type(module).__name__}")
        if (id(module), name) in targets:
            raise ValueError(f"parameter {name!r} of {type(module).__name__} is in the call twice")
        targets[id(module), name] = find_target(fsdp2, module, name, index, (scores or {}).get((module, name)))
    return list(targets.values())


def described(method: object) -> list[Any]:
    """Return a method's class and arguments as ranks compare them; objects without a plain value by their type."""
    return [type(method).__name__, {name: _plain(value) for name, value in sorted(vars(method).items())}]


def _plain(value: object) -> object:
    if isinstance(value, DTensor):
        return ["DTensor", list(value.shape), str(value.dtype), str(value.placements)]
    if isinstance(value, torch.Tensor):
        return ["Tensor", list(value.shape), str(value.dtype), int(fetched([checksum([value])])[0])]
    if value is None or isinstance(value, bool | int | float | str | Pattern | Score):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return type(value).__name__


def facts(
    comm: Communicator, targets: Sequence[Target], method: object, scores: Scores | None = None
) -> dict[str, object]:
    """Return what all ranks must say alike of a call; a lone process need not say it."""
    if comm.size == 1 or not targets:
        return {}
    return {
        "method": method,
        "pruned before by": [[type(hook).__name__ for hook in target.old_hooks.values()] for target in targets],
        "importance scores": [_plain((scores or {}).get((target.module, target.name))) for target in targets],
    }


def check_binary(label: str, mask: torch.Tensor | None) -> None:
    """Raise a ``ValueError`` that names ``label`` if its ``mask`` holds other values than 0 and 1."""
    if mask is not None and not mask.is_meta and not _is_binary(mask):
        raise ValueError(f"the mask of sharded parameter {label!r} holds values other than 0 and 1")


def _is_binary(mask: torch.Tensor) -> bool:
    local = local_of(mask)
    return local.dtype is torch.bool or bool(((local == 0) | (local == 1)).all())


def scores_of(target: Target, shard: LocalShard, kind: str, score: Score) -> LocalScores:
    """Return the scores of a target's settled ``shard``, for a method whose PRUNING_TYPE is ``kind``."""
    mask, has_scores = target.mask, target.scores is not None
    if kind == "global":
        return LocalScores(shard, score, {}, None)
    if kind == "structured" and target.whole_mask is not None and not _is_binary(target.whole_mask):
        # Masks need not be binary on plain modules: channels rank by the product, and are left unless all is 0.
        if not has_scores:
            shard = dataclasses.replace(shard, local=target.values.detach())
        return LocalScores(shard, score, {}, target.whole_mask != 0, counts_gone=True)
    # Importance scores of whole channels count as they are; those of blocks are of what is left.
    return LocalScores(shard, score, {}, mask, counts_gone=has_scores and kind == "structured")


def next_mask(target: Target, keep: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Return the target's next mask: the one it has and ``keep`` (local; ``None``: this rank holds no part)."""
    if isinstance(target.original, DTensor):
        if keep is None:
            return dtensor_like(target.original, torch.empty(0, dtype=torch.bool, device="cpu"))
        return dtensor_like(target.original, keep if target.mask is None else target.mask & keep)
    assert keep is not None  # of plain parameters each rank holds all
    if target.whole_mask is None:
        return as_numbers(keep, target.original.dtype)
    if kind == "unstructured":
        keep = keep | (target.whole_mask != 1)  # what is neither 0 nor 1 was not up for selection
    return target.whole_mask.detach() * as_numbers(keep, target.whole_mask.dtype)
