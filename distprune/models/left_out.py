"""Which parameters are weights, and why others are pruned only if they are named. No communication.

A *weight* has two dims or more, and its module multiplies inputs by it. So these are none: embeddings, the gains of
norms, adapters (``lora_*``), routers among experts and, in a decoder block, gates with one output (see
``linear_layers``); what a parametrization computes a weight from; and what a module keeps beside its layers, such as
Mamba's ``A_log`` and tables of relative positions. The last are told by where they stand: a parameter of a module that
holds layers is a weight only if its name says so (``in_proj_weight``), one of a module without any is, unless its name
says that it is a bias, a table or an embedding.
"""

from __future__ import annotations

import re
from collections.abc import Container

from torch import nn

from distprune.models.linear_layers import find_gates, find_routers
from distprune.models.parametrizations import Key
from distprune.models.weights import ShapesOf, is_adapter

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
