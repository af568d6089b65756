"""The model of a config, without memory: buffers that are in no checkpoint are computed, or the model is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hf_load import build_on_meta, compute_buffers
from tests.hf_models import make_model


def test_threads_leave_the_default_dtype_alone(tmp_path: Path) -> None:
    """transformers changes it for the whole process while it builds."""
    directory = open_directory(make_model(tmp_path / "model", dtype=torch.bfloat16))
    with ThreadPoolExecutor(4) as threads:
        models = [model for model, _ in threads.map(build_on_meta, [directory] * 40)]
    assert torch.get_default_dtype() == torch.float32
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.bfloat16}


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

    with torch.device("meta"):
        return Tiny(PretrainedConfig())


def test_every_dtype_is_computed_and_weights_stay_as_they_are() -> None:
    model = tiny_model(4)
    compute_buffers(model)
    for buffer in model.buffers():
        assert torch.equal(buffer, torch.arange(4).to(buffer.dtype))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("num_computed", [0, 1, 2, 3])
def test_a_buffer_of_any_dtype_that_is_left_out_is_found(num_computed: int) -> None:
    with pytest.raises(NotImplementedError, match=r"inner\.\w+"):
        compute_buffers(tiny_model(num_computed))
