"""The functions of ``torch.nn.utils.prune``, on modules in any layout.

Every rank of ``group`` (default: the default process group, or this process alone) must call them,
with its own part of the same module and equal arguments. They change the module in place, on all ranks
or, if they raise, on none, and return it where PyTorch's do. What they raise is written at
:meth:`distprune.BasePruningMethod.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.masks.hooks import pruning_hooks
from distprune.masks.reparametrized import undo_reparametrization
from distprune.models.find_shards import Found
from distprune.patterns.base import Pattern
from distprune.pruning.agreement import agreeing
from distprune.pruning.torch_api import methods
from distprune.pruning.torch_api.base import BasePruningMethod, CustomFromMask, place, prune_pairs
from distprune.pruning.torch_api.methods import Amount, Scores
from distprune.pruning.torch_api.targets import Pairs, Target, check_binary, facts, find_targets
from distprune.scores.channel_norm import Norm
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import is_laid_out_like, local_of
from distprune.shards.local_shard import LocalShard

Parameter: TypeAlias = tuple[nn.Module, str]  # a module, and the parameter's name in it
ScoresOfEach: TypeAlias = dict[Parameter, torch.Tensor] | None


def identity(module: nn.Module, name: str, *, group: Group = None) -> nn.Module:
    """Reparametrize ``name`` with a mask of ones. ``torch.nn.utils.prune.identity``; 2 rounds.

    >>> layer = identity(torch.nn.Linear(2, 2), "weight")
    >>> layer.weight_mask
    tensor([[1., 1.],
            [1., 1.]])
    """
    methods.Identity.apply(module, name, group=group)
    return module


def random_unstructured(
    module: nn.Module, name: str, amount: Amount, *, seed: int | None = None, group: Group = None
) -> nn.Module:
    """Prune ``amount`` elements of ``name`` at random. ``torch.nn.utils.prune.random_unstructured``; 8 to 11 rounds.

    >>> layer = random_unstructured(torch.nn.Linear(4, 4), "weight", 0.5, seed=1)
    >>> int(layer.weight_mask.sum())
    8

    The same elements in every layout. **Two calls with one ``seed`` on parameters of one name and shape prune the same
    places**: give each call its own seed, or prune all in one call of :func:`prune_each`. ``seed=None``: the first rank
    draws one from torch's default generator.
    """
    methods.RandomUnstructured.apply(module, name, amount, group=group, seed=seed)
    return module


def l1_unstructured(
    module: nn.Module, name: str, amount: Amount, importance_scores: Scores = None, *, group: Group = None
) -> nn.Module:
    """Prune the ``amount`` elements of ``name`` with the smallest magnitude, or the smallest score's.

    >>> layer = l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
    >>> int(layer.weight_mask.sum())
    8

    ``torch.nn.utils.prune.l1_unstructured``; ties go from the lowest flat index up. 7 rounds in
    float32, up to 10 where a tie is broken.
    """
    methods.L1Unstructured.apply(module, name, amount=amount, importance_scores=importance_scores, group=group)
    return module


def l1_pattern(
    module: nn.Module, name: str, pattern: Pattern | str, importance_scores: Scores = None, *, group: Group = None
) -> nn.Module:
    """Prune the smallest magnitudes, or scores, of ``name`` in ``pattern``: see :class:`distprune.L1Pattern`.

    >>> layer = l1_pattern(torch.nn.Linear(4, 2), "weight", "2:4")
    >>> layer.weight_mask.sum(dim=1)
    tensor([2., 2.])

    Groups and rows that every rank holds whole: 3 rounds, 40 bytes a parameter; 3 more where shard edges cut
    some, in which a rank hands over what it holds of those. Blocks: at most 18.
    """
    methods.L1Pattern.apply(module, name, pattern, importance_scores=importance_scores, group=group)
    return module


def random_pattern(
    module: nn.Module, name: str, pattern: Pattern | str, *, seed: int | None = None, group: Group = None
) -> nn.Module:
    """Prune ``name`` at random in ``pattern``: see :class:`distprune.RandomPattern`. Rounds: as :func:`l1_pattern`.

    >>> layer = random_pattern(torch.nn.Linear(4, 2), "weight", "2:4", seed=1)
    >>> layer.weight_mask.sum(dim=1)
    tensor([2., 2.])
    """
    methods.RandomPattern.apply(module, name, pattern, group=group, seed=seed)
    return module


def random_structured(
    module: nn.Module, name: str, amount: Amount, dim: int, *, seed: int | None = None, group: Group = None
) -> nn.Module:
    """Prune ``amount`` channels of ``name`` along ``dim`` at random. ``torch.nn.utils.prune.random_structured``.

    >>> layer = random_structured(torch.nn.Linear(4, 4), "weight", 1, dim=0, seed=1)
    >>> int((layer.weight_mask == 0).all(dim=1).sum())
    1

    Randomness as in :func:`random_unstructured`. At most 4 rounds; where something was pruned before, 24 bytes a
    channel are sent.
    """
    methods.RandomStructured.apply(module, name, amount, dim, group=group, seed=seed)
    return module


def ln_structured(
    module: nn.Module,
    name: str,
    amount: Amount,
    n: Norm,
    dim: int,
    importance_scores: Scores = None,
    *,
    group: Group = None,
) -> nn.Module:
    """Prune the ``amount`` channels of ``name`` along ``dim`` with the smallest L_n norm.

    >>> layer = ln_structured(torch.nn.Linear(4, 4), "weight", 1, n=2, dim=0)
    >>> int((layer.weight_mask == 0).all(dim=1).sum())
    1

    ``torch.nn.utils.prune.ln_structured``; ties go from the first channel up. Six rounds at most; 32
    bytes a channel travel.
    """
    methods.LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores, group=group)
    return module


def global_unstructured(
    parameters: Iterable[Parameter],
    pruning_method: type[torch_prune.BasePruningMethod],
    importance_scores: ScoresOfEach = None,
    *,
    seed: int | None = None,
    group: Group = None,
    **kwargs: Any,
) -> None:
    """Prune all ``parameters`` together, their elements competing. ``torch.nn.utils.prune.global_unstructured``.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> global_unstructured([(model[0], "weight"), (model[1], "weight")], L1Unstructured, amount=0.5)
    >>> sparsity(model)
    0.5

    ``pruning_method``: an unstructured method class; ``kwargs`` go to its constructor, and so does
    ``seed``. A user's own method sees plain parameters as one vector, and sharded ones one by one. The
    rounds of one parameter, however many there are.

    Raises:
        TypeError: ``parameters`` or ``importance_scores`` of the wrong type, or a method that is not
            unstructured.
    """
    kwargs |= {} if seed is None else {"seed": seed}  # not every method takes one
    pairs = partial(_listed, "global_unstructured", parameters, importance_scores)
    prune_pairs(communicator(group), pairs, partial(pruning_method, **kwargs), importance_scores, scope="global")


def prune_each(
    parameters: Iterable[Parameter],
    pruning_method: type[torch_prune.BasePruningMethod],
    importance_scores: ScoresOfEach = None,
    *,
    seed: int | None = None,
    group: Group = None,
    **kwargs: Any,
) -> None:
    """Prune each of ``parameters`` by itself, all in the rounds of one.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> prune_each([(model[0], "weight"), (model[1], "weight")], L1Unstructured, amount=0.5)
    >>> sparsity(model[0]), sparsity(model[1])
    (0.5, 0.5)

    It does what a loop of ``pruning_method.apply(module, name, **kwargs)`` does. Arguments as in
    :func:`global_unstructured`; structured methods work, too.
    """
    kwargs |= {} if seed is None else {"seed": seed}
    pairs = partial(_listed, "prune_each", parameters, importance_scores)
    prune_pairs(communicator(group), pairs, partial(pruning_method, **kwargs), importance_scores)


def _listed(caller: str, parameters: object, importance_scores: object) -> Pairs:
    if not isinstance(parameters, Iterable):
        raise TypeError(f"{caller}(): parameters is not an Iterable")
    if importance_scores is not None and not isinstance(importance_scores, dict):
        raise TypeError(f"{caller}(): importance_scores must be of type dict")
    listed: list[Any] = [parameters] if isinstance(parameters, nn.Module | Mapping | torch.Tensor) else list(parameters)
    for pair in listed:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], str)):
            raise TypeError(
                f"{caller}(): parameters are pairs of a module and a name, such as (model.fc, 'weight'), not "
                f"{type(pair).__name__}"
            )
    return listed


def custom_from_mask(module: nn.Module, name: str, mask: torch.Tensor, *, group: Group = None) -> nn.Module:
    """Prune ``name`` by ``mask``. ``torch.nn.utils.prune.custom_from_mask``.

    >>> layer = custom_from_mask(torch.nn.Linear(2, 1), "weight", torch.tensor([[1, 0]]))
    >>> layer.weight_mask
    tensor([[1., 0.]])

    For a sharded parameter: of zeros and ones, plain and whole on every rank, or a DTensor in the
    parameter's layout.
    """
    CustomFromMask.apply(module, name, mask, group=group)
    return module


def put_masks(comm: Communicator, shards: Sequence[LocalShard], masks: Mapping[str, torch.Tensor]) -> None:
    """Do what :func:`custom_from_mask` does with the local ``masks`` (bool) of ``shards``, agreed on already.

    Every rank of ``comm`` must call it, with its own: one round of 64 bytes.
    """
    pairs, targets, made = list[Parameter](), list[Target](), list[torch.Tensor]()
    with together(comm):
        for shard in shards:
            if shard.module is None:
                raise NotImplementedError(f"rows of {shard.name!r} that were spread by hand are in no module")
            if shard.is_tied:
                raise NotImplementedError(
                    f"{shard.name!r} is tied to a parameter of another module, which would stay dense beside the mask; "
                    "write the zeros in place with apply_(), or untie it first"
                )
            pairs.append((shard.module, shard.attribute))
        targets = find_targets(pairs)
        for shard, target in zip(shards, targets, strict=True):
            if target.shard is None or target.shard.geometry != shard.geometry:
                raise ValueError(f"{shard.name!r} is laid out otherwise than its mask; choose the masks anew")
            keep = masks[shard.name].to(target.shard.local.device, copy=True)
            made.append(target.next_mask(keep, CustomFromMask.PRUNING_TYPE))
    for target, mask in zip(targets, made, strict=True):
        place(target, mask, CustomFromMask(mask))


def shard_masks(model: nn.Module, *, group: Group = None) -> nn.Module:
    """Cut the masks of parameters that were pruned first and sharded after, and return ``model``.

    >>> model = l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.5)  # and then fully_shard(model)
    >>> sparsity(shard_masks(model))
    0.5

    Call it after ``fully_shard`` or ``parallelize_module`` on a pruned model, by distprune or by
    ``torch.nn.utils.prune``: every rank keeps its own part of each mask, one byte an element, and the
    rest of this module goes on from there. (Pruning such a parameter again does the same for it.) Masks
    that are in place already are left alone. Every rank of ``group`` must call it; one round.

    Raises:
        ValueError: on every rank: masks that differ between ranks, hold other values than 0 and 1, or are cut otherwise
            than their parameters: then ``remove`` before sharding, or prune behind it.
    """

    with agreeing(communicator(group)) as agreed:
        targets = find_targets(_masks_to_cut(model))
        for target in targets:
            check_binary(target.label, target.whole_mask)
        shards = [target.shard for target in targets if target.shard is not None]
        masks = [target.whole_mask for target in targets if target.whole_mask is not None]
        sums = fetched([checksum([local_of(mask)]) for mask in masks if not mask.is_meta])
        parts = [(target, target.next_mask(target.mask, "global")) for target in targets]
        agreed.found, agreed.facts = Found(shards), facts(targets, [*map(int, sums)])
    for target, mask in parts:
        place(target, mask, None)
    return model


def _masks_to_cut(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the sharded parameters whose masks are laid out otherwise; what FSDP2 left unsharded is put back."""
    fsdp2, found = Fsdp2Params(), []
    for module in model.modules():
        for hook in pruning_hooks(module).values():
            name = str(hook._tensor_name)
            fsdp2.release(module, name + "_orig")
            mask = getattr(module, name + "_mask")
            original = getattr(module, name + "_orig")
            if isinstance(original, DTensor) and not is_laid_out_like(mask, original):
                found.append((module, name))
    return found


def remove(module: nn.Module, name: str) -> nn.Module:
    """Make the pruning of ``name`` permanent and take its hook, mask and new name away. Local: no communication.

    >>> layer = l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.5)
    >>> layer = remove(layer, "weight")
    >>> is_pruned(layer), sparsity(layer)
    (False, 0.5)

    ``torch.nn.utils.prune.remove``. The parameter is the same object as before and after.

    Raises:
        ValueError: ``name`` is not pruned.
    """
    for key, hook in pruning_hooks(module, name).items():
        if isinstance(hook, BasePruningMethod):
            hook.remove(module)
        else:
            undo_reparametrization(module, name)
        del module._forward_pre_hooks[key]
        return module
    raise ValueError(f"Parameter '{name}' of module {module} has to be pruned before pruning can be removed")


def is_pruned(module: nn.Module) -> bool:
    """Return whether ``module`` or one inside it has a pruning hook, ours or PyTorch's. Local.

    >>> layer = torch.nn.Linear(4, 4)
    >>> is_pruned(layer), is_pruned(l1_unstructured(layer, "weight", 0.5))
    (False, True)
    """
    return any(pruning_hooks(submodule) for submodule in module.modules())
