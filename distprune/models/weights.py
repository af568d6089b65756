"""Which parameters of a model are weights: what is pruned by default.

A *weight* has two dims or more, and its module multiplies inputs by it. So these are none: embeddings, the gains of
norms, vectors (but of a linear layer or a convolution), adapters (those of PEFT, and ``lora_*``; what they adapt is
one), routers among experts and, in a decoder block, gates with one output (see ``matrices``): they are a few thousand
weights, and an error picks a wrong expert. Nor is what a parametrization computes a weight from, the scale of a
quantized one, or what a module keeps beside its layers, such as Mamba's ``A_log`` and tables of relative positions. The
last are told by where they stand: a parameter of a module that holds layers is a weight only if its name says so
(``in_proj_weight``), one of a module without any is, unless its name says that it is a bias, a table or an embedding.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from distprune.models.matrices import ByModule, Held, find_routers, is_conv1d, is_gate, named_routers, without_wrappers
from distprune.shards.layouts import find_flat_parts
from distprune.shards.local_shard import LocalShard

Key = tuple[nn.Module, str]  # a module, and the name of a parameter in it
_TABLES = re.compile(r"bias|biases|table|tables")
_SCALES = re.compile(r"scales?|zeros?")  # of quantized weights: weight_scale_inv, weight_zero_point
_WEIGHTS = re.compile(r"weights?|kernels?|proj|projections?")
_LETTERS = re.compile(r"[wv][a-z]?")
_WHOLE_NAMES = ("q", "k", "o", "r")  # of XLNet's attention; as a word, they are Mamba's and RWKV's, too
# A norm by how its name ends: LayerNorm2d, q_norm, norm1. What normalizes and multiplies is none (TransformerEngine's
# LayerNormLinear and layernorm_qkv), nor what is a linear layer first (Tacotron's LinearNorm).
_NORMS = re.compile(
    r"(?<!linear)(?<!linear_)(?<!dense)(?<!conv)(?<!pre)(?<!post)norm(gated)?_?\d*[dp]?$", re.IGNORECASE
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, *_CONVOLUTIONS)  # a vector of theirs is a weight
_EMBEDDINGS = re.compile(r"embed|embeds|embeddings?|pos|positions?|tokens?")
_ORIGINALS = ("original", "original0", "original1")


def list_parameters(model: nn.Module) -> tuple[dict[Held, dict[str, Key]], dict[nn.Module, dict[str, Held]]]:
    """Return where each parameter of ``model`` is, by name, and those of each module itself, by attribute. Local.

    A tied one has several names. Attributes are called as before FSDP1 or a mask, and what wraps a module is left out
    of names. Flat ones of FSDP1 are resharded first.

    Raises:
        ValueError: one has no shape yet (lazy).
    """
    places, by_module = dict[Held, dict[str, Key]](), dict[nn.Module, dict[str, Held]]()
    flat_parts = find_flat_parts(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in by_module:
            here: dict[str, Held] = {}
            for name, parameter in module._parameters.items():
                if parameter is not None and name != "_flat_param":
                    bare = name.removesuffix("_orig")
                    here[bare if f"{bare}_mask" in module._buffers else name] = parameter
            here.update(flat_parts.get(id(module), {}))
            by_module[module] = here
        for attribute, held in by_module[module].items():
            name = without_wrappers(f"{path}.{attribute}" if path else attribute)
            if not isinstance(held, LocalShard) and is_lazy(held):
                raise ValueError(f"{name!r} of a {type(module).__name__} has no shape yet: run a forward first")
            places.setdefault(held, {}).setdefault(name, (module, attribute))
    return places, by_module


def why_no_weights(
    roots: Sequence[nn.Module], by_module: ByModule, *, is_block: bool = False, is_named: bool = False
) -> dict[Held, str]:
    """Return why parameters of two dims or more inside of ``roots`` are no weights; empty of those that are. Local.

    ``by_module``: the parameters of each module. ``is_block``: roots are decoder blocks, in which any list of layers
    may be experts, and one output makes a gate.
    ``is_named``: a user names them, who means adapters and what is under parametrizations, too.
    """
    reasons: dict[Held, str] = {}
    for root in roots:
        modules = {module: path for path, module in root.named_modules()}
        routers = find_routers(modules, by_module, only_named=not is_block)[0] | named_routers(modules, by_module)
        computed = {} if is_named else parametrized(modules)
        adapters = set() if is_named else adapter_modules(root)
        for module, path in modules.items():
            for name, held in by_module.get(module, {}).items():
                if len(held.shape) < 2:
                    continue
                if (module, name) in computed:
                    reason = "under a parametrization"
                elif module in adapters or (not is_named and ".lora_" in f".{path}.{name}"):
                    reason = "an adapter"
                elif module in routers:
                    reason = "a router"
                elif is_block and is_gate(module, held.shape):
                    reason = "a gate: it has one output"
                else:
                    reason = _reason(module, name, held.shape, by_module)
                reasons[held] = reason and reasons.get(held, reason)  # a tied one is a weight if it is one anywhere
    return reasons


def _reason(module: nn.Module, name: str, shape: Sequence[int], by_module: ByModule) -> str:
    """Return why a parameter is no weight, by its module and its name there."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding"
    is_layer = is_conv1d(module) or isinstance(module, _LAYERS)
    if not is_layer and any(is_norm(kind.__name__) for kind in type(module).__mro__):
        return "the gain of a norm"
    words = _words(name)
    if any(map(_TABLES.fullmatch, words)):
        return "a bias or a table"
    if any(map(_SCALES.fullmatch, words)):
        return "a scale"
    if not is_layer and sum(size > 1 for size in shape) < 2:
        return "a vector"
    if any(map(_WEIGHTS.fullmatch, words)):
        return ""
    if any(map(_EMBEDDINGS.fullmatch, words)):
        return "an embedding"
    if any(map(_LETTERS.fullmatch, words)) or name in _WHOLE_NAMES:
        return ""
    holds_layers = any(by_module.get(layer) for layer in module.modules() if layer is not module)
    return "kept beside layers, no weight by its name" if holds_layers else ""


