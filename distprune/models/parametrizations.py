"""Parameters from which a weight is computed: ``torch.nn.utils.parametrize``, and the older hooks. No communication."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

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
