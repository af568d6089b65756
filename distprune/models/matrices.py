"""Which parameters of a module are matrices that it multiplies by, and which modules choose among experts. Local.

Read off the modules: an ``nn.Linear``, transformers' ``Conv1D`` (GPT-2), whose weight is kept as (in, out), and 3-D
weights into which transformers 5 puts all experts of a block. No table of architectures.

Three rules say which matrices choose the expert of a token. Two are by structure: a matrix with one output is a gate
(``shared_expert_gate`` of Qwen2-MoE), with nothing to compete with. And a module that stands beside the experts and
holds one matrix alone, with as many outputs as there are experts, is their router (``gate``, ``router``, ``gate.wg``).
The routers of most models in transformers 5 (Mixtral, Qwen2-MoE) keep a bare parameter. The third is by name: what is
called ``router`` or ``gate`` beside experts may be an MLP (Zaya), or have outputs for other experts, too (Inkling).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import Matrix

# What transformers 5 calls the weights of its experts modules, in the order in which they are applied.
_EXPERT_WEIGHTS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"))
_MATRIX_OF_EXPERTS = ("inputs", "expert_size")  # how JetMoe calls a module of one matrix an expert
_ROUTERS = frozenset({"router", "gate"})
# Under these names wrappers hold what they wrap: FSDP1, activation checkpointing, torch.compile.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

# A parameter, or FSDP1's part of one: compared by identity, so that tied weights are one.
Held = torch.Tensor | LocalShard
Attributes = Mapping[str, Held]  # of one module
ByModule = Mapping[nn.Module, Attributes]


def own_parameters(module: nn.Module) -> Attributes:
    """Return the parameters of ``module`` itself as they are there: those of FSDP1 are flat."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def matrix_of_weight(
    module: nn.Module, name: str, shape: Sequence[int], full_name: str, attributes: Attributes | None = None
) -> Matrix:
    """Return how parameter ``name`` of ``module``, of the global ``shape``, is a matrix. Local.

    ``attributes``: all parameters of ``module``, if not as they are there.

    Raises:
        ValueError: it has fewer than two dims; ``full_name`` names it.
        NotImplementedError: its input dims are not known.
    """
    if len(shape) < 2:
        raise ValueError(f"{full_name!r} of shape {tuple(shape)} is no matrix: a pattern needs rows and columns")
    if is_conv1d(module) and len(shape) == 2:
        return Matrix(shape[1], shape[0], transposed=True)
    if len(shape) == 3 and name in expert_weights(module, attributes):
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


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' ``Conv1D`` (GPT-2), whose weight is kept as (in, out)."""
    transformers = sys.modules.get("transformers.pytorch_utils")  # a Conv1D exists only if that was imported
    return transformers is not None and isinstance(module, transformers.Conv1D)


def expert_weights(module: nn.Module, attributes: Attributes | None = None) -> tuple[str, ...]:
    """Return the names of the 3-D weights in which ``module`` holds all experts of a block, as transformers 5 does.

    In the order in which they are applied; none if it holds no experts. ``attributes`` as in :func:`matrix_of_weight`.
    """
    attributes = own_parameters(module) if attributes is None else attributes
    names = {name.removesuffix("_orig") for name, held in attributes.items() if len(held.shape) == 3}
    if names == {"weight"} and expert_arguments(module) == _MATRIX_OF_EXPERTS:
        return ("weight",)
    return next((known for known in _EXPERT_WEIGHTS if names == {*known}), ())


def expert_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return what the arguments of ``module``'s forward are called."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def matrices_of(module: nn.Module, attributes: Attributes) -> dict[str, Matrix]:
    """Return what ``module`` itself multiplies by, by the parameter's name: one weight, or those of all experts."""
    names = ("weight",) if is_linear(module) else expert_weights(module, attributes)
    return {
        name: matrix_of_weight(module, name, held.shape, name, attributes)
        for name, held in attributes.items()
        if name in names
    }


