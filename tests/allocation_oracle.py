"""Shares by squared gradients, in one process and written plainly: by autograd, and a bisection for the threshold."""

from __future__ import annotations

import bisect
import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distprune.models.decoder_blocks import decoder_blocks
from tests.oneshot_oracle import is_experts, linears

__all__ = ["allocate", "sensitivities"]


def sensitivities(model: Any, samples: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return of each linear layer the sums over tokens of x_j^2 and of (dL/dy_i)^2, float64; 0 without a token."""
    sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with ExitStack() as stack:
        for block_name, block in decoder_blocks(model):
            for name, linear in linears(block).items():
                num_out, num_in = linear.weight.shape
                sums[f"{block_name}.{name}"] = (torch.zeros(num_in).double(), torch.zeros(num_out).double())
            for name, module in block.named_modules():
                full_name = f"{block_name}.{name}"
                if full_name in sums:
                    stack.callback(module.register_forward_hook(_on_output(sums[full_name])).remove)
                elif is_experts(module):
                    module.__dict__["forward"] = _plain_experts(module, full_name, sums)
                    stack.callback(module.__dict__.pop, "forward")
        for tokens in samples:
            logits = model(input_ids=tokens[None], use_cache=False).logits
            torch.autograd.backward(F.cross_entropy(logits[0, :-1], tokens[1:], reduction="sum"))
    for parameter in model.parameters():
        parameter.grad = None
    return sums


def _take(sums: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, y: Any) -> None:
    def add(total: torch.Tensor, values: torch.Tensor) -> None:
        total += values.detach().flatten(0, -2).double().square().sum(0)

    add(sums[0], x)
    y.register_hook(lambda gradient: add(sums[1], gradient))


def _on_output(sums: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return lambda _, args, output: _take(sums, args[0], output)


def _plain_experts(module: Any, name: str, sums: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return a forward of experts in which every matrix is a step by itself."""

    def forward(hidden: torch.Tensor, expert_of_token: torch.Tensor, share_of_token: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for e in range(module.num_experts):
            for k in range(expert_of_token.shape[1]):
                here = expert_of_token[:, k] == e
                if not here.any():
                    continue
                x = hidden[here]
                inner = F.linear(x, module.gate_up_proj[e])
                _take(sums[f"{name}.gate_up_proj.{e}"], x, inner)
                gate, up = inner.chunk(2, dim=-1)
                gated = module.act_fn(gate) * up
                output = F.linear(gated, module.down_proj[e])
                _take(sums[f"{name}.down_proj.{e}"], gated, output)
                total = total.index_add(0, here.nonzero()[:, 0], output * share_of_token[here, k, None])
        return total

    return forward


def allocate(model: nn.Module, samples: torch.Tensor, sparsity: float, difference: float = 0.15) -> dict[str, float]:
    """Return the share of each linear layer below one threshold over all r_i W_ij^2 H_jj, no further than
    ``difference`` from ``sparsity``: before shares are rounded to whole weights of a row. A layer that no token reached
    has no other."""
    found = sensitivities(model, samples)
    weights = {f"{at}.{name}": of.weight for at, block in decoder_blocks(model) for name, of in linears(block).items()}
    budget = round(sparsity * sum(weight.numel() for weight in weights.values()))
    shares: dict[str, float] = {}
    scores: dict[str, list[float]] = {}
    for name, (inputs, outputs) in found.items():
        if not inputs.any():
            num_in = len(inputs)
            shares[name] = round(sparsity * num_in) / num_in
            budget -= round(shares[name] * weights[name].numel())
        else:
            scores[name] = (outputs[:, None] * weights[name].double() ** 2 * inputs).flatten().sort().values.tolist()

    def counts(threshold: float) -> dict[str, int]:
        within = {}
        for name, of_layer in scores.items():
            num_out, num_in = weights[name].shape
            least, most = (round((sparsity + sign * difference) * num_in, 6) for sign in (-1, 1))
            low, high = math.ceil(least) * num_out, math.floor(most) * num_out
            within[name] = min(max(bisect.bisect_right(of_layer, threshold), low), high)
        return within

    every = sorted(score for of_layer in scores.values() for score in of_layer)
    first = bisect.bisect_left(every, budget, key=lambda threshold: sum(counts(threshold).values()))
    return shares | {name: num / len(scores[name]) for name, num in counts(every[first]).items()}
