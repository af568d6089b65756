"""What each expert of a block is given. Experts run inside one fused kernel, of which no hook sees the inner inputs.

They are computed again here, from what the module of all experts is called with. Its kind is told by the names of its
arguments: tokens and the experts that each goes to (most models), tokens of every expert in turn, zero where one does
not go (Llama 4), tokens in the order of their experts (JetMoe), or tokens that go to all experts (Inkling).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distprune.models.matrices import expert_arguments, expert_weights, matrix_of_weight

_ROUTED = ("top_k_index", "router_indices")
_KNOWN = ({"hidden_states"}, {"inputs", "expert_size"}, {"hidden_states", "gammas"})


def check_experts(block: nn.Module, name: str) -> None:
    """Check that what the experts of ``block``, called ``name``, are given can be found. Local.

    Raises:
        NotImplementedError: their weights, or the arguments they are called with, are not known; it names the module.
    """
    for path, module in block.named_modules():
        parameters = module.named_parameters(recurse=False)
        weights = {key for key, parameter in parameters if parameter.ndim > 1 and not key.endswith("bias")}
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
        unknown = torch.empty(0, dtype=torch.int64, device="cpu")
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


@torch.enable_grad()
def expert_gradients(
    module: Any, hidden: torch.Tensor, expert_of_token: torch.Tensor, share_of_token: torch.Tensor, grad: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, inputs, gradient of the outputs) of each expert's matrices, named as :func:`expert_inputs` does.

    ``grad`` (tokens, out) is the gradient of what ``module`` puts out: of each token the sum over its experts, times
    their shares ``share_of_token`` (tokens, experts per token). Local; one expert at a time is in memory.
    """
    *first_names, last_name = expert_weights(module)
    for expert in range(getattr(module, last_name).shape[0]):
        is_here = (expert_of_token == expert).any(dim=1)
        if not bool(is_here.any()):
            continue
        routed = hidden[is_here]
        inner = [_apply(module, name, expert, routed).detach().requires_grad_() for name in first_names]
        gated = _activated(module, inner, first_names)
        share = (share_of_token * (expert_of_token == expert)).sum(dim=1)[is_here]
        of_last = grad[is_here] * share[:, None].to(grad.dtype)
        if getattr(module, "has_post_expert_norm", False):
            put_out = _apply(module, last_name, expert, gated).detach().requires_grad_()
            (of_last,) = torch.autograd.grad(module.post_expert_norm(put_out), put_out, of_last)
        of_first = torch.autograd.grad(gated, inner, of_last @ expert_matrix(module, last_name, expert))
        for name, gradient in zip(first_names, of_first, strict=True):
            yield f"{name}.{expert}", routed, gradient
        yield f"{last_name}.{expert}", gated.detach(), of_last


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
    bias = module._parameters.get(f"{name}_bias")
    return nn.functional.linear(x, expert_matrix(module, name, expert), None if bias is None else bias[expert])


def expert_matrix(module: Any, name: str, expert: int) -> torch.Tensor:
    """Return the matrix (out, in) of an expert."""
    weight: torch.Tensor = getattr(module, name)
    is_transposed = matrix_of_weight(module, name, weight.shape, name).transposed
    return weight[expert].t() if is_transposed else weight[expert]


def _activated(module: Any, inner: Sequence[torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    activated: torch.Tensor
    if names == ["up_proj"]:
        activated = module.act_fn(inner[0])
    elif names == ["gate_up_proj"] and (apply_gate := getattr(module, "_apply_gate", None)) is not None:
        activated = apply_gate(inner[0])
    else:
        gate, up = inner if len(inner) == 2 else inner[0].chunk(2, dim=-1)
        activated = module.act_fn(gate) * up
    return activated
