"""The model of a config, without memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.meta_model import build_on_meta
from tests.hf_models import make_model


def test_threads_leave_the_default_dtype_alone(tmp_path: Path) -> None:
    """transformers changes it for the whole process while it builds."""
    directory = open_directory(make_model(tmp_path / "model", dtype=torch.bfloat16))
    with ThreadPoolExecutor(4) as threads:
        models = [model for model, _ in threads.map(build_on_meta, [directory] * 40)]
    assert torch.get_default_dtype() == torch.float32
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.bfloat16}
