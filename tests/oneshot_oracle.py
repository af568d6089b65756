"""One-shot pruning in one process, written plainly from the papers: Wanda, SparseGPT and ADMM.

Wanda: arXiv 2306.11695. SparseGPT: arXiv 2301.00774, Algorithm 1. ADMM: arXiv 2401.02938. Shapes:
``out`` and ``in`` are the features of one linear map, whose weight is always looked at as (out, in).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from distprune.models import decoder_blocks

__all__ = [
    "COLUMNS",
    "NM",
    "Linear2d",
    "Pattern",
    "Squares",
    "admm",
    "linears",
    "prune_model",
    "sparsegpt",
    "wanda_mask",
]

COLUMNS = 128  # of a SparseGPT block, section 3.4 of the paper


@dataclass(frozen=True)
class NM:
    """``n`` of ``m`` consecutive inputs are kept."""

    n: int
    m: int


@dataclass(frozen=True)
class Squares:
    """The fraction ``amount`` of the blocks of ``size`` x ``size`` weights goes (SparseGPT: of each column block's)."""

    size: int
    amount: float


# A fraction competes per row (Wanda, ADMM) or per column block (SparseGPT).
Pattern: TypeAlias = float | NM | Squares


def wanda_mask(weight: torch.Tensor, norms: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return what stays, bool (out, in); ``norms`` is ||X||_2 per input feature (in,)."""
    scores = weight.abs().float() * norms.float()
    num_out, num_in = weight.shape
    if isinstance(pattern, NM):
        return _keep(scores.reshape(-1, pattern.m), pattern.m - pattern.n).view(num_out, num_in)
    if isinstance(pattern, Squares):
        return _keep_squares(scores, pattern)
    return _keep(scores, round(pattern * num_in))


def _keep(scores: torch.Tensor, num_pruned: int) -> torch.Tensor:
    """Drop the lowest of every row; a stable sort takes equal ones from the lowest index up."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    return keep.scatter(1, scores.sort(dim=1, stable=True).indices[:, :num_pruned], False)


def _keep_squares(scores: torch.Tensor, pattern: Squares) -> torch.Tensor:
    size = pattern.size
    sums = scores.double().reshape(len(scores) // size, size, -1, size).sum((1, 3))
    keep = _keep(sums.reshape(1, -1), round(pattern.amount * sums.numel())).view(sums.shape)
    return keep.repeat_interleave(size, 0).repeat_interleave(size, 1)


def sparsegpt(
    weight: torch.Tensor, hessian: torch.Tensor, pattern: Pattern, *, columns: int = COLUMNS, damping: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the new weight, what stays), both (out, in); ``hessian`` is (in, in), any multiple of X^T X.

    Works in the dtype of ``hessian``.
    """
    w, h = weight.to(hessian.dtype, copy=True, memory_format=torch.contiguous_format), hessian.clone()
    num_in = w.shape[1]
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[:, dead] = 0
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    keep = torch.ones_like(w, dtype=torch.bool)
    for start in range(0, num_in, columns):
        stop = min(start + columns, num_in)
        errors = torch.zeros_like(w[:, start:stop])
        scores = w[:, start:stop] ** 2 / inverse.diagonal()[start:stop] ** 2
        if isinstance(pattern, Squares):
            keep[:, start:stop] = _keep_squares(scores, pattern)
        elif not isinstance(pattern, NM):
            keep[:, start:stop] = _keep(scores.reshape(1, -1), round(pattern * scores.numel())).view(scores.shape)
        for i in range(start, stop):
            if isinstance(pattern, NM) and i % pattern.m == 0:
                group = slice(i, i + pattern.m)
                scores = w[:, group] ** 2 / inverse.diagonal()[group] ** 2
                keep[:, group] = _keep(scores, pattern.m - pattern.n)
            pruned = torch.where(keep[:, i], w[:, i], 0)
            errors[:, i - start] = (w[:, i] - pruned) / inverse[i, i]
            w[:, i] = pruned
            w[:, i + 1 : stop] -= torch.outer(errors[:, i - start], inverse[i, i + 1 : stop])
        w[:, stop:] -= errors @ inverse[start:stop, stop:]
    return w.to(weight.dtype), keep


def admm(
    weight: torch.Tensor,
    products: torch.Tensor,
    pattern: Pattern,
    *,
    damping: float = 0.1,
    penalty: float = 1.0,
    num_steps: int = 20,
    num_closing: int = 15,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the new weight, what stays), both (out, in); ``products`` is X^T X. In the dtype of ``products``."""
    num_in = weight.shape[1]
    scale = products.diagonal().sqrt() + 1e-8
    a, eye = products / torch.outer(scale, scale), torch.eye(num_in, dtype=products.dtype)
    w = weight.to(products.dtype) * scale
    inverse = torch.linalg.inv(a + (damping + penalty) * eye)
    unpruned = w @ (a + damping * eye)
    u, z, fitted = torch.zeros_like(w), torch.zeros_like(w), w
    keep = torch.ones_like(w, dtype=torch.bool)
    for step in range(1, num_steps + 1):
        if step <= num_closing:
            sizes = (fitted + u).abs().masked_fill(weight == 0, 0)
            keep = _keep_part(sizes, pattern, 1 - (1 - step / num_closing) ** 3) & (weight != 0)
        z = (fitted + u) * keep
        u = fitted + u - z
        fitted = (unpruned + penalty * (z - u)) @ inverse
    new = (fitted + u) * keep / scale
    new[:, products.diagonal() == 0] = 0
    return new.to(weight.dtype), keep


def _keep_part(sizes: torch.Tensor, pattern: Pattern, share: float) -> torch.Tensor:
    """Drop the smallest ``share`` of what the pattern drops in every row."""
    num_in = sizes.shape[1]
    if isinstance(pattern, NM):
        stays = _keep(sizes.reshape(-1, pattern.m), pattern.m - pattern.n).view(sizes.shape)
        return _keep(sizes.masked_fill(stays, torch.inf), int(share * (num_in // pattern.m * (pattern.m - pattern.n))))
    assert isinstance(pattern, float)
    return _keep(sizes, int(share * round(pattern * num_in)))


@dataclass
class Linear2d:
    """A linear map of a block: its weight as (out, in), a view that writes through, and what it was given."""

    weight: torch.Tensor
    num_tokens: int = 0
    square_sum: torch.Tensor | None = None  # (in,) float64
    hessian: torch.Tensor | None = None  # (in, in) float64

    def add(self, x: torch.Tensor, with_hessian: bool) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).double()
        if self.square_sum is None or self.hessian is None:
            num_in = x.shape[1]
            self.square_sum, self.hessian = x.new_zeros(num_in), x.new_zeros(num_in, num_in)
        self.num_tokens += len(x)
        self.square_sum += (x**2).sum(0)
        if with_hessian:
            self.hessian += x.T @ x


def linears(block: nn.Module) -> dict[str, Linear2d]:
    """Return the linear maps of a block by name: Linear, GPT-2's Conv1D (in, out), the experts' 3-D weights.

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


@contextmanager
def _listening(block: nn.Module, found: dict[str, Linear2d], with_hessian: bool) -> Iterator[None]:
    def on_linear(name: str) -> Any:
        return lambda _, args: found[name].add(args[0], with_hessian)

    def on_experts(name: str) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            hidden, expert_of_token = args[0], args[1]  # (tokens, in), (tokens, experts per token)
            for e in range(module.num_experts):
                x = hidden[(expert_of_token == e).any(1)]
                if len(x):
                    gate, up = F.linear(x, module.gate_up_proj[e]).chunk(2, dim=-1)
                    found[f"{name}.gate_up_proj.{e}"].add(x, with_hessian)
                    found[f"{name}.down_proj.{e}"].add(module.act_fn(gate) * up, with_hessian)

        return hook

    with ExitStack() as stack:
        for name, module in block.named_modules():
            if name in found:
                stack.callback(module.register_forward_pre_hook(on_linear(name)).remove)
            elif is_experts(module):
                stack.callback(module.register_forward_pre_hook(on_experts(name)).remove)
        yield


class _Caught(Exception):
    pass


def _first_inputs(model: nn.Module, block: nn.Module, tokens: torch.Tensor) -> tuple[Any, dict[str, Any]]:
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
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Prune every linear map of the decoder blocks, block after block, and return what stays, by name.

    ``samples`` is (num_samples, length); each is run by itself. A map that saw no token (an expert that
    nothing was routed to) is pruned as if its inputs were white: norms of 1, the identity as Hessian.
    ``dtype`` is that of SparseGPT's and ADMM's arithmetic.
    """
    masks: dict[str, torch.Tensor] = {}
    blocks = decoder_blocks(model)
    caught = [_first_inputs(model, blocks[0][1], tokens[None]) for tokens in samples]
    hidden = [args[0] for args, _ in caught]
    for block_name, block in blocks:
        found = linears(block)
        with _listening(block, found, method != "wanda"):
            for x, (args, kwargs) in zip(hidden, caught, strict=True):
                block(x, *args[1:], **kwargs)
        for name, linear in found.items():
            keep = _prune(linear, method, pattern, dtype)
            masks[f"{block_name}.{name}"] = keep
        outputs = [block(x, *args[1:], **kwargs) for x, (args, kwargs) in zip(hidden, caught, strict=True)]
        hidden = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return masks


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
