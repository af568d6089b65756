"""One-shot pruning in one process: a decoder's blocks in turn, by the methods of :mod:`tests.solver_oracle`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from distprune.models.decoder_blocks import decoder_blocks
from tests.solver_oracle import Pattern, admm, sparsegpt, wanda_mask

__all__ = ["Given", "Linear2d", "first_inputs", "linears", "listening", "move", "prune_model", "run_block", "want"]


@dataclass
class Linear2d:
    """A linear layer of a block: its weight as (out, in), a view that writes through, and sums over what it was given.

    ``wanted`` (out, in) is the sum over tokens of (what it should put out - what it does) x^T.
    """

    weight: torch.Tensor
    num_tokens: int = 0
    square_sum: torch.Tensor | None = None  # (in,) float64
    hessian: torch.Tensor | None = None  # (in, in) float64
    wanted: torch.Tensor | None = None  # (out, in) float64

    def add(self, x: torch.Tensor, with_hessian: bool) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).double()
        if self.square_sum is None or self.hessian is None:
            num_in = x.shape[1]
            self.square_sum, self.hessian = x.new_zeros(num_in), x.new_zeros(num_in, num_in)
        self.num_tokens += len(x)
        self.square_sum += (x**2).sum(0)
        if with_hessian:
            self.hessian += x.T @ x

    def want(self, x: torch.Tensor, more: torch.Tensor) -> None:
        if self.wanted is None:
            self.wanted = torch.zeros(self.weight.shape, dtype=torch.float64)
        self.wanted += more.double().T @ x.double()


def linears(block: nn.Module) -> dict[str, Linear2d]:
    """Return the linear layers of a block by name: Linear, GPT-2's Conv1D (in, out), the experts' 3-D weights.

    A Linear with one output is a gate, and stays as it is.
    """
    from transformers.pytorch_utils import Conv1D

    found: dict[str, Linear2d] = {}
    for name, module in block.named_modules():
        weights: dict[str, torch.Tensor] = {}
        if isinstance(module, nn.Linear):
            if module.out_features > 1:
                weights[name] = module.weight
        elif isinstance(module, Conv1D):
            weights[name] = module.weight.T
        elif is_experts(module):
            for kind in ("gate_up_proj", "down_proj"):
                weights.update({f"{name}.{kind}.{e}": w for e, w in enumerate(getattr(module, kind))})
        found.update({key: Linear2d(weight.detach()) for key, weight in weights.items()})
    return found


def is_experts(module: nn.Module) -> bool:
    weight = getattr(module, "gate_up_proj", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 3


@dataclass
class Given:
    """What the layers of a block are given in one sample, in the order that it runs them: by name, and of which tokens.

    ``tensors`` are the inputs as they came: layers that are given the same one share it.
    """

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # (tokens, in)
    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of the block

    def take(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        self.tensors[name] = x
        self.inputs[name] = x.detach().reshape(-1, x.shape[-1])
        self.tokens[name] = torch.arange(len(self.inputs[name])) if tokens is None else tokens


@contextmanager
def listening(block: nn.Module, names: Collection[str]) -> Iterator[Given]:
    """Take down what the layers ``names`` of ``block`` are given in one run."""
    given = Given()

    def on_linear(name: str) -> Any:
        return lambda _, args: given.take(name, args[0])

    def on_output(name: str) -> Any:
        return lambda _, __, output: given.outputs.update({name: output.detach()})

    def on_experts(name: str) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            hidden, expert_of_token = args[0], args[1]  # (tokens, in), (tokens, experts per token)
            for e in range(module.num_experts):
                routed = (expert_of_token == e).any(1).nonzero()[:, 0]
                if len(routed):
                    gate, up = F.linear(hidden[routed], module.gate_up_proj[e]).chunk(2, dim=-1)
                    given.take(f"{name}.gate_up_proj.{e}", hidden[routed], routed)
                    given.take(f"{name}.down_proj.{e}", module.act_fn(gate) * up, routed)

        return hook

    with ExitStack() as stack:
        for name, module in block.named_modules():
            if name in names:
                stack.callback(module.register_forward_pre_hook(on_linear(name)).remove)
                stack.callback(module.register_forward_hook(on_output(name)).remove)
            elif is_experts(module):
                stack.callback(module.register_forward_pre_hook(on_experts(name)).remove)
        yield given


def run_block(block: nn.Module, names: Collection[str], x: torch.Tensor, call: Any) -> Given:
    args, kwargs = call
    with listening(block, names) as given:
        output = block(x, *args[1:], **kwargs)
    given.output = output[0] if isinstance(output, tuple) else output
    return given


class _Caught(Exception):
    pass


def first_inputs(model: nn.Module, block: nn.Module, tokens: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _Caught

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(input_ids=tokens, use_cache=False)
    except _Caught:
        pass
    finally:
        handle.remove()
    return caught[0]


@torch.no_grad()
def prune_model(
    model: nn.Module,
    samples: torch.Tensor,
    method: Literal["wanda", "sparsegpt", "admm"],
    pattern: Pattern,
    *,
    sequential: Literal["block", "layer"] = "block",
    targets: Literal["own", "dense"] = "own",
    share: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Prune every linear layer of the decoder blocks, block after block, and return what stays, by name.

    ``samples`` is (num_samples, length); each is run by itself. A layer that saw no token (an expert that
    nothing was routed to) is pruned as if its inputs were white: norms of 1, the identity as Hessian.
    ``dtype`` is that of SparseGPT's and ADMM's arithmetic. With ``"layer"`` the layers of a block go in the order in
    which it runs them; with ``"dense"`` their weights move, before they are pruned, the ``share`` of the way to what
    the model put out before pruning.
    """
    masks: dict[str, torch.Tensor] = {}
    blocks = decoder_blocks(model)
    calls = [first_inputs(model, blocks[0][1], tokens[None]) for tokens in samples]
    hidden = [args[0] for args, _ in calls]
    dense_hidden = hidden
    for block_name, block in blocks:
        found = linears(block)
        dense = [run_block(block, found, x, call) for x, call in zip(dense_hidden, calls, strict=True)]
        stages = _stages(found, dense) if sequential == "layer" else [list(found)]
        for stage in stages:
            for x, x_dense, call, of_dense in zip(hidden, dense_hidden, calls, dense, strict=True):
                given = run_block(block, found, x, call)
                for name in given.inputs:
                    if name in stage:
                        found[name].add(given.inputs[name], method != "wanda" or targets == "dense")
                        if targets == "dense":
                            want(name, found[name], (x, given), (x_dense, of_dense))
            for name in stage:
                if targets == "dense":
                    move(found[name], share)
                masks[f"{block_name}.{name}"] = _prune(found[name], method, pattern, dtype)
        hidden = [run_block(block, found, x, call).output for x, call in zip(hidden, calls, strict=True)]
        dense_hidden = [given.output for given in dense]
    return masks


