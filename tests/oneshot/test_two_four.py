"""What is pruned to 2:4 is what PyTorch's semi-structured kernels take, on the CPU's word and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.prune_blocks import prune_blocks
from tests.architectures import samples, tiny_model


@pytest.fixture(scope="module", params=["wanda", "sparsegpt"])
def linears(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The linear layers of a float16 model after pruning to 2:4, of sizes that both kernels take."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = tiny_model("llama", **sizes, num_key_value_heads=1).half()
    prune_blocks(model, samples(4, 64), method=request.param, pattern="2:4")
    blocks = dict(decoder_blocks(model))
    found = {
        f"{at}.{name}": linear.module for at, block in blocks.items() for name, linear in linear_layers(block).items()
    }
    assert len(found) == 14
    return found


def test_nothing_is_lost_in_the_compressed_form(linears: dict[str, Any]) -> None:
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
def test_the_kernels_give_the_dense_answer(linears: dict[str, Any]) -> None:
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
