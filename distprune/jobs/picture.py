"""The pictures of jobs: of one-shot and removal, relative error and sparsity by depth, a line for each kind of linear
map; of fine-tuning, the loss.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distprune.checkpoint import import_extra, name_of_model
from distprune.figure import new_figure
from distprune.jobs.figures import by_kind
from distprune.jobs.report import JobReport, SmallerModel, Trained, Work
from distprune.pruning import PruneReport

PICTURE_NAME = "report.png"

_STROKES = ("-", "--", ":", "-.")  # the next one where the colors have been used up


def can_draw(say: Callable[[str], None]) -> bool:
    """Return whether matplotlib is installed, and say so where it is not. Imports nothing; local."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    say(f"{PICTURE_NAME} is left out: it needs matplotlib, which is not installed: pip install 'distprune[plot]'")
    return False


def picture(report: JobReport[Work]) -> bytes:
    """Return ``report.png``, of a walk or a training. Local; raises as :func:`draw`."""
    work, name = report.work, name_of_model(report.model)
    assert not isinstance(work, PruneReport)  # there is no picture of it
    if isinstance(work, Trained):
        figure = draw_losses(work.losses, f"{name}: {work.method}")
    else:
        title = f"{name}: {work.walk.method}, {work.pattern}"
        if isinstance(work, SmallerModel):
            gone = sorted({*range(work.num_layers_before)} - {*work.layers})
            figure = draw(work.blocks, title, share="removed", gone=gone)
        else:
            figure = draw(work.blocks, title)
    written = io.BytesIO()
    figure.canvas.print_png(written)
    return written.getvalue()


def draw(blocks: Sequence[Mapping[str, Any]], title: str, *, share: str = "sparsity", gone: Sequence[int] = ()) -> Any:
    """Return the matplotlib figure on an Agg canvas: the errors above, the sparsities, called ``share``, below.

    Blocks that are ``gone`` are grey.

    Raises:
        ImportError: the extra ``plot`` is not installed.
    """
    figure = new_figure(9.0, 7.0)
    matplotlib, ticks = import_extra("matplotlib", "plot"), import_extra("matplotlib.ticker", "plot")
    colors = matplotlib.cycler(color=matplotlib.colormaps["tab10"].colors)
    errors, sparsities = figure.subplots(2, 1, sharex=True)
    for axes in (errors, sparsities):
        axes.grid(alpha=0.3)
        axes.set_prop_cycle(matplotlib.cycler(linestyle=_STROKES) * colors)
        for index in gone:
            axes.axvspan(index - 0.5, index + 0.5, color="0.85")
    for name, by_depth in by_kind(blocks).items():
        style = {"label": name, "marker": "o", "markersize": 3, "linewidth": 1.2}
        errors.plot(list(by_depth), [kind.error for kind in by_depth.values()], **style)  # None is no point
        sparsities.plot(list(by_depth), [kind.sparsity for kind in by_depth.values()], **style)
    errors.set_ylabel("relative error")
    errors.set_ylim(bottom=0)
    sparsities.set_ylabel(share)
    sparsities.set_ylim(0, 1)
    sparsities.yaxis.set_major_formatter(ticks.PercentFormatter(xmax=1.0))
    sparsities.set_xlabel("block")
    sparsities.xaxis.set_major_locator(ticks.MaxNLocator(integer=True))
    figure.suptitle(title)
    figure.legend(*errors.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def draw_losses(losses: Sequence[float], title: str) -> Any:
    """Return the matplotlib figure of the losses, one a step, on an Agg canvas; raises as :func:`draw`."""
    figure = new_figure(9.0, 5.0)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), list(losses), linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    figure.suptitle(title)
    return figure
