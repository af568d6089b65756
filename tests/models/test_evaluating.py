"""Looking at a model leaves it as it was, to the bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from distprune import Unstructured
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.walk import spread
from distprune.evaluation import perplexity
from distprune.models.evaluating import evaluating
from distprune.oneshot.prune_blocks import prune_blocks
from tests.architectures import samples, tiny_model

TOKENS = samples(2)


def rwkv() -> Any:
    """Every block but the first is rescaled in evaluation mode."""
    sizes = {"hidden_size": 24, "attention_hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    return tiny_model("rwkv", **sizes, context_length=32, rescale_every=1)


def test_rwkv_keeps_its_weights() -> None:
    model, other = rwkv(), rwkv()
    before = copy.deepcopy(model.state_dict())
    found = perplexity(model, TOKENS.flatten(), sequence_length=16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.config.rescale_every, model.rwkv.layers_are_rescaled) == (1, False)
    with torch.no_grad():  # as the model itself does it, which rescales
        losses = [other(input_ids=t[None], labels=t[None], use_cache=False).loss for t in TOKENS]
    assert not torch.equal(
        other.rwkv.blocks[1].feed_forward.value.weight, before["rwkv.blocks.1.feed_forward.value.weight"]
    )
    assert found == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-3)  # its LayerNorms see halved states


def test_rwkv_is_pruned_where_it_is() -> None:
    model = rwkv()
    before = copy.deepcopy(model.state_dict())
    prune_blocks(model, TOKENS, method="wanda", pattern=Unstructured(0.5))
    for name, value in model.state_dict().items():
        kept = value != 0 if ".blocks." in name and value.ndim == 2 else torch.ones_like(value, dtype=torch.bool)
        assert torch.equal(value[kept], before[name][kept])


def test_modes_are_put_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False]


class Worn(nn.Module):
    """Changes its weights when it is run, as RWKV does, and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.table = nn.Parameter(torch.ones(97, 97))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(97, 97, bias=False))])

    @override
    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.table.div_(2)
        return SimpleNamespace(logits=self.layers[0](self.table[input_ids]))


def test_a_model_that_changes_itself_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"a forward of Worn changes its own weights, 'table' among them"):
        perplexity(Worn(), TOKENS.flatten(), sequence_length=16)
    with torch.no_grad(), pytest.raises(RuntimeError, match="'table' among them"):
        catch_inputs(Worn(), spread(TOKENS[:1], SampleGroup()))
