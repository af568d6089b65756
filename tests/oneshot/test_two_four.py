"""What is pruned to 2:4 is what PyTorch's semi-structured kernels take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distprune.oneshot.prune_blocks import prune_blocks
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import matrices


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor is in prototype stage")
def test_the_kernels_give_the_dense_answer(method: Any) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = tiny_model("llama", **sizes, num_key_value_heads=1).half()
    prune_blocks(model, samples(4, 64), method=method, pattern="2:4")
    for name, weight in matrices(model).items():
        weight = weight.detach().cuda()
        sparse: Any = torch.sparse.to_sparse_semi_structured(weight)
        assert torch.equal(sparse.to_dense(), weight), name  # it drops, without a word, what does not fit
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1)).half().cuda()
        wanted = F.linear(x.float(), weight.float())
        found = F.linear(x, sparse)
        assert found.dtype is torch.float16
        # Half's own rounding of the result, and of sums in another order.
        torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
