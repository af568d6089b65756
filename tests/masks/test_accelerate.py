"""Accelerate's FSDP2 on a model that was pruned before: also where the first rank alone has the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import distprune as prune
from tests.accelerated import accelerated
from tests.masks.test_savers import IDS, accelerate, assert_loads, llama, prune_all
from tests.worlds import ProcessPool


def prepared(model: Any, *, from_first_rank: bool) -> tuple[Any, Any]:
    """Return an Accelerator and what its ``prepare`` makes of ``model`` by FSDP2, which it offers on GPUs only."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=from_first_rank,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return accelerator, accelerate.utils.fsdp_utils.fsdp2_prepare_model(accelerator, model)


def prepared_on_rank(rank: int, from_first_rank: bool, shards_masks: bool, folder: str) -> None:
    plain, model = llama(), llama()
    prune_all(plain)
    prune_all(model)
    if rank and from_first_rank:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()  # what the other ranks have is not looked at
    with accelerated("ddp"):
        accelerator, model = prepared(model, from_first_rank=from_first_rank)
        if shards_masks:
            prune.shard_masks(model)
        layer = model.model.layers[0].mlp.up_proj
        if from_first_rank or shards_masks:
            assert isinstance(layer.weight_mask, DTensor)
            assert layer.weight_mask.dtype is torch.bool
            assert layer.weight_mask.placements == layer.weight_orig.placements
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                each(IDS, labels=IDS).loss.backward()
                if shards_masks:
                    up = each.model.layers[0].mlp.up_proj
                    assert not (up.weight_orig.grad * (1 - up.weight_mask.to(torch.float32))).any()
                optimizer.step()
                optimizer.zero_grad()
        logits = model(IDS).logits  # every rank runs all samples, so their mean is that of one
        assert torch.allclose(logits, plain(IDS).logits, rtol=0, atol=1e-5)
        accelerator.save_model(model, f"{folder}/model")
        state = accelerator.get_state_dict(model)  # gathered, as Trainer passes it on
        if rank == 0:
            loaded = llama(seed=1)
            accelerate.load_checkpoint_in_model(loaded, f"{folder}/model", strict=True)
            assert torch.equal(loaded(IDS).logits, logits)
            assert "model.layers.0.mlp.up_proj.weight_mask" in state
            model.save_pretrained(f"{folder}/pretrained", state_dict=state)
            assert_loads(Path(f"{folder}/pretrained"), loaded)


@pytest.mark.parametrize("shards_masks", [True, False])
@pytest.mark.parametrize("from_first_rank", [True, False])
@pytest.mark.sampled(1)
def test_pruned_before_prepare(pool: ProcessPool, tmp_path: Path, from_first_rank: bool, shards_masks: bool) -> None:
    pool.run(2, prepared_on_rank, from_first_rank, shards_masks, str(tmp_path))
