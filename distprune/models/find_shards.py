"""Which parameters a call prunes, and under which names.

Nouns: a parameter's *name* is its path in the bare model. What wraps a module (DDP, FSDP1, activation
checkpointing, torch.compile) is left out of it, so that a parameter has one name in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distprune.models.decoder_blocks import decoder_blocks, warn_of_other_blocks
from distprune.models.weights import is_adapter
from distprune.shards import LocalShard, find_flat_parts, is_held, local_shard

NamePattern = str | nn.Module

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

# A parameter, or FSDP1's part of one: compared by identity, so that tied weights are one.
_Held = torch.Tensor | LocalShard


@dataclass(frozen=True)
class Found:
    """``shards``: this rank's parts of the parameters to prune, in the model's order.

    ``patterns``: the name patterns of ``include``, then of ``exclude``, each with the number of parameters that it
    matched on this rank. ``by_default``: ``include`` was empty. The default follows from the whole model: if any rank
    of the group has decoder blocks (``has_blocks``), ranks without (pipeline stages of an embedding, or of a norm and
    the head) prune nothing. The caller applies that. ``num_parameters``: how many elements all parameters of this
    rank's model have, those included that other ranks hold; tied ones count once. ``names``: of all parameters.
    """

    shards: list[LocalShard]
    patterns: list[tuple[NamePattern, int]]
    by_default: bool
    has_blocks: bool
    num_parameters: int | None = None
    names: Sequence[str] = ()


def is_sharded(model: nn.Module) -> bool:
    """Return whether DTensors or FSDP hold parameters of ``model``: other ranks may have parts of them. Local."""
    return (
        any(isinstance(module, FSDPModule) for module in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        or bool(find_flat_parts(model))
    )


def find_shards(
    model: nn.Module,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
) -> Found:
    """Return this rank's parts of the parameters to prune.

    Without ``include``: the weights (two dims or more) of all layers but embeddings and adapters (``lora_*``) inside
    the decoder blocks, or, in a model without decoder blocks, anywhere. With it: every parameter whose name matches one
    of the patterns (as ``fnmatch`` does), and the weights inside the modules given. ``exclude`` leaves some out. A tied
    weight counts once, under its first name, and matches by any of its names. The original of a reparametrized
    parameter has the parameter's name.

    Parameters that FSDP left unsharded after a forward are resharded first. No communication.

    Raises:
        NotImplementedError: a ``Partial`` placement.
        TypeError: a pattern that is neither a string nor a module.
    """
    include, exclude = _listed(include), _listed(exclude)
    patterns = [*include, *exclude]
    for pattern in patterns:
        if not isinstance(pattern, str | nn.Module):
            raise TypeError(f"a pattern is a string or a module, not {type(pattern).__name__}: {pattern!r}")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    flat_parts = find_flat_parts(model)
    bare = bare_model(model)
    names: dict[_Held, list[str]] = {}
    holders: dict[_Held, tuple[nn.Module, str]] = {}  # module, attribute
    for prefix, module in bare.named_modules(remove_duplicate=False):
        for name, held in _held_by(module, flat_parts):
            names.setdefault(held, []).append(_clean(f"{prefix}.{name}" if prefix else name))
            holders.setdefault(held, (module, name))
    blocks = [] if include else _blocks(bare)
    by_default = set() if include else _weights_of(blocks or [bare], flat_parts)
    weights_inside = [_weights_of([p], flat_parts) if isinstance(p, nn.Module) else set() for p in patterns]
    num_matches = [0] * len(patterns)
    shards = []
    for held, aliases in names.items():
        hits = [
            held in inside if isinstance(pattern, nn.Module) else any(fnmatchcase(a, pattern) for a in aliases)
            for pattern, inside in zip(patterns, weights_inside, strict=True)
        ]
        num_matches = [count + hit for count, hit in zip(num_matches, hits, strict=True)]
        wanted = any(hits[: len(include)]) if include else held in by_default and not any(map(is_adapter, aliases))
        if wanted and not any(hits[len(include) :]) and (isinstance(held, LocalShard) or is_held(held)):
            name, (module, attribute) = aliases[0], holders[held]
            shards.append(
                held.having(name=name, module=module, attribute=attribute)
                if isinstance(held, LocalShard)
                else local_shard(name, held, module, attribute)
            )
    num_parameters = sum(math.prod(held.shape) for held in names)
    found, all_names = list(zip(patterns, num_matches, strict=True)), [aliases[0] for aliases in names.values()]
    return Found(shards, found, not include, bool(blocks), num_parameters, all_names)


def count_parameters(model: nn.Module) -> int:
    """Return how many elements the parameters of ``model`` have, over all ranks; tied ones count once. Local.

    Of FSDP1, which keeps its shards otherwise, those of this rank.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def _listed(patterns: NamePattern | Sequence[NamePattern]) -> list[NamePattern]:
    return [patterns] if isinstance(patterns, str | nn.Module) else list(patterns)


def _held_by(module: nn.Module, flat_parts: dict[int, dict[str, LocalShard]]) -> list[tuple[str, _Held]]:
    """Return the parameters of ``module`` itself, under the names that they had before FSDP1 or a mask."""
    own: dict[str, _Held] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            bare = name.removesuffix("_orig")
            own[bare if f"{bare}_mask" in module._buffers else name] = parameter
    own.pop("_flat_param", None)
    own.update(flat_parts.get(id(module), {}))
    return list(own.items())


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add a level to its names. Local."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _blocks(model: nn.Module) -> list[nn.Module]:
    try:
        blocks = [block for _, block in decoder_blocks(model)]
    except ValueError:
        return []
    warn_of_other_blocks(model)
    return blocks


def _weights_of(modules: Sequence[nn.Module], flat_parts: dict[int, dict[str, LocalShard]]) -> set[_Held]:
    return {
        held
        for root in modules
        for module in root.modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for _, held in _held_by(module, flat_parts)
        if len(held.shape) >= 2
    }
