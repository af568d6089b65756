"""Which parameters a call prunes, and under which names.

Nouns: a parameter's *name* is its path in the bare model. What wraps a module (DDP, FSDP1, activation
checkpointing, torch.compile) is left out of it, so that a parameter has one name in every layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distprune.models.decoder_blocks import decoder_blocks
from distprune.shards import FlatPart, LocalShard, Matrix, find_flat_parts, is_held, local_shard

__all__ = ["NamePattern", "find_shards"]

NamePattern = str | nn.Module

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

# A parameter, or FSDP1's part of one: compared by identity, so that tied weights are one.
_Held = torch.Tensor | FlatPart


def find_shards(
    model: nn.Module,
    include: Sequence[NamePattern],
    exclude: Sequence[NamePattern],
    fitting: Callable[[nn.Module, str, Sequence[int], str], Matrix] | None = None,
) -> tuple[list[LocalShard], list[int]]:
    """Return this rank's parts of the parameters to prune, in the model's order, and how many each pattern matched.

    Without ``include``: the weights (two dims or more) of all layers but embeddings inside the decoder
    blocks, or, in a model without decoder blocks, anywhere. With it: every parameter whose name
    matches one of the patterns (as ``fnmatch`` does), and the weights inside the modules given.
    ``exclude`` takes away. A tied weight counts once, under its first name, and matches by any of its
    names. The counts are of ``include``, then of ``exclude``. ``fitting`` (module, name in it, global shape,
    full name) says how each is a matrix, or raises.

    Parameters that FSDP left unsharded after a forward are put back to their shards first. No communication.

    Raises:
        NotImplementedError: a ``Partial`` placement.
        TypeError: a pattern that is neither a string nor a module.
    """
    for pattern in (*include, *exclude):
        if not isinstance(pattern, str | nn.Module):
            raise TypeError(f"a pattern is a string or a module, not {type(pattern).__name__}: {pattern!r}")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    flat_parts = find_flat_parts(model)
    bare = _bare(model)
    names: dict[_Held, list[str]] = {}
    homes: dict[_Held, tuple[nn.Module, str]] = {}
    for prefix, module in bare.named_modules(remove_duplicate=False):
        for name, held in _held_by(module, flat_parts):
            names.setdefault(held, []).append(_clean(f"{prefix}.{name}" if prefix else name))
            homes.setdefault(held, (module, name))
    num_matches = [0] * (len(include) + len(exclude))
    targets: dict[str, _Held] = {}
    by_default = _weights_of(_blocks_or_all(bare), flat_parts) if not include else set()
    weights_inside = [_weights_of([p], flat_parts) if isinstance(p, nn.Module) else set() for p in (*include, *exclude)]
    for held, aliases in names.items():
        hits = [
            held in inside if isinstance(pattern, nn.Module) else any(fnmatchcase(a, pattern) for a in aliases)
            for pattern, inside in zip((*include, *exclude), weights_inside, strict=True)
        ]
        num_matches = [count + hit for count, hit in zip(num_matches, hits, strict=True)]
        wanted = any(hits[: len(include)]) if include else held in by_default
        if wanted and not any(hits[len(include) :]):
            targets[aliases[0]] = held
    shards = []
    for name, held in targets.items():
        matrix = fitting(*homes[held], held.shape, name) if fitting is not None else None
        if isinstance(held, FlatPart):
            shards.append(dataclasses.replace(held.local_shard(name), matrix=matrix))
        elif is_held(held):
            shards.append(dataclasses.replace(local_shard(name, held), matrix=matrix))
    return shards, num_matches


def _held_by(module: nn.Module, flat_parts: dict[tuple[int, str], FlatPart]) -> list[tuple[str, _Held]]:
    """Return the parameters of ``module`` itself, FSDP1's under their original names."""
    own: dict[str, _Held] = {name: p for name, p in module._parameters.items() if p is not None}
    own.pop("_flat_param", None)
    own.update({name: part for (key, name), part in flat_parts.items() if key == id(module)})
    return list(own.items())


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


def _weights_of(modules: Sequence[nn.Module], flat_parts: dict[tuple[int, str], FlatPart]) -> set[_Held]:
    return {
        held
        for root in modules
        for module in root.modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for _, held in _held_by(module, flat_parts)
        if len(held.shape) >= 2
    }
