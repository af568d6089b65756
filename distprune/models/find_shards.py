"""Which parameters a call prunes, and under which names.

Nouns: a parameter's *name* is its path in the bare model. What wraps a module (DDP, FSDP1, activation
checkpointing, torch.compile) is left out of it, so that a parameter has one name in every layout. What a *weight* is:
see ``weights``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from distprune.models.decoder_blocks import bare_model, decoder_blocks, warn_of_other_blocks
from distprune.models.matrices import Held, without_wrappers
from distprune.models.weights import check_keeps_zeros, list_parameters, parametrized, why_no_weights
from distprune.shards.layouts import is_held, local_shard
from distprune.shards.local_shard import LocalShard

NamePattern = str | nn.Module


@dataclass(frozen=True)
class Found:
    """``shards``: this rank's parts of the parameters to prune, in the model's order.

    ``patterns``: the name patterns of ``include``, then of ``exclude``, each with the number of parameters that it
    matched on this rank. If any rank of the group has decoder blocks (``has_blocks``), those that lack them
    (``lacks_blocks``: ``include`` was empty, and this is a pipeline stage of an embedding, or of a norm and the head)
    prune nothing by default. The caller applies that. ``num_parameters``: how many elements all parameters of this
    rank's model have, those included that other ranks hold; tied ones count once. ``names``: of all parameters, each
    with the name that it has here. ``left_out``: those of two dims or more, where weights are looked for, that are none
    (see above), with why.
    """

    shards: list[LocalShard]
    patterns: Sequence[tuple[NamePattern, int]] = ()
    lacks_blocks: bool = False
    has_blocks: bool = False
    num_parameters: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, int] = field(default_factory=dict)  # checksums by name: see ``Member``

    def name_of(self, key: str) -> str | None:
        """Return the name here of the parameter that a wrapped model calls ``key``; ``None``: there is none."""
        bare = without_wrappers(key)
        for name in (key, bare, bare.removeprefix("module."), bare.removesuffix("_orig")):
            if name in self.names:
                return self.names[name]
        return None

    def by_name(self, shares: float | Mapping[str, float] | None) -> float | Mapping[str, float] | None:
        """Return ``shares``, a mapping by the names here. Local.

        Raises:
            ValueError: two keys name one parameter, with different shares.
        """
        if not isinstance(shares, Mapping):
            return shares
        named: dict[str, float] = {}
        for key, share in shares.items():
            name = (self.name_of(key) if isinstance(key, str) else None) or key
            if named.setdefault(name, share) != share:
                raise ValueError(f"sparsity names {name!r} twice, with {named[name]} and {share}")
        return named


def is_sharded(model: nn.Module) -> bool:
    """Return whether DTensors or FSDP hold parameters of ``model``: other ranks may have parts of them. Local."""
    return isinstance(model, nn.Module) and (
        any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


def find_shards(
    model: nn.Module,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
) -> Found:
    """Return this rank's parts of the parameters to prune.

    Without ``include``: the weights (see above) inside the decoder blocks, or, in a model without decoder
    blocks, anywhere. With it: every parameter whose name matches one of the patterns (as ``fnmatch`` does), and the
    weights inside the modules given, also those under a parametrization. ``exclude`` leaves some out. A tied weight
    counts once, under its first name, and matches by any of its names. The original of a reparametrized parameter has
    the parameter's name.

    Parameters that FSDP left unsharded after a forward are resharded first. No communication.

    Raises:
        NotImplementedError: a ``Partial`` placement.
        TypeError: a pattern that is neither a string nor a module.
        ValueError: ``include`` names what is under a parametrization that does not keep its zeros.
    """
    check_model(model)
    include, exclude, bare = listed(include), listed(exclude), bare_model(model)
    for module in bare.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    places_of, by_module = list_parameters(bare)
    roots, has_blocks = [bare], False
    if not include:
        with suppress(ValueError):  # without blocks, weights anywhere
            roots, has_blocks = [block for _, block in decoder_blocks(bare)], True
            warn_of_other_blocks(bare)
    reasons = {} if include else why_no_weights(roots, by_module, is_block=has_blocks)
    matches: list[set[Held]] = []
    for pattern in (*include, *exclude):
        if isinstance(pattern, nn.Module):
            inside = why_no_weights([pattern], by_module, is_named=True)
            matches.append({held for held, reason in inside.items() if not reason})
        else:
            fits = re.compile(translate(pattern)).match
            matches.append({held for held, names in places_of.items() if any(map(fits, names))})
    wanted = {held for held, reason in reasons.items() if not reason}.union(*matches[: len(include)])
    wanted = wanted.difference(*matches[len(include) :])
    computed, shards = parametrized(by_module), []
    for held, places in places_of.items():
        if held not in wanted:
            continue
        name, (module, attribute) = next(iter(places.items()))
        if isinstance(held, LocalShard):
            shard = held.having(name=name, module=module, attribute=attribute)
        elif is_held(held):
            shard = local_shard(name, held, module, attribute)
        else:
            continue
        if (module, attribute) in computed:
            check_keeps_zeros(computed[module, attribute], name, tuple(held.shape), shard.local.dtype)
        shards.append(shard if len(places) == 1 else shard.having(is_tied=len({*places.values()}) > 1))
    return Found(
        shards,
        [(pattern, len(matched)) for pattern, matched in zip((*include, *exclude), matches, strict=True)],
        not include and not has_blocks,
        has_blocks,
        sum(math.prod(held.shape) for held in places_of),
        {alias: next(iter(names)) for names in places_of.values() for alias in names},
        {next(iter(places_of[held])): reason for held, reason in reasons.items() if reason},
    )


def check_model(model: object) -> None:
    """Check that ``model`` is one. Local.

    Raises:
        TypeError: it is a path, a state or a tensor, or something else.
    """
    if isinstance(model, nn.Module):
        return
    ways: tuple[tuple[tuple[type, ...], str], ...] = (
        ((str, os.PathLike), f" {str(model)!r}; load it first: distprune.load(path)"),
        ((Mapping,), "; load the state into its model first"),
        (
            (list, tuple),
            "; put several into one torch.nn.ModuleList; parts of tensors are LocalShards: see prune_shards",
        ),
        ((torch.Tensor,), "; a tensor alone is pruned by prune_shards, or by L1Unstructured(amount).prune(tensor)"),
    )
    way = next((way for kinds, way in ways if isinstance(model, kinds)), "")
    raise TypeError(f"model takes a torch.nn.Module, not a {type(model).__name__}{way}")


def count_parameters(model: nn.Module) -> int:
    """Return how many elements the parameters of ``model`` have, over all ranks; tied ones count once. Local.

    Of FSDP1, which keeps its shards otherwise, those of this rank.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def listed(patterns: NamePattern | Iterable[NamePattern]) -> list[NamePattern]:
    """Return the name patterns that an ``include`` or ``exclude`` says. Local.

    Raises:
        TypeError: one is neither a string nor a module.
    """
    if isinstance(patterns, str | nn.Module):
        return [patterns]
    is_one = isinstance(patterns, torch.Tensor) or not isinstance(patterns, Iterable)
    several: list[Any] = [patterns] if is_one else [*patterns]
    for pattern in several:
        if not isinstance(pattern, str | nn.Module):
            raise TypeError(
                "include and exclude take names of parameters (such as '*.mlp.*'), modules, or lists of them, not "
                f"{type(pattern).__name__}"
            )
    return several
