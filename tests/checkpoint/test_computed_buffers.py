"""Buffers that are in no checkpoint are computed, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distprune.checkpoint.computed_buffers import compute_buffers


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.zeros(4, dtype=dtype), persistent=False)


def tiny_model(num_computed: int) -> Any:
    from transformers import PretrainedConfig, PreTrainedModel, initialization

    class Tiny(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.inner = Inner()
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Inner):
                initialization.normal_(module.child.weight)  # as GPT-2 does, from the parent module
                for key in sorted(module._non_persistent_buffers_set)[:num_computed]:
                    buffer = module.get_buffer(key)
                    initialization.copy_(buffer, torch.arange(4).to(buffer.dtype))

    return Tiny(PretrainedConfig())


def test_every_dtype_is_computed_and_weights_stay() -> None:
    model = tiny_model(4)
    before = model.inner.child.weight.detach().clone()
    for buffer in model.buffers():
        buffer.fill_(1)
    compute_buffers(model)
    for buffer in model.buffers():
        assert torch.equal(buffer, torch.arange(4).to(buffer.dtype))
    assert torch.equal(model.inner.child.weight, before)
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in model.parameters())


@pytest.mark.parametrize("num_computed", [0, 1, 2, 3])
def test_a_buffer_of_any_dtype_that_is_left_out_is_found(num_computed: int) -> None:
    with pytest.raises(NotImplementedError, match=r"inner\.\w+"):
        compute_buffers(tiny_model(num_computed))
