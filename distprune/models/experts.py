"""What each expert of a block is given. Experts run inside one fused kernel, of which no hook sees the inner inputs.

They are computed again here, from what the module of all experts is called with. Its kind is told by the names of its
arguments: tokens and the experts that each goes to (most models), tokens of every expert in turn, zero where one does
not go (Llama 4), tokens in the order of their experts (JetMoe), or tokens that go to all experts (Inkling).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distprune.models.weights import expert_arguments, expert_weights, matrix_of_weight

__all__ = ["check_experts", "expert_inputs"]

_ROUTED = ("top_k_index", "router_indices")
_KNOWN = ({"hidden_states"}, {"inputs", "expert_size"}, {"hidden_states", "gammas"})


def check_experts(block: nn.Module, name: str) -> None:
    """Check that what the experts of ``block``, called ``name``, are given can be found. Local.

    Raises:
        NotImplementedError: their weights, or the arguments they are called with, are not known; it names the module.
    """
    for path, module in block.named_modules():
        weights = {key for key, parameter in module._parameters.items() if parameter is not None and parameter.ndim > 1}
        weights = {key for key in weights if not key.endswith("bias")}
        kind, arguments = type(module).__name__, expert_arguments(module)
        if expert_weights(module):
            if set(arguments) in _KNOWN or any(argument in arguments for argument in _ROUTED):
                continue
            why = f"are called with ({', '.join(arguments)})"
        elif "Expert" in kind and weights and not isinstance(module, nn.Linear):
            why = f"keep their weights in {', '.join(sorted(weights))}"
        else:
            continue
        raise NotImplementedError(
            f"the experts {f'{name}.{path}'!r}, a {kind}, {why}, which this library does not know: what each expert is "
            "given cannot be found; prune_model prunes by the weights alone"
        )


def expert_inputs(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by ``parameter name.expert``, when called so, the inputs of each expert's matrices, (tokens, in).

    In front of them, which tokens they are, int64; none where that is not known (JetMoe sorts them). Experts without
    tokens are left out. Local; call it while the weights are whole.
    """
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    if "expert_size" in given:
        parts = given["inputs"].split(given["expert_size"])
        unknown = torch.empty(0, dtype=torch.int64)
        return {f"weight.{expert}": (unknown, part) for expert, part in enumerate(parts) if len(part)}
    *first_names, last_name = expert_weights(module)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for expert in range(getattr(module, last_name).shape[0]):
        tokens, routed = _routed(module, given, expert)
        if len(routed) == 0:
            continue
        inner = [_apply(module, name, expert, routed) for name in first_names]
        found |= {f"{name}.{expert}": (tokens, routed) for name in first_names}
        activated = _activated(module, inner, first_names)
        if "gammas" in given:  # before the last matrix they scale what each expert puts out
            activated *= given["gammas"].reshape(len(routed), -1)[:, expert, None]
        found[f"{last_name}.{expert}"] = tokens, activated
    return found


def _routed(module: Any, given: Mapping[str, Any], expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens ``expert`` is given, and what, (tokens, in)."""
    hidden: torch.Tensor = given["hidden_states"]
    hidden = hidden.reshape(-1, hidden.shape[-1])
    expert_of_token = next((given[name] for name in _ROUTED if name in given), None)
    if expert_of_token is not None:
        tokens = (expert_of_token == expert).any(dim=-1).reshape(-1).nonzero().squeeze(1)
    elif "gammas" in given:
        return torch.arange(len(hidden), device=hidden.device), hidden
    else:
        hidden = hidden.view(module.gate_up_proj.shape[0], -1, hidden.shape[-1])[expert]
        tokens = hidden.any(dim=1).nonzero().squeeze(1)
    return tokens, hidden[tokens]


def _apply(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight, bias = getattr(module, name)[expert], module._parameters.get(f"{name}_bias")
    if matrix_of_weight(module, name, getattr(module, name).shape, name).transposed:
        weight = weight.t()
    return nn.functional.linear(x, weight, None if bias is None else bias[expert])


def _activated(module: Any, inner: Sequence[torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    if names == ["up_proj"]:
        return torch.as_tensor(module.act_fn(inner[0]))
    if names == ["gate_up_proj"] and (apply_gate := getattr(module, "_apply_gate", None)) is not None:
        return torch.as_tensor(apply_gate(inner[0]))
    gate, up = inner if len(inner) == 2 else inner[0].chunk(2, dim=-1)
    return torch.as_tensor(module.act_fn(gate) * up)
