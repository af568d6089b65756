"""A small one-shot job, and a block of its report, for tests of what is shown of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distprune import Unstructured
from distprune.jobs import OneShotJob

__all__ = ["STAGES", "block_entry", "small_job"]

STAGES = ["forward", "reduce", "target", "factor", "sweep", "write"]


def small_job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    return OneShotJob(
        model=str(model_folder),
        output=str(tmp_path / "out"),
        method="sparsegpt",
        pattern=Unstructured(0.5),
        calibration=str(text_file),
        samples=3,
        sequence_length=16,
    )


def block_entry(index: int, errors: dict[str, float | None]) -> dict[str, Any]:
    name = f"model.layers.{index}"
    linears = [
        {"name": f"{name}.{of_layer}", "num_elements": 10, "num_zeros": 4 + index, "relative_error": error}
        for of_layer, error in errors.items()
    ]
    seconds = dict.fromkeys(STAGES, 0.5)
    return {"index": index, "name": name, "layers": linears, "seconds": seconds, "num_rounds": 7, "num_bytes": 3 << 20}
