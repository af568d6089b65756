"""The linear layers of a decoder block: whatever multiplies its input by a weight matrix.

Noun: a *linear layer* is one matrix (out, in) and where it lives: the weight of an ``nn.Linear``, that of
transformers' ``Conv1D`` (GPT-2), which is kept as (in, out), or one expert's slice of the 3-D weights
into which transformers 5 puts all experts of a block. Read off the modules; no table of architectures.

Routers and gates, which choose the expert of a token, are not pruned: they are a few thousand weights, and an error
picks a wrong expert. Two rules, both by structure. A matrix with one output is a gate (``shared_expert_gate`` of
Qwen2-MoE), with nothing to compete with. And a module that stands beside the experts and holds one matrix
alone, with as many outputs as there are experts, is their router (``gate``, ``router``, ``gate.wg``). The
routers of most models in transformers 5 (Mixtral, Qwen2-MoE) keep a bare parameter, which is no linear layer.
Adapters (``lora_*``) are not pruned either, what they adapt is.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from distprune.shards.geometry import Runs
from distprune.shards.matrix import Matrix

Key = tuple[nn.Module, str]  # a module, and the name of a parameter in it


def parametrized(model: nn.Module) -> dict[Key, nn.Module | WeightNorm | SpectralNorm]:
    """Return by what the weights are computed of which these are parameters: the module or hook. Local."""
    computed: dict[Key, nn.Module | WeightNorm | SpectralNorm] = {}
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            inside = [(layer, name) for layer in module.modules() for name in layer._parameters]
            computed.update(dict.fromkeys(inside, module))
            computed.update({(module, name): module for name in _ORIGINALS})  # FSDP1 may have taken them away
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                computed.update({(module, f"{hook.name}_{end}"): hook for end in ("g", "v", "orig")})
    return computed


_ORIGINALS = ("original", "original0", "original1")


def check_keeps_zeros(
    by: nn.Module | WeightNorm | SpectralNorm, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Check that a weight computed ``by`` this from the parameter ``name`` is zero wherever that is. Local.

    Raises:
        ValueError: it is zero elsewhere, or may become NaN.
    """
    if isinstance(by, SpectralNorm) or (isinstance(by, ParametrizationList) and _keeps_zeros(by, name, shape, dtype)):
        return
    kinds = ", ".join(type(step).__name__.strip("_") for step in by) if isinstance(by, ParametrizationList) else ""
    raise ValueError(
        f"{name!r} is under a parametrization ({kinds or type(by).__name__}), and the weight computed from it is not "
        "zero where it is, or NaN; take that away first (torch.nn.utils.parametrize.remove_parametrizations, or "
        "remove_weight_norm), or leave it out with exclude"
    )


@torch.no_grad()
def _keeps_zeros(by: ParametrizationList, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a sample of this shape has kept its zeros, and is finite, after what ``by`` does. Local."""
    if name.rpartition(".")[2] != "original":
        return False  # one of several, or of a parametrization's own
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").sub_(0.5)
    value = sample = draw.where(draw > -0.25, 0).to(dtype)
    try:
        for step in by:
            value = copy.deepcopy(step).cpu().eval()(value)
    except Exception:  # a user's, or sharded itself: unknown
        return False
    return value.shape == sample.shape and bool(value.isfinite().all()) and not bool(value[sample == 0].any())


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
    return ".lora_" in f".{name}"


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


_UNKNOWN = "not the weight of a linear layer that this library knows"
_GROUPED = "a linear layer in groups, each with inputs of its own"
UNUSUAL = (_UNKNOWN, _GROUPED)  # why weights stay dense that one may expect to be pruned
# Under these names wrappers hold what they wrap: FSDP1, activation checkpointing, torch.compile.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def expert_place(runs: Runs, expert: int) -> int | None:
    """Return where ``expert`` is among those that ``runs`` cover; ``None``: it is not. Local."""
    held = [number for start, stop in runs for number in range(start, stop)]
    return held.index(expert) if expert in held else None


@dataclass(frozen=True)
class LinearLayer:
    """One matrix of a block. ``name`` is the parameter's within the block, without ``.weight``, plus ``.e`` of an
    expert ``e``; ``transposed`` says that it is kept as (in, out), ``is_routed`` that only some tokens reach it."""

    name: str
    module: nn.Module
    parameter_name: str
    num_out: int
    num_in: int
    transposed: bool = False
    expert: int | None = None
    is_routed: bool = False

    @property
    def parameter_path(self) -> str:
        """The parameter's name within the block."""
        if self.expert is not None:
            return self.name.rpartition(".")[0]
        return f"{self.name}.{self.parameter_name}" if self.name else self.parameter_name

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now: under FSDP2 the shards, and the whole while the block runs."""
        parameter = getattr(self.module, self.parameter_name)
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"{self.name!r} is held by a {type(parameter).__name__}, not a parameter")
        return parameter

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that is added to what this matrix alone puts out, where there is one."""
        bias = None if self.expert is not None else getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None


def linear_layers(block: nn.Module) -> dict[str, LinearLayer]:
    """Return the linear layers of ``block`` by name, in the order of its modules, but routers, gates, adapters (above).

    Global shapes; no communication.
    """
    dense = _dense_layers(block)
    routed = find_routers(block)[1]
    return {
        name: dataclasses.replace(linear, is_routed=linear.expert is not None or linear.module in routed)
        for name, linear in _matrices(block).items()
        if name not in dense
    }


def dense_weights(block: nn.Module) -> dict[str, str]:
    """Return why the other weights (two dims or more) of ``block`` stay dense, by the parameter's name. Local."""
    dense, routers, computed = _dense_layers(block), find_routers(block)[0], parametrized(block)
    found = {linear.parameter_path: dense.get(name, "") for name, linear in _matrices(block).items()}
    for module_name, module in block.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}" if module_name else own_name
            if parameter.ndim < 2 or name in found:
                continue
            found[name] = "a router" if module in routers else _reason(module, name, parameter)
            if (module, own_name) in computed and module not in routers:
                found[name] = "under a parametrization"
    return {name: reason for name, reason in found.items() if reason}


