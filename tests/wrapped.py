"""A small transformer in every layout torch wraps models in, and the same training step in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

from tests.worlds import drawing

__all__ = ["PRUNED", "WRAPPERS", "Transformer", "Wrapped", "pairs_of", "transformer", "whole", "wrap"]

# Rows that 2, 3 and 4 ranks cut unevenly; heads and hidden sizes that tensor parallelism halves.
SIZE, HIDDEN, NUM_HEADS, NUM_TOKENS = 12, 18, 2, 7


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE, bias=i == 3) for i in range(4))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, SIZE // NUM_HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.as_tensor(self.o(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention = Attention()
        self.up, self.down = nn.Linear(SIZE, HIDDEN), nn.Linear(HIDDEN, SIZE)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + torch.as_tensor(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, SIZE)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, 11)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(self.norm(x)))


PRUNED = ("attention.q", "attention.o", "up", "down")
_TP_PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def transformer(seed: int = 0) -> Transformer:
    """Return the same model everywhere."""
    with drawing(seed):
        return Transformer()


def pairs_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, name) of what the tests prune."""
    bare = getattr(model, "module", model)
    return [(bare.get_submodule(f"layers.{i}.{name}"), "weight") for i in range(2) for name in PRUNED]


@dataclass(frozen=True)
class Wrapped:
    """A model on this rank, and which slice of a batch the rank takes."""

    model: nn.Module
    data_rank: int
    num_data_ranks: int

    def step(self, tokens: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Run forward and backward on this rank's samples of the batch (samples x tokens), and return the loss."""
        own = tokens.chunk(self.num_data_ranks)[self.data_rank]
        logits = self.model(own[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), own[:, 1:].flatten())
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def batches(num: int, num_samples: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (num_samples, NUM_TOKENS), generator=generator) for _ in range(num)]


def _shard_layers(model: Transformer, mesh: DeviceMesh, **options: Any) -> Transformer:
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k != "shard_placement_fn"})
    return model


def _flat(**options: Any) -> Callable[[Transformer], Wrapped]:
    def make(model: Transformer) -> Wrapped:
        num = dist.get_world_size()
        _shard_layers(model, init_device_mesh("cpu", (num,)), **options)
        return Wrapped(model, dist.get_rank(), num)

    return make


def _per_linear(model: Transformer) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    return Wrapped(_shard_layers(model, mesh), dist.get_rank(), dist.get_world_size())


def _prefetched(model: Transformer) -> Wrapped:
    wrapped = _flat()(model)
    first, second = cast("list[FSDPModule]", list(model.layers))
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return wrapped


def _checkpointed(model: Transformer) -> Wrapped:
    for block in model.layers:
        block.forward = _recomputed(block)
    return _flat()(model)


def _recomputed(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    original = block.forward
    return lambda x: torch.utils.checkpoint.checkpoint(original, x, use_reentrant=False)


def _hsdp(model: Transformer) -> Wrapped:
    num = dist.get_world_size()
    _shard_layers(model, init_device_mesh("cpu", (2, num // 2), mesh_dim_names=("replicate", "shard")))
    return Wrapped(model, dist.get_rank(), num)


def _tp(model: Transformer) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers:
        parallelize_module(block, mesh, _TP_PLAN)
    return Wrapped(model, 0, 1)


def _fsdp_tp(model: Transformer) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.layers:
        parallelize_module(block, mesh["tp"], _TP_PLAN)
    _shard_layers(model, mesh["dp"])
    return Wrapped(model, mesh["dp"].get_local_rank(), mesh["dp"].size())


def _ddp(model: Transformer) -> Wrapped:
    return Wrapped(nn.parallel.DistributedDataParallel(model), dist.get_rank(), dist.get_world_size())


def _fsdp1(model: Transformer) -> Wrapped:
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return Wrapped(wrapped, dist.get_rank(), dist.get_world_size())


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 6 == 0 else None


# By column of the support matrix, then by name; each with its numbers of ranks.
WRAPPERS: dict[str, dict[str, tuple[Callable[[Transformer], Wrapped], tuple[int, ...]]]] = {
    "plain": {"plain": (lambda model: Wrapped(model, 0, 1), (1,))},
    "DDP": {"ddp": (_ddp, (2,))},
    "FSDP1": {"fsdp1": (_fsdp1, (2, 3))},
    "FSDP2": {
        "fsdp2": (_flat(), (1, 2, 4)),
        "per-linear": (_per_linear, (3,)),
        "columns": (_flat(shard_placement_fn=_columns), (2,)),
        "no-reshard": (_flat(reshard_after_forward=False), (2,)),
        "reshard-to-2": (_flat(reshard_after_forward=2), (4,)),
        "offload": (_flat(offload_policy=CPUOffloadPolicy(pin_memory=False)), (2,)),
        "prefetch": (_prefetched, (2,)),
        "checkpointing": (_checkpointed, (2,)),
    },
    "HSDP": {"hsdp": (_hsdp, (4,))},
    "TP": {"tp": (_tp, (2,))},
    "FSDP x TP": {"fsdp-tp": (_fsdp_tp, (4,))},
}


def wrap(name: str, model: Transformer) -> Wrapped:
    """Return ``model`` in the layout of that name, on this rank."""
    return next(makers[name][0] for makers in WRAPPERS.values() if name in makers)(model)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the unsharded tensor, detached. Every rank must call it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