def is_norm(name: str) -> bool:
    """Return whether a class or module of this name is a norm, even with gains of several dims. Local."""
    return _NORMS.search(name) is not None


def _words(name: str) -> list[str]:
    return re.split(r"[_\d]+", name.lower())


def check_unscaled(name: str, module: nn.Module, attribute: str) -> None:
    """Check that a parameter of ``module``, called ``name``, holds its values as they are. Local.

    Raises:
        TypeError: it is of 8-bit floats, and a scale stands beside it, or these have no zero.
    """
    parameter = module._parameters.get(attribute)
    if parameter is None or not parameter.is_floating_point() or parameter.itemsize > 1:
        return
    beside = (*module._parameters, *module._buffers)
    scale = next((other for other in beside if any(map(_SCALES.fullmatch, _words(other)))), None)
    if scale is not None or parameter.dtype is torch.float8_e8m0fnu:
        why = "have no zero" if scale is None else f"are scaled by {scale!r} beside it"
        raise TypeError(
            f"{name!r} holds {parameter.dtype} values, which {why}: prune a model before it is quantized, or leave it "
            "out with exclude"
        )


def adapter_modules(root: nn.Module) -> set[nn.Module]:
    """Return the modules of PEFT's adapters in ``root``: what its layers hold beside what they adapt. Local."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # such a layer exists only if that was imported
    layers = [] if peft is None else [module for module in root.modules() if isinstance(module, peft.BaseTunerLayer)]
    return {part for layer in layers for part in {*layer.modules()}.difference(layer.get_base_layer().modules())}


def parametrized(modules: Iterable[nn.Module]) -> dict[Key, nn.Module | WeightNorm | SpectralNorm]:
    """Return by what the weights are computed of which these are parameters: the module or hook. Local."""
    computed: dict[Key, nn.Module | WeightNorm | SpectralNorm] = {}
    for module in modules:
        if isinstance(module, ParametrizationList):
            inside = [(layer, name) for layer in module.modules() for name in layer._parameters]
            computed.update(dict.fromkeys(inside, module))
            computed.update({(module, name): module for name in _ORIGINALS})  # FSDP1 may have taken them away
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                computed.update({(module, f"{hook.name}_{end}"): hook for end in ("g", "v", "orig")})
    return computed


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