def _reason(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Return why a parameter of ``module`` that is the weight of no linear layer stays dense."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "a convolution"
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if isinstance(module, nn.Linear) and not _is_linear(module):
        return _GROUPED
    if name.endswith("bias"):
        return "a bias"
    return "a vector" if sum(size > 1 for size in parameter.shape) < 2 else _UNKNOWN


def _dense_layers(block: nn.Module) -> dict[str, str]:
    routers, gates, found = find_routers(block)[0], find_gates(block), dict[str, str]()
    for name, linear in _matrices(block).items():
        if linear.module in routers:
            found[name] = "a router"
        if linear.module in gates:
            found[name] = "a gate: it has one output"
        if is_adapter(name):
            found[name] = "an adapter"
    return found


def _matrices(block: nn.Module, shapes_of: ShapesOf = own_shapes) -> dict[str, LinearLayer]:
    found: dict[str, LinearLayer] = {}
    for module_name, module in block.named_modules():
        shapes = shapes_of(module)
        experts = expert_weights(module, shapes)
        for name, shape in shapes.items():
            if name not in experts if experts else not (name == "weight" and _is_linear(module)):
                continue  # biases
            path = f"{module_name}.{name}" if module_name else name
            matrix = matrix_of_weight(module, name, shape, path, shapes)
            for expert in range(matrix.num_matrices) if experts else (None,):
                key = module_name if expert is None else f"{path}.{expert}"
                found[key] = LinearLayer(key, module, name, matrix.num_out, matrix.num_in, matrix.transposed, expert)
    return found


def _is_linear(module: nn.Module) -> bool:
    return (isinstance(module, nn.Linear) and getattr(module, "n_groups", 1) == 1) or is_conv1d(module)


def find_gates(block: nn.Module, shapes_of: ShapesOf = own_shapes) -> set[nn.Module]:
    """Return the modules whose matrix has one output."""
    slim = [module for module in block.modules() if 1 in shapes_of(module).get("weight", ())]
    layers = [layer for module in slim for layer in _matrices(module, shapes_of).values()]
    return {layer.module for layer in layers if layer.num_out == 1 and layer.expert is None}


def find_routers(
    block: nn.Module, shapes_of: ShapesOf = own_shapes, *, only_named: bool = False
) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the modules whose one matrix, or bare parameter, chooses among experts, and what those are made of.

    ``only_named``: a list of modules holds experts if it is called so.
    """
    found: set[nn.Module] = set()
    experts: set[nn.Module] = set()
    for parent in block.modules():
        children = {name: unwrapped(child) for name, child in parent.named_children()}
        lists = {child for name, child in children.items() if not only_named or "expert" in name}
        nums = {
            child: num
            for child in children.values()
            if (child in lists or not isinstance(child, nn.ModuleList)) and (num := _num_experts(child, shapes_of))
        }
        chosen: set[int] = set()  # how many a router of this parent chooses among
        for child in children.values() if nums else ():
            held = list(_matrices(child, shapes_of).values())
            matrices = [(layer.module, layer.num_out) for layer in held if layer.expert is None]
            if not held:
                matrices = [(child, shape[0]) for shape in shapes_of(child).values() if len(shape) == 2]
            if max(len(held), len(matrices)) == 1 and matrices and matrices[0][1] in nums.values():
                found.add(matrices[0][0])
                chosen.add(matrices[0][1])
        experts.update(inner for child, num in nums.items() if num in chosen for inner in child.modules())
    return found, experts


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what FSDP1, activation checkpointing and ``torch.compile`` have wrapped."""
    while wrapped := [inner for name, inner in module._modules.items() if name in WRAPPERS and inner is not None]:
        module = wrapped[0]
    return module


def _num_experts(module: nn.Module, shapes_of: ShapesOf) -> int:
    """Return how many experts ``module`` holds, in 3-D weights or as a list of modules; 0: it holds none."""
    shapes = shapes_of(module)
    if any(len(shape) > 2 for shape in shapes.values()) and (names := expert_weights(module, shapes)):
        return shapes[names[0]][0]
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return 0
    return len(module) if all(_matrices(expert, shapes_of) for expert in module) else 0
