"""Which dims of a weight are outputs and which are inputs, read off its module; adapters by name. No communication.

Only this file describes transformers' ``Conv1D`` and experts; the rest of the library uses a ``Matrix``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from distprune.shards.matrix import Matrix

# What transformers 5 calls the weights of its experts modules, in the order in which they are applied.
_EXPERT_WEIGHTS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"))
_MATRIX_OF_EXPERTS = ("inputs", "expert_size")  # how JetMoe calls a module of one matrix an expert


Shapes = Mapping[str, Sequence[int]]  # of a module's own parameters, global, by name
ShapesOf = Callable[[nn.Module], Shapes]


def own_shapes(module: nn.Module) -> Shapes:
    """Return the shapes of a module's own parameters as they are there: those of FSDP1 are flat."""
    return {name: tuple(parameter.shape) for name, parameter in module._parameters.items() if parameter is not None}


def matrix_of_weight(
    module: nn.Module, name: str, shape: Sequence[int], full_name: str, shapes: Shapes | None = None
) -> Matrix:
    """Return how parameter ``name`` of ``module``, of the global ``shape``, is a matrix. Local.

    ``shapes``: of all parameters of ``module``, if not as they are there.

    Raises:
        ValueError: it has fewer than two dims; ``full_name`` names it.
        NotImplementedError: its input dims are not known.
    """
    if len(shape) < 2:
        raise ValueError(f"{full_name!r} of shape {tuple(shape)} is no matrix: a pattern needs rows and columns")
    if is_conv1d(module) and len(shape) == 2:
        return Matrix(shape[1], shape[0], transposed=True)
    if len(shape) == 3 and name in expert_weights(module, shapes):
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


def expert_weights(module: nn.Module, shapes: Shapes | None = None) -> tuple[str, ...]:
    """Return the names of the 3-D weights in which ``module`` holds all experts of a block, as transformers 5 does.

    In the order in which they are applied; none if it holds no experts. ``shapes`` as in :func:`matrix_of_weight`.
    """
    shapes = own_shapes(module) if shapes is None else shapes
    num_dims = {name.removesuffix("_orig"): len(shape) for name, shape in shapes.items() if len(shape) > 2}
    if any(num != 3 for num in num_dims.values()):
        return ()
    if num_dims.keys() == {"weight"} and expert_arguments(module) == _MATRIX_OF_EXPERTS:
        return ("weight",)
    return next((names for names in _EXPERT_WEIGHTS if num_dims.keys() == set(names)), ())


def expert_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return what the arguments of ``module``'s forward are called."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]
