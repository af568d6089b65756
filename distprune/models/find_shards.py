"""Which parameters a call prunes, and under which names.

Nouns: a parameter's *name* is its path in the bare model. What wraps a module (DDP, FSDP1, activation
checkpointing, torch.compile) is left out of it, so that a parameter has one name in every layout.

A *weight* has two dims or more, and its module multiplies inputs by it. So these are none: embeddings, the gains of
norms, adapters (``lora_*``), routers among experts and, in a decoder block, gates with one output (see
``linear_layers``); what a parametrization computes a weight from; and what a module keeps beside its layers, such as
Mamba's ``A_log`` and tables of relative positions. The last are told by where they stand: a parameter of a module that
holds layers is a weight only if its name says so (``in_proj_weight``), one of a module without any is, unless its name
says that it is a bias, a table or an embedding.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from distprune.models.decoder_blocks import decoder_blocks, warn_of_other_blocks
from distprune.models.linear_layers import (
    WRAPPERS,
    Key,
    Shapes,
    ShapesOf,
    check_keeps_zeros,
    find_gates,
    find_routers,
    is_adapter,
    parametrized,
)
from distprune.shards.layouts import find_flat_parts, is_held, local_shard
from distprune.shards.local_shard import LocalShard

NamePattern = str | nn.Module

# A parameter, or FSDP1's part of one: compared by identity, so that tied weights are one.
_Held = torch.Tensor | LocalShard


@dataclass(frozen=True)
class Found:
    """``shards``: this rank's parts of the parameters to prune, in the model's order.

    ``patterns``: the name patterns of ``include``, then of ``exclude``, each with the number of parameters that it
    matched on this rank. ``by_default``: ``include`` was empty. The default follows from the whole model: if any rank
    of the group has decoder blocks (``has_blocks``), ranks without (pipeline stages of an embedding, or of a norm and
    the head) prune nothing. The caller applies that. ``num_parameters``: how many elements all parameters of this
    rank's model have, those included that other ranks hold; tied ones count once. ``names``: of all parameters, each
    with the name that it has here. ``left_out``: those of two dims or more, where weights are looked for, that are none
    (see above), with why.
    """

    shards: list[LocalShard]
    patterns: Sequence[tuple[NamePattern, int]] = ()
    by_default: bool = False
    has_blocks: bool = False
    num_parameters: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, int] = field(default_factory=dict)  # checksums by name: see ``Member``

    @property
    def lacks_blocks(self) -> bool:
        """Whether nothing is pruned by default if another rank has decoder blocks."""
        return self.by_default and not self.has_blocks

    def name_of(self, key: str) -> str | None:
        """Return the name here of the parameter that a wrapped model calls ``key``; ``None``: there is none."""
        for name in (key, _clean(key), _clean(key).removeprefix("module."), _clean(key).removesuffix("_orig")):
            if name in self.names:
                return self.names[name]
        return None


def is_sharded(model: nn.Module) -> bool:
    """Return whether DTensors or FSDP hold parameters of ``model``: other ranks may have parts of them. Local."""
    return isinstance(model, nn.Module) and (
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
    include, exclude = _listed(include), _listed(exclude)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    bare, flat_parts = bare_model(model), find_flat_parts(model)
    names: dict[_Held, list[str]] = {}
    holders: dict[_Held, list[Key]] = {}
    parts: dict[nn.Module, dict[str, _Held]] = {}
    for prefix, module in bare.named_modules(remove_duplicate=False):
        is_new = module not in parts
        held_by = parts.setdefault(module, _held_by(module, flat_parts) if is_new else {})
        for name, held in held_by.items():
            full_name = _clean(f"{prefix}.{name}" if prefix else name)
            if not isinstance(held, LocalShard) and is_lazy(held):
                raise ValueError(f"{full_name!r} of a {type(module).__name__} has no shape yet: run a forward first")
            names.setdefault(held, []).append(full_name)
            if is_new:
                holders.setdefault(held, []).append((module, name))
    shapes = {module: {name: held.shape for name, held in of_module.items()} for module, of_module in parts.items()}

    def shapes_of(module: nn.Module) -> Shapes:
        return shapes.get(module, {})

    def weights_in(root: nn.Module, reasons: Mapping[Key, str]) -> set[_Held]:
        inside = [(module, *part) for module in root.modules() for part in parts.get(module, {}).items()]
        return {held for module, name, held in inside if len(held.shape) > 1 and (module, name) not in reasons}

    def matched_by(pattern: NamePattern) -> set[_Held]:
        if isinstance(pattern, nn.Module):
            return weights_in(pattern, left_out(pattern, shapes_of, {}, is_block=False, is_named=True))
        return {held for held, aliases in names.items() if any(fnmatchcase(a, pattern) for a in aliases)}

    blocks, computed = [] if include else _blocks(bare), parametrized(bare)
    reasons: dict[Key, str] = {}
    by_default = set[_Held]()
    for root in () if include else blocks or [bare]:
        reasons |= left_out(root, shapes_of, computed, is_block=bool(blocks))
        by_default |= weights_in(root, reasons)
    matches = [matched_by(pattern) for pattern in (*include, *exclude)]
    wanted = set[_Held]().union(*matches[: len(include)]) if include else by_default
    wanted = wanted.difference(*matches[len(include) :])
    shards = []
    for held, (name, *_) in names.items():
        if held in wanted and (isinstance(held, LocalShard) or is_held(held)):
            shard = held if isinstance(held, LocalShard) else local_shard(name, held)
            module, attribute = holders[held][0]
            if (module, attribute) in computed:
                check_keeps_zeros(computed[module, attribute], name, tuple(held.shape), shard.local.dtype)
            is_tied = len(holders[held]) > 1
            shards.append(shard.having(name=name, module=module, attribute=attribute, is_tied=is_tied))
    left = {held: reasons[holders[held][0]] for held in names if holders[held][0] in reasons and held not in by_default}
    return Found(
        shards,
        [(pattern, len(matched)) for pattern, matched in zip((*include, *exclude), matches, strict=True)],
        not include,
        bool(blocks),
        sum(math.prod(held.shape) for held in names),
        {alias: aliases[0] for aliases in names.values() for alias in aliases},
        {names[held][0]: reason for held, reason in left.items()},
    )


def check_model(model: object) -> None:
    """Check that ``model`` is one. Local.

    Raises:
        TypeError: it is a path, a state or a tensor, or something else.
    """
    if isinstance(model, nn.Module):
        return
    way = ""
    if isinstance(model, str | os.PathLike):
        way = "; load it first: distprune.load(path)"
    elif isinstance(model, Mapping):
        way = "; load the state into its model first"
    elif isinstance(model, torch.Tensor):
        way = "; a tensor without a model is pruned by prune_shards, or by L1Unstructured(amount).prune(tensor)"
    shown = f" {str(model)!r}" if isinstance(model, str | os.PathLike) else ""
    raise TypeError(f"model takes a torch.nn.Module, not a {type(model).__name__}{shown}{way}")


def count_parameters(model: nn.Module) -> int:
    """Return how many elements the parameters of ``model`` have, over all ranks; tied ones count once. Local.

    Of FSDP1, which keeps its shards otherwise, those of this rank.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def _listed(patterns: NamePattern | Sequence[NamePattern]) -> list[NamePattern]:
    if isinstance(patterns, str | nn.Module):
        return [patterns]
    listed = [patterns] if isinstance(patterns, torch.Tensor) or not isinstance(patterns, Iterable) else list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str | nn.Module):
            raise TypeError(
                "include and exclude take names of parameters (such as '*.mlp.*'), modules, or lists of them, not "
                f"{type(pattern).__name__}"
            )
    return listed


