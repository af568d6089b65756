"""The linear maps of a decoder block: whatever multiplies its input by a weight matrix.

Noun: a *linear map* is one matrix (out, in) and where it lives: the weight of an ``nn.Linear``, that of
transformers' ``Conv1D`` (GPT-2), which is kept as (in, out), or one expert's slice of the 3-D weights
into which transformers 5 puts all experts of a block. Read off the modules; no table of architectures.

Routers and gates, which choose the expert of a token, are not pruned: they are a few thousand weights, and an error
picks a wrong expert. Two rules, both by structure. A matrix with one output is a gate (``shared_expert_gate`` of
Qwen2-MoE), with nothing to compete with. And a module that stands beside the experts and holds one matrix
alone, with as many outputs as there are experts, is their router (``gate``, ``router``, ``gate.wg``). The
routers of most models in transformers 5 (Mixtral, Qwen2-MoE) keep a bare parameter, which is no linear map.
Adapters (``lora_*``) are not pruned either, what they adapt is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distprune.models.weights import EXPERT_WEIGHTS, is_adapter, is_conv1d, is_experts, matrix_of_weight

__all__ = ["LinearMap", "dense_weights", "expert_inputs", "linear_maps"]

_UNKNOWN = "not the weight of a linear layer that this library knows"


@dataclass(frozen=True)
class LinearMap:
    """One matrix of a block. ``name`` is the parameter's within the block, without ``.weight``, plus ``.e`` of an
    expert ``e``; ``transposed`` says that it is kept as (in, out)."""

    name: str
    module: nn.Module
    parameter_name: str
    num_out: int
    num_in: int
    transposed: bool = False
    expert: int | None = None

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


def linear_maps(block: nn.Module) -> dict[str, LinearMap]:
    """Return the linear maps of ``block`` by name, in the order of its modules, but routers, gates, adapters (above).

    Global shapes; no communication.
    """
    dense = _dense_maps(block)
    return {name: linear for name, linear in _matrices(block).items() if name not in dense}


def dense_weights(block: nn.Module) -> dict[str, str]:
    """Return why the other weights (two dims or more) of ``block`` stay dense, by the parameter's name. Local."""
    maps, dense = _matrices(block), _dense_maps(block)
    paths = {linear.parameter_path: dense.get(name, "") for name, linear in maps.items()}
    weights = {name: paths.get(name, _UNKNOWN) for name, parameter in block.named_parameters() if parameter.ndim > 1}
    return {name: reason for name, reason in weights.items() if reason}


def _dense_maps(block: nn.Module) -> dict[str, str]:
    maps, routers = _matrices(block), _routers(block)
    found = {name: "a router" for name, linear in maps.items() if linear.module in routers}
    gates = [name for name, linear in maps.items() if linear.num_out == 1 and linear.expert is None]
    adapters = [name for name in maps if is_adapter(name)]
    return found | dict.fromkeys(gates, "a gate: it has one output") | dict.fromkeys(adapters, "an adapter")


def _matrices(block: nn.Module) -> dict[str, LinearMap]:
    found: dict[str, LinearMap] = {}
    for module_name, module in block.named_modules():
        has_experts = is_experts(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name not in EXPERT_WEIGHTS if has_experts else not (name == "weight" and _is_linear(module)):
                continue  # biases
            path = f"{module_name}.{name}" if module_name else name
            matrix = matrix_of_weight(module, name, parameter.shape, path)
            for expert in range(matrix.num_matrices) if has_experts else (None,):
                key = module_name if expert is None else f"{path}.{expert}"
                found[key] = LinearMap(key, module, name, matrix.num_out, matrix.num_in, matrix.transposed, expert)
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _routers(block: nn.Module) -> set[nn.Module]:
    """Return the modules whose one matrix chooses among the experts beside them."""
    found: set[nn.Module] = set()
    for parent in block.modules():
        children = list(parent.children())
        counts = {num for child in children if (num := _num_experts(child))}
        for child in children if counts else ():
            held = list(_matrices(child).values())
            if len(held) == 1 and held[0].expert is None and held[0].num_out in counts:
                found.add(held[0].module)
    return found


def _num_experts(module: nn.Module) -> int:
    """Return how many experts ``module`` holds, in 3-D weights or as a list of modules; 0: it holds none."""
    if is_experts(module):
        return int(next(p.shape[0] for name, p in module.named_parameters(recurse=False) if name in EXPERT_WEIGHTS))
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return 0
    return len(module) if all(_matrices(expert) for expert in module) else 0


def expert_inputs(
    module: Any, hidden: torch.Tensor, expert_of_token: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by ``parameter name.expert`` which tokens are routed there, and the inputs of the expert's matrix.

    ``hidden`` is (tokens, in), ``expert_of_token`` (tokens, experts per token). Experts without tokens are left out.
    Experts run inside one fused kernel, of which no hook sees the inner activations. They are computed again here, with
    the module's own gate. Local; call it while the weights are whole.
    """
    first_name = next(name for name in EXPERT_WEIGHTS if name in module._parameters)
    first, bias = getattr(module, first_name), module._parameters.get(f"{first_name}_bias")
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for expert in range(first.shape[0]):
        tokens = (expert_of_token == expert).any(dim=1).nonzero().squeeze(1)
        if len(tokens) == 0:
            continue
        routed = hidden[tokens]
        weight = first[expert].t() if getattr(module, "is_transposed", False) else first[expert]
        inner = nn.functional.linear(routed, weight, None if bias is None else bias[expert])
        found[f"{first_name}.{expert}"] = tokens, routed
        gated = module._apply_gate(inner) if first_name == "gate_up_proj" else module.act_fn(inner)
        found[f"down_proj.{expert}"] = tokens, gated
    return found
