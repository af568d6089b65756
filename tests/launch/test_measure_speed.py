"""What models take in plain transformers: FLOPs are those of the matrix products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch import measure_speed
from tests.hf_models import make_model


def test_the_speed_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model")
    monkeypatch.setattr(measure_speed, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(measure_speed, "TIMES", 1)
    found = measure_speed.measure(folder, torch.device("cpu"))
    of_layers, of_attention, of_head = 2 * 2880, 2 * 2 * 512 * 20, 67 * 20
    assert found["parameters"] == of_layers + of_head + 5 * 20
    assert found["forward"]["flops"] == 2 * 512 * (of_layers + of_attention + of_head)
    assert found["generation"]["tokens_per_second"] > 0
    assert found["file_bytes"] == (folder / "model.safetensors").stat().st_size
