"""A model of which only the names and shapes of its tensors are known: its modules without their code.

What names can tell: a dotted path of modules, and numbers in it are lists. Then the rules that hold for models
(``find_shards``, ``decoder_blocks``) hold for it. What names cannot tell, and what is taken instead:

- the order of parameters, which decides between equal scores: that of their names, with numbers read as numbers;
- which modules are embeddings: those with ``emb`` in their name, and ``relative_attention_bias`` (T5);
- which modules are linear layers: those with a ``weight`` of two dims, so that experts and their router are known;
- which dims of a weight are inputs: of two dims the last. Of more it is not known, and patterns of rows refuse them;
  a ``Conv1D`` (GPT-2), which keeps (in, out), is not told from a linear layer;
- which of several towers reads text: the one with most weights;
- that a tensor of two dims or more is a buffer: such a one, if floating, is taken for a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from distprune.collectives.roster import natural_order

_EMBEDDINGS = ("relative_attention_bias",)


def model_of_names(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model with ``tensors``, as parameters where they are floating, under their names. Local."""
    root = nn.Module()
    children: defaultdict[str, set[str]] = defaultdict(set)  # modules in a module, by its path
    for name in tensors:
        path = name.rpartition(".")[0]
        while path:
            parent, _, child = path.rpartition(".")
            children[parent].add(child)
            path = parent
    for name in sorted(tensors, key=natural_order):
        module, path = root, ""
        *parents, attribute = name.split(".")
        for part in parents:
            path = f"{path}.{part}" if path else part
            if part not in module._modules:
                module.add_module(part, _empty(_kind(part, children[path], tensors.get(f"{path}.weight"))))
            module = module.get_submodule(part)
        tensor = tensors[name]
        if tensor.is_floating_point():
            module.register_parameter(attribute, nn.Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(attribute, tensor)
    return root


def _empty(kind: type[nn.Module]) -> nn.Module:
    """Return a module that has nothing yet."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def _kind(name: str, children: set[str], weight: torch.Tensor | None) -> type[nn.Module]:
    if children and all(child.isdigit() for child in children):
        return nn.ModuleList
    if not children and ("emb" in name or name in _EMBEDDINGS):
        return nn.Embedding
    if not children and weight is not None and weight.ndim == 2:
        return nn.Linear
    return nn.Module
