"""Real wrappers, on processes, equal one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune import prune_model
from distprune.shards import local_shard
from tests.decoder import decoder
from tests.worlds import ProcessPool


def pruned_on_rank(_: int, layout: str) -> dict[str, torch.Tensor]:
    world_size = dist.get_world_size()
    model: nn.Module = decoder()
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout in ("fsdp", "fsdp-after-forward"):
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.get_submodule("layers").children():
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        if layout == "fsdp-after-forward":
            with torch.no_grad():
                model(torch.arange(5)[None])
    else:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
        for block in model.get_submodule("layers").children():
            if layout == "fsdp-tp":
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"] if layout == "fsdp-tp" else mesh)
        fully_shard(model, mesh=mesh["dp"] if layout == "fsdp-tp" else mesh)
    include = ["layers.*", "embed.weight"]
    prune_model(model, method="random", amount=0.3, seed=4, include=include)
    prune_model(model, method="magnitude", amount=0.5, again=True, include=include)
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    parts = {name: local_shard(name, parameter) for name, parameter in bare.named_parameters()}
    return {
        name: torch.stack(
            [torch.from_numpy(s.geometry.flat_indices(0, s.local.numel())).double(), s.local.flatten().double()]
        )
        for name, s in parts.items()
    }


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp-after-forward", 2), ("hsdp", 4), ("fsdp-tp", 4)],
)
def test_real_wrappers_equal_one_process(pool: ProcessPool, layout: str, world_size: int) -> None:
    model = decoder()
    include = ["layers.*", "embed.weight"]
    prune_model(model, method="random", amount=0.3, seed=4, include=include)
    prune_model(model, method="magnitude", amount=0.5, again=True, include=include)
    for parts in pool.run(world_size, pruned_on_rank, layout):
        for name, whole in model.named_parameters():
            flat, values = parts[name]
            assert torch.equal(whole.detach().flatten()[flat.long()].double(), values), name