def _held_by(module: nn.Module, flat_parts: dict[int, dict[str, LocalShard]]) -> dict[str, _Held]:
    """Return the parameters of ``module`` itself, under the names that they had before FSDP1 or a mask."""
    own: dict[str, _Held] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            bare = name.removesuffix("_orig")
            own[bare if f"{bare}_mask" in module._buffers else name] = parameter
    own.pop("_flat_param", None)
    own.update(flat_parts.get(id(module), {}))
    return own


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add a level to its names. Local."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def _clean(name: str) -> str:
    return ".".join([part for part in name.split(".") if part not in WRAPPERS])


def _blocks(model: nn.Module) -> list[nn.Module]:
    try:
        blocks = [block for _, block in decoder_blocks(model)]
    except ValueError:
        return []
    warn_of_other_blocks(model)
    return blocks


_TABLES = re.compile(r"bias|biases|table|tables")
_WEIGHTS = re.compile(r"weights?|kernels?|proj|projections?|[wv][a-z]?")
_EMBEDDINGS = re.compile(r"embed|embeds|embeddings?|pos|positions?|tokens?")


def left_out(
    root: nn.Module, shapes_of: ShapesOf, computed: Container[Key], *, is_block: bool, is_named: bool = False
) -> dict[Key, str]:
    """Return why parameters of two dims or more inside of ``root`` are no weights. Local.

    ``computed``: those from which a parametrization computes a weight.
    ``is_block``: it is a decoder block, in which any list of layers may be experts, and one output makes a gate.
    ``is_named``: a user names it, who means adapters and what is under parametrizations, too.
    """
    routers = find_routers(root, shapes_of, only_named=not is_block)[0]
    gates = find_gates(root, shapes_of) if is_block else set()
    reasons: dict[Key, str] = {}
    for path, module in root.named_modules():
        for name, shape in shapes_of(module).items():
            if len(shape) < 2:
                continue
            if (module, name) in computed:
                reason = "under a parametrization"
            elif not is_named and is_adapter(f"{path}.{name}"):
                reason = "an adapter"
            elif module in routers:
                reason = "a router"
            elif module in gates:
                reason = "a gate: it has one output"
            else:
                reason = _reason(module, name, shapes_of)
            if reason:
                reasons[module, name] = reason
    return reasons


def _reason(module: nn.Module, name: str, shapes_of: ShapesOf) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        return "the gain of a norm"
    words = re.split(r"[_\d]+", name.lower())
    if any(map(_TABLES.fullmatch, words)):
        return "a bias or a table"
    if any(map(_WEIGHTS.fullmatch, words)):
        return ""
    if any(map(_EMBEDDINGS.fullmatch, words)):
        return "an embedding"
    holds_layers = any(shapes_of(layer) for layer in module.modules() if layer is not module)
    return "kept beside layers, no weight by its name" if holds_layers else ""
