"""The texts that quality is measured on: of the calibration's kind and two others; the perplexity of a model on each.

Speeches: State of the Union since 1990; every second one is for calibration, the first 4,000 characters of each of the
others are evaluated on. Documentation: topics of Python's own reference (``pydoc_data.topics``). Code: nine modules of
Python's library. On these nothing is calibrated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distprune.evaluation import perplexity
from launch.demo_inputs import joined, speech_files

__all__ = ["ABOUT", "KINDS", "LENGTH", "over_dense", "perplexities", "perplexities_of", "write_calibration"]

LENGTH, NUM_WINDOWS = 256, 64  # predicted tokens in a window; windows of a kind
KINDS = ("speeches", "documentation", "code")
_MODULES = [
    "argparse",
    "tarfile",
    "inspect",
    "zipfile",
    "csv",
    "shelve",
    "json/decoder",
    "asyncio/queues",
    "html/parser",
]

ABOUT = (
    f"Perplexity is of {NUM_WINDOWS} windows of {LENGTH} tokens, evenly from all over a kind of text; x dense: as a "
    "multiple of the dense model's. Speeches: the first 4,000 characters of State of the Union speeches that are not "
    "calibrated on. Documentation: topics of Python's own reference (pydoc_data.topics). Code: the first 40,000 "
    f"characters of each of {len(_MODULES)} modules of Python's library. On these nothing is calibrated."
)


def write_calibration(folder: Path) -> Path:
    """Write what is calibrated on, and return the file."""
    path = folder / "calibration.txt"
    path.write_bytes(joined(speech_files(since=1990)[::2]))
    return path


def _texts() -> dict[str, str]:
    library = Path(os.__file__).parent
    return {
        "speeches": "\n\n".join(path.read_text()[:4000] for path in speech_files(since=1990)[1::2]),
        "documentation": "\n\n".join(topics[name] for name in sorted(topics)),
        "code": "\n\n".join((library / f"{name}.py").read_text()[:40000] for name in _MODULES),
    }


def perplexities(model: Any, tokenizer: Any) -> dict[str, float]:
    """Return the perplexity on each kind of text."""
    by_kind = {}
    for kind, text in _texts().items():
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        step = (len(ids) - LENGTH - 1) // NUM_WINDOWS
        windows = torch.stack([ids[i * step : i * step + LENGTH + 1] for i in range(NUM_WINDOWS)])
        by_kind[kind] = perplexity(model, windows)
    return by_kind


def perplexities_of(directory: Path | str, device: str = "cpu") -> dict[str, float]:
    """Return those of the model in ``directory``, run on ``device``."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return perplexities(model.to(device), AutoTokenizer.from_pretrained(directory))


def over_dense(entry: Mapping[str, Mapping[str, float]], kind: str) -> float:
    """Return what a run came to on a ``kind`` of text, as a multiple of what the dense model does."""
    return entry["perplexity"][kind] / entry["dense"][kind]