def is_linear(module: nn.Module) -> bool:
    """Return whether all inputs of ``module`` are multiplied by its one weight."""
    return (isinstance(module, nn.Linear) and getattr(module, "n_groups", 1) == 1) or is_conv1d(module)


def is_gate(module: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether ``module``, with a weight of ``shape``, is a linear layer with one output. Local."""
    return is_linear(module) and shape[is_conv1d(module)] == 1


def without_wrappers(name: str) -> str:
    """Return the path ``name`` as it is in the bare model."""
    return ".".join([part for part in name.split(".") if part not in _WRAPPERS])


def find_routers(
    modules: Collection[nn.Module], by_module: ByModule | None = None, *, only_named: bool = False
) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return which of ``modules`` have one matrix, or bare parameter, that chooses among experts, and what those are
    made of.

    ``by_module``: the parameters of each, if not as they are there. ``only_named``: a list of modules holds experts if
    it is called so.
    """
    if by_module is None:
        by_module = {module: own_parameters(module) for module in modules}
    routers: set[nn.Module] = set()
    experts: set[nn.Module] = set()
    for parent in modules:
        if len(parent._modules) < 2:
            continue
        siblings = {name: _bare(child) for name, child in parent.named_children()}
        for name, holder in siblings.items():
            if only_named and isinstance(holder, nn.ModuleList) and "expert" not in name:
                continue
            num_experts = _num_experts(holder, by_module)
            for sibling in siblings.values() if num_experts > 1 else ():
                router, num_out = _only_matrix(sibling, by_module)
                if num_out == num_experts:
                    routers.add(router)
                    experts.update(holder.modules())
    return routers, experts


def named_routers(modules: Iterable[nn.Module], by_module: ByModule) -> set[nn.Module]:
    """Return which of ``modules`` are called router or gate beside experts, and all inside them. Local."""
    routers: set[nn.Module] = set()
    for parent in modules:
        names = _ROUTERS & parent._modules.keys()
        if names and any(_holds_experts(name, child, by_module) for name, child in parent.named_children()):
            routers.update(part for name in names for part in parent.get_submodule(name).modules())
    return routers


def _holds_experts(name: str, module: nn.Module, by_module: ByModule) -> bool:
    """Return whether ``module`` is called experts, or has one in its name and holds several: no ``expert_encoder``."""
    return name.endswith("experts") or ("expert" in name and _num_experts(_bare(module), by_module) > 1)


def _bare(module: nn.Module) -> nn.Module:
    """Return what ``module`` wraps, or itself."""
    wrapper = next(iter(_WRAPPERS & module._modules.keys()), None)
    return module if wrapper is None else _bare(module.get_submodule(wrapper))


def _num_experts(module: nn.Module, by_module: ByModule) -> int:
    """Return how many experts ``module`` holds, in 3-D weights or as a list of modules; below 2: it holds none."""
    if isinstance(module, nn.ModuleList):
        return len(module) if all(_matrices_in(entry, by_module) for entry in module) else 0
    attributes = by_module.get(module, {})
    return max((attributes[name].shape[0] for name in expert_weights(module, attributes)), default=0)


def _only_matrix(module: nn.Module, by_module: ByModule) -> tuple[nn.Module, int]:
    """Return where the only matrix in ``module`` is, and its number of outputs; 0: there is none, or several."""
    matrices = _matrices_in(module, by_module)
    if not matrices:  # a bare parameter
        shapes = [held.shape for held in by_module.get(module, {}).values()]
        matrices = [(module, Matrix.of_shape(shape)) for shape in shapes if len(shape) == 2]
    if len(matrices) != 1 or matrices[0][1].num_matrices > 1:
        return module, 0
    return matrices[0][0], matrices[0][1].num_out


def _matrices_in(root: nn.Module, by_module: ByModule) -> list[tuple[nn.Module, Matrix]]:
    """Return the matrices of all modules in ``root``, each with its module."""
    return [(part, matrix) for part in root.modules() for matrix in matrices_of(part, by_module.get(part, {})).values()]
