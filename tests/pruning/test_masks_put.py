"""Masks that were chosen, put where the next forward reads: FSDP1 after a forward, and tied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import distprune as prune
from distprune.collectives.communicator import Alone
from tests.decoder import decoder
from tests.worlds import ProcessPool

TOKENS = torch.arange(6).view(1, 6)


def applied_late_on_rank(_: int, strategy: str) -> None:
    model = FullyShardedDataParallel(
        decoder(), use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy[strategy]
    )
    with torch.no_grad():
        masks = prune.compute_masks(model, 0.75)
        dense = model(TOKENS)  # which leaves the whole weights of the root gathered
        masks.apply_()
        pruned = model(TOKENS)
        assert not torch.equal(pruned, dense)
        alone = decoder()
        prune.prune_model(alone, 0.75, group=Alone())
        assert torch.equal(pruned, alone(TOKENS))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_masks_are_applied_to_what_the_next_forward_gathers(pool: ProcessPool, strategy: str) -> None:
    pool.run(2, applied_late_on_rank, strategy)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_pruned_in_place_alone() -> None:
    model = tied()
    masks = prune.compute_masks(model, 0.75)
    before = model.state_dict().keys()
    with pytest.raises(NotImplementedError, match=r"'0.weight' is tied .* in place with apply_\(\), or untie it first"):
        masks.reparametrize()
    assert model.state_dict().keys() == before
    masks.apply_()
    fresh = tied()
    fresh.load_state_dict(prune.dense_state_dict(model))
    assert prune.sparsity(fresh) == 0.75
