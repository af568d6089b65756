"""Which parameters a call prunes, and under which names.

Nouns: a parameter's *name* is its path in the bare model. What wraps a module (DDP, FSDP1, activation
checkpointing, torch.compile) is left out of it, so that a parameter has one name in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from distprune.shards import decoder_blocks

__all__ = ["Pattern", "find_targets", "release_unsharded"]

Pattern = str | nn.Module

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def find_targets(
    model: nn.Module, include: Sequence[Pattern], exclude: Sequence[Pattern]
) -> tuple[dict[str, nn.Parameter], list[int]]:
    """Return the parameters to prune by name, in the model's order, and how many each pattern matched.

    Without ``include``: the weights (two dims or more) of all layers but embeddings inside the decoder
    blocks, or, in a model without decoder blocks, anywhere. With it: every parameter whose name
    matches one of the patterns (as ``fnmatch`` does), and the weights inside the modules given.
    ``exclude`` takes away. A tied weight counts once, under its first name, and matches by any of its
    names. The counts are of ``include``, then of ``exclude``.

    Raises:
        NotImplementedError: the model is wrapped in FSDP1.
        TypeError: a pattern that is neither a string nor a module.
    """
    for pattern in (*include, *exclude):
        if not isinstance(pattern, str | nn.Module):
            raise TypeError(f"a pattern is a string or a module, not {type(pattern).__name__}: {pattern!r}")
    if any(isinstance(module, FSDP1) for module in model.modules()):
        raise NotImplementedError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1); shard it with torch.distributed.fsdp."
            "fully_shard (FSDP2) to prune it"
        )
    bare = _bare(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(_clean(name))
    num_matches = [0] * (len(include) + len(exclude))
    targets: dict[str, nn.Parameter] = {}
    by_default = _weights_of(_blocks_or_all(bare)) if not include else set()
    weights_inside = [_weights_of([p]) if isinstance(p, nn.Module) else set() for p in (*include, *exclude)]
    for parameter, aliases in names.items():
        hits = [
            parameter in inside if isinstance(pattern, nn.Module) else any(fnmatchcase(a, pattern) for a in aliases)
            for pattern, inside in zip((*include, *exclude), weights_inside, strict=True)
        ]
        num_matches = [count + hit for count, hit in zip(num_matches, hits, strict=True)]
        wanted = any(hits[: len(include)]) if include else parameter in by_default
        if wanted and not any(hits[len(include) :]):
            targets[aliases[0]] = parameter
    return targets, num_matches


def release_unsharded(model: nn.Module) -> None:
    """Put FSDP2 modules that are still unsharded after a forward back to their shards. No communication."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _bare(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add a level to its names."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _blocks_or_all(model: nn.Module) -> list[nn.Module]:
    try:
        return [block for _, block in decoder_blocks(model)]
    except ValueError:
        return [model]


def _weights_of(modules: Sequence[nn.Module]) -> set[torch.Tensor]:
    return {
        parameter
        for root in modules
        for module in root.modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    }
