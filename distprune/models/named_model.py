"""A model of which only the names and shapes of its tensors are known: its modules without their code.

What names can tell: a dotted path of modules, and numbers in it are lists. Then the rules that hold for models
(``find_shards``, ``decoder_blocks``) hold for it. What names cannot tell, and what is taken instead:

- the order of parameters, which decides between equal scores: that of their names, with numbers read as numbers;
- which modules are embeddings: those with ``emb`` in their name, and ``relative_attention_bias`` (T5);
- which modules are norms: those whose name ends in ``norm`` (and a number), or has it and whose tensors are vectors;
- which modules are linear layers: those with a ``weight`` of two dims, so that experts and their router are known;
- which dims of a weight are inputs: of two dims the last. Of more it is not known, and patterns of rows refuse them;
  a ``Conv1D`` (GPT-2), which keeps (in, out), is not told from a linear layer;
- which of several towers reads text: the one with most weights;
- that a tensor of two dims or more is a buffer: such a one, if floating, is taken for a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from distprune.collectives.roster import natural_order
from distprune.models.weights import is_norm

_EMBEDDINGS = ("relative_attention_bias",)


def model_of_names(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model with ``tensors``, as parameters where they are floating, under their names. Local."""
    tree: dict[str, Any] = {}  # of tensors, and trees of the modules in a module
    for name in sorted(tensors, key=natural_order):
        *parents, attribute = name.split(".")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[attribute] = tensors[name]
    return _filled(nn.Module(), tree)


def _filled(module: nn.Module, tree: Mapping[str, Any]) -> nn.Module:
    for name, entry in tree.items():
        if not isinstance(entry, torch.Tensor):
            kind = _kind(name, entry)
            child = kind.__new__(kind)
            nn.Module.__init__(child)  # it has nothing yet
            module.add_module(name, _filled(child, entry))
        elif entry.is_floating_point():
            module.register_parameter(name, nn.Parameter(entry, requires_grad=False))
        else:
            module.register_buffer(name, entry)
    return module


def _kind(name: str, tree: Mapping[str, Any]) -> type[nn.Module]:
    children = [child for child, entry in tree.items() if not isinstance(entry, torch.Tensor)]
    if children:
        return nn.ModuleList if all(child.isdigit() for child in children) else nn.Module
    if "emb" in name or name in _EMBEDDINGS:
        return nn.Embedding
    is_matrix = any(sum(size > 1 for size in entry.shape) > 1 for entry in tree.values() if entry.is_floating_point())
    if is_norm(name) or ("norm" in name and not is_matrix):
        return nn.LayerNorm
    return nn.Linear if "weight" in tree and tree["weight"].ndim == 2 else nn.Module