def _stages(found: Collection[str], runs: Sequence[Given]) -> list[list[str]]:
    """Return the layers in the order they run; together those that share an input, and the experts of a layer."""

    def kind(name: str) -> str:
        return re.sub(r"\.\d+$", "", name)

    stages: list[list[str]] = []
    tensors = runs[0].tensors
    for name in [*tensors, *found]:
        if not any(name in stage for stage in stages):
            alike = [other for other in found if tensors.get(other, 0) is tensors.get(name, 1) or other == name]
            stages.append([other for other in found if kind(other) in {kind(one) for one in alike}])
    return stages


# Of the architectures of tests/architectures.py: what adds to hidden states as it is, attention first.
_ATTENTION_OUT = (
    "self_attn.o_proj",
    "self_attn.out_proj",
    "attn.c_proj",
    "self_attention.dense",
    "attention.dense",
    "self_attn.dense",
)
_MLP_OUT = ("mlp.down_proj", "fc2", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h")


def want(name: str, linear: Linear2d, own: tuple[torch.Tensor, Given], dense: tuple[torch.Tensor, Given]) -> None:
    """Add what ``name`` should put out beyond what it does; ``own`` and ``dense``: the block's input, and a run."""
    if name in _MLP_OUT or name in _ATTENTION_OUT:
        totals = []
        for hidden, given in (own, dense):
            adds_first = name in _ATTENTION_OUT
            total = hidden + given.outputs[name].view(hidden.shape) if adds_first else given.output
            totals.append(total.reshape(-1, total.shape[-1]))
        linear.want(own[1].inputs[name], totals[1] - totals[0])
        return
    x, tokens = own[1].inputs[name], own[1].tokens[name]
    there = (
        dict(zip(dense[1].tokens[name].tolist(), dense[1].inputs[name], strict=True)) if name in dense[1].inputs else {}
    )
    x_dense = torch.stack([there.get(token, row) for token, row in zip(tokens.tolist(), x, strict=True)])
    linear.want(x, (x_dense - x) @ linear.weight.T)


def move(linear: Linear2d, share: float, damping: float = 0.3) -> None:
    """W + share E (H + damping diag H)^-1; zeros stay."""
    if linear.hessian is None or linear.wanted is None:
        return
    h, alive = linear.hessian, linear.hessian.diagonal() > 0
    damped = (h + damping * h.diagonal().diag())[alive][:, alive]
    change = torch.zeros_like(linear.wanted)
    change[:, alive] = linear.wanted[:, alive] @ torch.linalg.inv(damped)
    linear.weight.copy_(torch.where(linear.weight == 0, 0, linear.weight + share * change))


def _prune(linear: Linear2d, method: str, pattern: Pattern, dtype: torch.dtype) -> torch.Tensor:
    num_in = linear.weight.shape[1]
    square_sum, hessian = linear.square_sum, linear.hessian
    if square_sum is None or hessian is None:
        square_sum, hessian = torch.ones(num_in), torch.eye(num_in)
    if method == "wanda":
        keep = wanda_mask(linear.weight, square_sum.sqrt(), pattern)
        linear.weight.mul_(keep)
        return keep
    if method == "admm":
        new, keep = admm(linear.weight, hessian.to(dtype), pattern)
        linear.weight.copy_(new)
        return keep
    new, keep = sparsegpt(linear.weight, 2 / max(linear.num_tokens, 1) * hessian.to(dtype), pattern)
    linear.weight.copy_(new)
    return keep
