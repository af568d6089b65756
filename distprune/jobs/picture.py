"""The picture beside a model: of one-shot pruning the error of each layer by block, of fine-tuning the loss by step."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.optional_packages import import_extra
from distprune.figure import new_figure, png_of
from distprune.formatting import share
from distprune.jobs.report import JobReport, PrunedBlocks, Trained, Work

PICTURE_NAME = "report.png"

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a dotted name
_ERROR = (
    "Relative error of each layer on the calibration windows:\n"
    "‖outputs before - outputs after‖ / ‖outputs before‖"  # for the same inputs
)


def can_draw(say: Callable[[str], None]) -> bool:
    """Return whether matplotlib is installed, and say so where it is not. Imports nothing; local."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    say(f"{PICTURE_NAME} is left out: it needs matplotlib, which is not installed: pip install 'distprune[plot]'")
    return False


def picture(report: JobReport[Work]) -> bytes:
    """Return ``report.png``, of pruned blocks or a training. Local.

    Raises:
        ImportError: the extra ``plot`` is not installed.
    """
    work = report.work
    assert isinstance(work, PrunedBlocks | Trained)  # there is no picture of the others
    method = work.method if isinstance(work, Trained) else work.walk.method
    zeros = f"{share(work.zeros.sparsity)} of the prunable weights are zero"
    figure = new_figure(9.0, 4.5)
    figure.suptitle(f"{name_of_model(report.model)}: {zeros}, by {method}")
    axes = figure.subplots()
    if isinstance(work, Trained):
        axes.plot(range(1, len(work.losses) + 1), list(work.losses), linewidth=0.8)
        axes.set(xlabel="step", ylabel="loss of a step, in nats per token")
    else:
        for name, by_depth in errors_by_kind(work.blocks).items():
            axes.plot(list(by_depth), list(by_depth.values()), label=name, marker="o", markersize=3, linewidth=1.2)
        axes.set_title(_ERROR, fontsize="medium")
        axes.set(xlabel="block", ylim=(0, None))
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
    axes.xaxis.set_major_locator(import_extra("matplotlib.ticker", "plot").MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    return png_of(figure)


def errors_by_kind(blocks: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float | None]]:
    """Return the mean relative error of every kind of layer, by the number of the block."""
    kinds: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for block in blocks:
        for layer in block["layers"]:
            kind = kind_of(str(layer["name"]).removeprefix(f"{block['name']}."))
            kinds.setdefault(kind, {}).setdefault(int(block["index"]), []).append(layer)
    return {kind: {i: mean_error(layers) for i, layers in by_block.items()} for kind, by_block in kinds.items()}


def kind_of(name: str) -> str:
    """Return a name with ``*`` for its numbers: a *kind* is one projection, or the same one of all experts.

    >>> kind_of("experts.up.11")
    'experts.up.*'
    """
    return _NUMBER.sub("*", name)


def mean_error(layers: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean relative error of those layers of a block that have one."""
    errors = [float(layer["relative_error"]) for layer in layers if layer["relative_error"] is not None]
    return sum(errors) / len(errors) if errors else None
