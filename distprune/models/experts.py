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

    In front of them, which tokens they are, int64, ascending; none where that is not known (JetMoe sorts them). Experts
    without tokens are left out. Local; call it while the weights are whole. Two waits for a device, for all experts.
    """
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    if "expert_size" in given:
        parts = given["inputs"].split(given["expert_size"])
        unknown = torch.empty(0, dtype=torch.int64, device="cpu")
        return {f"weight.{expert}": (unknown, part) for expert, part in enumerate(parts) if len(part)}
    *first_names, last_name = expert_weights(module)
    inputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hidden = given["hidden_states"].reshape(-1, given["hidden_states"].shape[-1])
    for expert, rows, tokens in _routed(given, hidden, getattr(module, last_name).shape[0]):
        routed = hidden[rows]
        inner = [_apply(module, name, expert, routed) for name in first_names]
        inputs |= {f"{name}.{expert}": (tokens, routed) for name in first_names}
        activated = _activated(module, inner, first_names)
        if "gammas" in given:  # before the last matrix they scale what each expert puts out
            activated *= given["gammas"].reshape(len(routed), -1)[:, expert, None]
        inputs[f"{last_name}.{expert}"] = tokens, activated
    return inputs


@torch.enable_grad()
def expert_gradients(
    module: Any, hidden: torch.Tensor, expert_of_token: torch.Tensor, share_of_token: torch.Tensor, grad: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, inputs, gradient of the outputs) of each expert's matrices, named as :func:`expert_inputs` does.

    ``grad`` (tokens, out) is the gradient of what ``module`` puts out: of each token the sum over its experts, times
    their shares ``share_of_token`` (tokens, experts per token). Local; one expert at a time is in memory.
    """
    *first_names, last_name = expert_weights(module)
    goes = _goes(expert_of_token, getattr(module, last_name).shape[0])
    for expert, tokens in _tokens_of_experts(goes):
        routed = hidden[tokens]
        inner = [_apply(module, name, expert, routed).detach().requires_grad_() for name in first_names]
        gated = _activated(module, inner, first_names)
        share = (share_of_token * (expert_of_token == expert)).sum(dim=1)[tokens]
        last_gradient = grad[tokens] * share[:, None].to(grad.dtype)
        if getattr(module, "has_post_expert_norm", False):
            put_out = _apply(module, last_name, expert, gated).detach().requires_grad_()
            (last_gradient,) = torch.autograd.grad(module.post_expert_norm(put_out), put_out, last_gradient)
        first_gradients = torch.autograd.grad(gated, inner, last_gradient @ expert_matrix(module, last_name, expert))
        for name, gradient in zip(first_names, first_gradients, strict=True):
            yield f"{name}.{expert}", routed, gradient
        yield f"{last_name}.{expert}", gated.detach(), last_gradient


def _routed(
    given: Mapping[str, Any], hidden: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each expert that is given tokens, which rows of ``hidden`` (rows, in) these are, and which tokens."""
    expert_of_token = next((given[name] for name in _ROUTED if name in given), None)
    num_rows = len(hidden)
    if expert_of_token is not None:
        goes = _goes(expert_of_token.reshape(num_rows, -1), num_experts)
    elif "gammas" in given:
        goes = torch.ones((num_experts, num_rows), dtype=torch.bool, device=hidden.device)
    else:  # those of each expert in turn
        goes, num_rows = hidden.any(dim=1).view(num_experts, -1), len(hidden) // num_experts
    for expert, tokens in _tokens_of_experts(goes):
        yield expert, tokens if num_rows == len(hidden) else tokens + expert * num_rows, tokens


def _goes(expert_of_token: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return whether each expert is given each token, (experts, tokens) bool."""
    experts = torch.arange(num_experts, device=expert_of_token.device)
    return (expert_of_token == experts[:, None, None]).any(dim=2)


def _tokens_of_experts(goes: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each expert that is given tokens, and which, ascending. Two waits for a device."""
    tokens, counts = goes.nonzero()[:, 1], goes.sum(dim=1).tolist()
    for expert, some in enumerate(torch.split(tokens, counts)):
        if len(some):
            yield expert, some


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
