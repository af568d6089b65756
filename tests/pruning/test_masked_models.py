"""What is reparametrized is pruned and counted by the product of the original and its mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distprune
from distprune import Masks, compute_masks, prune_model
from distprune.shards.layouts import local_of
from tests.worlds import drawing, run_threads


@pytest.mark.parametrize("pattern", ["unstructured", "row", "2:4", "block:4", "channels:0"])
@pytest.mark.parametrize("library", [distprune, torch.nn.utils.prune])
def test_what_a_mask_prunes_is_zero(library: Any, pattern: str) -> None:
    """And zeros under a mask that keeps them; a model that was never reparametrized has the same."""
    share = None if pattern == "2:4" else 0.6

    def check(_: int, spreads: bool) -> None:
        with drawing(3):
            masked, dense = ([nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)] for _ in range(2))
            keep = [torch.rand(layer.weight.shape) > 0.4 for layer in masked]
        for layer, other, mask in zip(masked, dense, keep, strict=True):
            layer.weight.data[0, :4] = 0.0
            library.custom_from_mask(layer, "weight", mask)
            other.weight.data.copy_(layer.weight)
        originals = [layer.get_parameter("weight_orig").detach().clone() for layer in masked]
        models = [nn.Sequential(*layers) for layers in (masked, dense)]
        for model in models if spreads else ():
            fully_shard(model)
        assert distprune.sparsity(models[0]) == distprune.sparsity(models[1]) > 0.3
        expected = prune_model(models[1], share, pattern=pattern)
        chosen = compute_masks(models[0], share, pattern=pattern)
        if not spreads:
            now = [layer.get_parameter("weight_orig") for layer in masked]
            assert [*map(torch.equal, now, originals)] == [True, True]
        report = prune_model(models[0], share, pattern=pattern)
        assert report.parameters == expected.parameters
        for layer, original, mask in zip(masked, originals, keep, strict=True) if not spreads else ():
            assert torch.equal(layer.get_parameter("weight_orig")[~mask], original[~mask])
        for masks in (chosen, report.masks, Masks.of(models[0])):
            assert [*map(torch.equal, local_values(masks), local_values(expected.masks))] == [True, True]
        for layer, other in zip(masked, dense, strict=True):
            library.remove(layer, "weight")
            assert torch.equal(local_of(layer.weight), local_of(other.weight))

    check(0, False)
    if library is distprune:
        run_threads(2, check, True)


def local_values(masks: Masks) -> list[torch.Tensor]:
    return [local_of(mask) for mask in masks.values()]
