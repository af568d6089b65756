"""Small jobs, and a block of a report, for tests of what is shown of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distprune import Unstructured
from distprune.jobs import FinetuneJob, OneShotJob, ShrinkJob

__all__ = ["STAGES", "block_entry", "small_finetune_job", "small_job", "small_shrink_job"]

STAGES = ["forward", "reduce", "target", "factor", "sweep", "fit", "write"]


def small_job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    return OneShotJob(
        model=str(model_folder),
        output=str(tmp_path / "out"),
        method="sparsegpt",
        pattern=Unstructured(0.5),
        calibration=str(text_file),
        samples=3,
        sequence_length=16,
        own_words=0,
    )


def small_shrink_job(model_folder: Path, text_file: Path, tmp_path: Path, **sizes: Any) -> ShrinkJob:
    return ShrinkJob(
        model=str(model_folder),
        output=str(tmp_path / "out"),
        calibration=str(text_file),
        layer_criterion="influence",
        samples=4,
        sequence_length=16,
        own_words=0,
        **sizes,
    )


def small_finetune_job(model_folder: Path, text_file: Path, tmp_path: Path, steps: int) -> FinetuneJob:
    return FinetuneJob(
        model=str(model_folder),
        output=str(tmp_path / "tuned"),
        data=str(text_file),
        steps=steps,
        batch_size=2,
        sequence_length=16,
        compute_dtype=torch.float32,
    )


def block_entry(index: int, errors: dict[str, float | None]) -> dict[str, Any]:
    name = f"model.layers.{index}"
    linears = [
        {"name": f"{name}.{of_layer}", "num_elements": 10, "num_zeros": 4 + index, "relative_error": error}
        for of_layer, error in errors.items()
    ]
    seconds = dict.fromkeys(STAGES, 0.5)
    return {"index": index, "name": name, "layers": linears, "seconds": seconds, "num_rounds": 7, "num_bytes": 3 << 20}
