"""A tiny decoder on 64 real processes, in FSDP2 and in FSDP x TP: every call ends, with the bytes that one process has.

``python -m benchmarks.bench_many_ranks`` prints a report. The processes share what cores there are, so that seconds say
only that nobody waits for a timeout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import distprune as prune
from benchmarks.measure import heading, on_ranks, show, table
from distprune.collectives.communicator import Alone
from tests.fake_ranks import PRUNING, Call

TP = 16
_CONFIG = LlamaConfig(
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=TP,
    num_key_value_heads=TP,
    vocab_size=64,
    tie_word_embeddings=False,
)
_COLUMNS, _ROWS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    (
        "self_attn.o_proj",
        "mlp.down_proj",
    ),
)
_ABOUT = """Every process pruned its part. The bytes of all weights, gathered afterwards, are those of the same call on
the whole model in one process, wherever the table says so. By ADMM, whose products of few rows and of many differ in
their last bits, the zeros are looked at alone.
"""


def decoder() -> LlamaForCausalLM:
    """Return the same model everywhere, whole."""
    torch.manual_seed(0)
    return LlamaForCausalLM(_CONFIG)


def fsdp2(model: LlamaForCausalLM) -> None:
    """Shard each block over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp_tp(model: LlamaForCausalLM) -> None:
    """Split each block over 16 ranks, and shard it over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {**dict.fromkeys(_COLUMNS, ColwiseParallel()), **dict.fromkeys(_ROWS, RowwiseParallel())}
    for block in model.model.layers:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])


def hold_and_step(model: nn.Module, group: Any) -> None:
    """Prune, hold, write elsewhere, step: zeros stay."""
    prune.prune_model(model, 0.5, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = prune.hold_zeros(model, optimizer, group=group)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held.remove()


def one_shot(method: Literal["wanda", "admm"]) -> Call:
    """Return what prunes block by block, with the samples of all ranks."""
    samples = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    return lambda model, group: prune.prune_blocks(model, samples, method=method, pattern="2:4", group=group)


ZEROS = "one-shot, ADMM 2:4"  # products of few rows and of many differ in their last bits


CALLS: dict[str, Call] = {**PRUNING, "held step": hold_and_step}
LAYOUTS: dict[str, tuple[Callable[[LlamaForCausalLM], None], dict[str, Call]]] = {
    "FSDP2": (fsdp2, {**CALLS, "one-shot, Wanda 2:4": one_shot("wanda"), ZEROS: one_shot("admm")}),
    "FSDP x TP": (fsdp_tp, CALLS),
}


def digest(model: nn.Module, *, of_zeros: bool) -> str:
    """Return a digest of all weights, gathered, or of where they are zero. Every rank must call it."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        bits.update((whole == 0 if of_zeros else whole).contiguous().numpy().tobytes())
    return bits.hexdigest()


def measured(rank: int, layout: str, only: str) -> list[tuple[str, float, bool]]:
    """Return of each call its name, seconds, and whether all weights are those of one process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    spread, calls = LAYOUTS[layout]
    found = []
    for name, call in calls.items():
        if only not in name:
            continue
        model = decoder()
        spread(model)
        dist.barrier()
        started = time.perf_counter()
        call(model, None)
        seconds, ours = time.perf_counter() - started, digest(model, of_zeros=name == ZEROS)
        wanted = ours
        if rank == 0:
            alone = decoder()
            call(alone, Alone())
            wanted = digest(alone, of_zeros=name == ZEROS)
        found.append((name, seconds, ours == wanted))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--only", default="", help="calls whose name has this")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for layout in LAYOUTS:
        found = on_ranks(arguments.ranks, measured, layout, arguments.only, fresh=False)
        for of_call in zip(*found, strict=True):
            name, seconds, is_same = of_call[0]
            rows.append(
                [layout, name, f"{seconds:.1f}", ("its zeros" if name == ZEROS else "yes") if is_same else "NO"]
            )
    only = f" --only {arguments.only}" if arguments.only else ""
    text = heading("Many ranks", f"python -m benchmarks.bench_many_ranks --ranks {arguments.ranks}{only}")
    show(text + f"\n{_ABOUT}\n" + table(["layout", "call", "seconds", "bytes of one process"], rows), arguments.output)


if __name__ == "__main__":
    main()
