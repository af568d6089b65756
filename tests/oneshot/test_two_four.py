"""What is pruned to 2:4 is what PyTorch's semi-structured kernels take, on the CPU's word and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distprune import NByM
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import OneShotMethod
from tests.worlds import drawing

VOCABULARY = 64


@pytest.fixture(scope="module", params=["wanda", "sparsegpt"])
def linears(request: pytest.FixtureRequest) -> dict[str, nn.Linear]:
    """The linear layers of a float16 model after pruning to 2:4, of sizes that both kernels take."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    method: OneShotMethod = request.param
    with drawing(0):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
        samples = torch.randint(0, VOCABULARY, (4, 64))
    prune_blocks(model, samples, method=method, pattern=NByM(2, 4))
    found: dict[str, nn.Linear] = {}
    for block_name, block in decoder_blocks(model):
        for name, linear in linear_layers(block).items():
            assert isinstance(linear.module, nn.Linear)
            found[f"{block_name}.{name}"] = linear.module
    assert len(found) == 14
    return found


def test_nothing_is_lost_in_the_compressed_form(linears: dict[str, nn.Linear]) -> None:
    from torch.sparse import _semi_structured_conversions as conversions

    convert: Any = conversions.sparse_semi_structured_from_dense_cutlass
    restore: Any = conversions.sparse_semi_structured_to_dense_cutlass
    for name, linear in linears.items():
        weight = linear.weight.detach()
        compressed, meta = convert(weight)
        assert compressed.shape == (weight.shape[0], weight.shape[1] // 2)
        assert torch.equal(restore(compressed, meta), weight), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor is in prototype stage")
def test_the_kernels_give_the_dense_answer(linears: dict[str, nn.Linear]) -> None:
    for name, linear in linears.items():
        weight = linear.weight.detach().cuda()
        sparse: Any = torch.sparse.to_sparse_semi_structured(weight)
        assert torch.equal(sparse.to_dense(), weight), name  # it drops, without a word, what does not fit
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1)).half().cuda()
        wanted = F.linear(x.float(), weight.float())
        found = F.linear(x, sparse)
        assert found.dtype is torch.float16
        # Half's own rounding of the result, and of sums in another order.
        torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
