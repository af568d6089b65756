"""The texts that quality is measured on: of the calibration's kind, and of another; SmolLM2-135M's perplexity on both.

Speeches: State of the Union since 1990; every second one is for calibration, some of the others are evaluated on.
Documentation: topics of Python's own reference, as every Python ships them (``pydoc_data.topics``); nothing is
calibrated on those.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics

from launch.demo_inputs import joined, speech_files

__all__ = ["ABOUT", "EVALUATION_TOKENS", "KINDS", "LENGTH", "by_kind", "evaluated", "over_dense", "write_texts"]

LENGTH, EVALUATION_TOKENS, NUM_EVALUATED = 256, 512, 8  # tokens in a window; of each text; texts of a kind
KINDS = ("speeches", "documentation")
_LEAST = 4096  # characters of a topic that is evaluated on: more than its tokens take

ABOUT = (
    f"Perplexity is of the first {EVALUATION_TOKENS} tokens of each of {NUM_EVALUATED} texts of a kind, in windows of "
    f"{LENGTH}; x dense: as a multiple of the dense model's. Speeches: other State of the Union speeches than those "
    "calibrated on. Documentation: topics of Python's own reference (pydoc_data.topics), on which nothing is "
    "calibrated."
)


def write_texts(folder: Path) -> None:
    """Write ``calibration.txt``, and what to evaluate on: a text is named by its kind and a number."""
    speeches = speech_files(since=1990)
    (folder / "calibration.txt").write_bytes(joined(speeches[::2]))
    pages = [topics[name].encode() for name in sorted(topics) if len(topics[name]) >= _LEAST]
    for kind, texts in zip(KINDS, ([path.read_bytes() for path in speeches[1::2]], pages), strict=True):
        for number in range(NUM_EVALUATED):
            (folder / f"{kind}{number}.txt").write_bytes(texts[number * len(texts) // NUM_EVALUATED])


def evaluated(folder: Path) -> list[Path]:
    """Return the texts to evaluate on."""
    return [path for kind in KINDS for path in _of_kind(folder, kind)]


def _of_kind(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}*"))


def by_kind(perplexity: Callable[[Path], float], folder: Path) -> dict[str, float]:
    """Return the perplexity on all texts of a kind as one: every text counts as many tokens."""
    return {
        kind: math.exp(statistics.fmean(math.log(perplexity(path)) for path in _of_kind(folder, kind)))
        for kind in KINDS
    }


def over_dense(entry: Mapping[str, Mapping[str, float]], kind: str) -> float:
    """Return what a run came to on a ``kind`` of text, as a multiple of what the dense model does."""
    return entry["perplexity"][kind] / entry["dense"][kind]
