"""Which dims of a weight are outputs and which are inputs, read off its module; adapters by name. No communication.

Only this file describes transformers' ``Conv1D`` and experts; the rest of the library uses a ``Matrix``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

from torch import nn

from distprune.shards import Matrix

# What transformers 5 calls the weights of its experts modules, in the order in which they are applied.
_EXPERT_WEIGHTS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"))
_MATRIX_OF_EXPERTS = ("inputs", "expert_size")  # how JetMoe calls a module of one matrix an expert


def matrix_of_weight(module: nn.Module, name: str, shape: Sequence[int], full_name: str) -> Matrix:
    """Return how parameter ``name`` of ``module``, of the global ``shape``, is a matrix. Local.

    Raises:
        ValueError: it has fewer than two dims; ``full_name`` names it.
        NotImplementedError: its input dims are not known.
    """
    if len(shape) < 2:
        raise ValueError(f"{full_name!r} of shape {tuple(shape)} is no matrix: a pattern needs rows and columns")
    if is_conv1d(module) and len(shape) == 2:
        return Matrix(shape[1], shape[0], transposed=True)
    if len(shape) == 3 and name in expert_weights(module):
        # Experts that are given nothing but their tokens, in order (Llama 4), multiply by the weights as they are.
        is_ordered = expert_arguments(module) == ("hidden_states",)
        transposed = bool(getattr(module, "is_transposed", is_ordered))
        num_out, num_in = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
        return Matrix(num_out, num_in, transposed, shape[0])
    known = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Bilinear)
    if len(shape) > 2 and not known:
        raise NotImplementedError(
            f"the input dims of {full_name!r}, of shape {tuple(shape)} in a {type(module).__name__}, are not known; "
            "leave it out, or prune it without a pattern"
        )
    return Matrix.of_shape(shape)


def is_adapter(name: str) -> bool:
    """Return whether ``name`` is that of an adapter's own parameter, as PEFT names them; what it adapts is none."""
    return any(part.startswith("lora_") for part in name.split("."))


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' ``Conv1D`` (GPT-2), whose weight is kept as (in, out)."""
    transformers = sys.modules.get("transformers.pytorch_utils")  # a Conv1D exists only if that was imported
    return transformers is not None and isinstance(module, transformers.Conv1D)


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the 3-D weights in which ``module`` holds all experts of a block, as transformers 5 does.

    In the order in which they are applied; none if it holds no experts.
    """
    own = {name.removesuffix("_orig"): p for name, p in module._parameters.items() if p is not None and p.ndim > 2}
    if any(parameter.ndim != 3 for parameter in own.values()):
        return ()
    if own.keys() == {"weight"} and expert_arguments(module) == _MATRIX_OF_EXPERTS:
        return ("weight",)
    return next((names for names in _EXPERT_WEIGHTS if own.keys() == set(names)), ())


def expert_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return what the arguments of ``module``'s forward are called."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]
