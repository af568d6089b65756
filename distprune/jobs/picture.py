"""The picture beside a model: of one-shot pruning the error of each layer by block, of fine-tuning the loss by step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.optional_packages import import_extra
from distprune.figure import new_figure, png_of
from distprune.formatting import share
from distprune.jobs.figures import errors_by_kind
from distprune.jobs.report import JobReport, PrunedBlocks, Trained, Work

PICTURE_NAME = "report.png"

_NUM_COLORS = 10
_STROKES = ("-", "--", ":", "-.")  # the next one where the colors have been used up
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
    figure = new_figure(9.0, 4.5)
    axes = figure.subplots()
    if isinstance(work, Trained):
        method = work.method
        axes.plot(range(1, len(work.losses) + 1), list(work.losses), linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel("loss of a step, in nats per token")
    else:
        method = work.walk.method
        for number, (name, by_depth) in enumerate(errors_by_kind(work.blocks).items()):
            style = {"linestyle": _STROKES[number // _NUM_COLORS % len(_STROKES)], "linewidth": 1.2}
            axes.plot(list(by_depth), list(by_depth.values()), label=name, marker="o", markersize=3, **style)
        axes.set_title(_ERROR, fontsize="medium")
        axes.set_xlabel("block")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
    axes.xaxis.set_major_locator(import_extra("matplotlib.ticker", "plot").MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    zeros = f"{share(work.zeros.sparsity)} of the prunable weights are zero"
    figure.suptitle(f"{name_of_model(report.model)}: {zeros}, by {method}")
    return png_of(figure)
