"""The pictures of jobs: of one-shot pruning the error and, where layers differ, the sparsity of each layer; of removal
what stays of each block; of fine-tuning the loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.optional_packages import import_extra
from distprune.figure import new_figure, png_of
from distprune.formatting import count, share
from distprune.jobs.figures import Kind, by_kind
from distprune.jobs.report import JobReport, PrunedBlocks, SmallerModel, Trained, Work
from distprune.pruning.report import PruneReport

PICTURE_NAME = "report.png"

_STROKES = ("-", "--", ":", "-.")  # the next one where the colors have been used up
_EVEN = 0.005  # shares that differ by less look like one line
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
    """Return ``report.png``, of a walk or a training. Local; raises as :func:`draw_blocks`."""
    work, name = report.work, name_of_model(report.model)
    assert not isinstance(work, PruneReport)  # there is no picture of it
    if isinstance(work, Trained):
        figure = draw_losses(
            work.losses, f"{name}: {work.method}, {share(work.zeros.sparsity)} of its weights stay zero"
        )
    elif isinstance(work, SmallerModel):
        gone = share(1 - work.num_parameters / max(work.num_parameters_before, 1))
        figure = draw_removal(work, f"{name}: {gone} of its parameters are removed, by {work.walk.method}")
    else:
        figure = draw_blocks(work.blocks, f"{name}: {_pruned(work, report.job.arguments()['pattern'])}")
    return png_of(figure)


def _pruned(work: PrunedBlocks, pattern: str) -> str:
    shown = "" if pattern.lower().startswith("unstructured") else f" ({pattern})"
    return f"{share(work.zeros.sparsity)} of the prunable weights are zero, by {work.walk.method}{shown}"


def draw_blocks(blocks: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Return the matplotlib figure on an Agg canvas: errors, and below them sparsities, where layers differ in them.

    Raises:
        ImportError: the extra ``plot`` is not installed.
    """
    shares = [kind.sparsity for by_depth in by_kind(blocks).values() for kind in by_depth.values()]
    differ = bool(shares) and max(shares) - min(shares) > _EVEN
    figure = new_figure(9.0, 7.5 if differ else 4.5)
    panels = figure.subplots(1 + differ, 1, sharex=True, squeeze=False).flatten()
    _draw_errors(panels[0], blocks)
    if differ:
        ticks = import_extra("matplotlib.ticker", "plot")
        _draw_lines(panels[1], blocks, lambda kind: kind.sparsity)
        panels[1].set_title("Sparsity: the share of zeros of each layer", fontsize="medium")
        panels[1].yaxis.set_major_formatter(ticks.PercentFormatter(xmax=1.0))
    _finish(figure, panels, title)
    return figure


def draw_removal(work: SmallerModel, title: str) -> Any:
    """Return the matplotlib figure of what stays of each block, and below it of the errors; raises likewise."""
    has_errors = any(kind.error is not None for of in by_kind(work.blocks).values() for kind in of.values())
    figure = new_figure(9.0, 7.5 if has_errors else 4.0)
    panels = figure.subplots(1 + has_errors, 1, sharex=True, squeeze=False).flatten()
    stays, ticks = panels[0], import_extra("matplotlib.ticker", "plot")
    left = dict(zip(work.layers, map(_left, work.blocks), strict=True))
    kinds = list(dict.fromkeys(kind for of in left.values() for kind in of)) or ["layers"]
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        at = [index + (number + 0.5) * width - 0.4 for index in range(work.num_layers_before)]
        heights = [left[index].get(kind, (1, 1)) if index in left else (0, 1) for index in range(len(at))]
        sizes = {of[kind] for of in left.values() if kind in of}
        said = f", {count(min(sizes)[0])} of {count(max(sizes)[1])}" if len(sizes) == 1 else ""
        stays.bar(at, [1.0] * len(at), width, color="0.9")
        shares = [num / before for num, before in heights]
        stays.bar(at, shares, width, color=f"C{number}", label=f"{kind.replace('_', ' ')}{said}")
    stays.set_title("What stays of each block (grey: removed)", fontsize="medium")
    stays.yaxis.set_major_formatter(ticks.PercentFormatter(xmax=1.0))
    if has_errors:
        _draw_errors(panels[1], work.blocks)
    _finish(figure, panels, title)
    return figure


def _left(block: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return how many units of each kind stay in a block, of how many."""
    found: dict[str, tuple[int, int]] = {}
    for of in block["kept"]:
        num, before = found.get(of["kind"], (0, 0))
        found[of["kind"]] = (num + of["num"], before + of["num_before"])
    return found


def draw_losses(losses: Sequence[float], title: str) -> Any:
    """Return the matplotlib figure of the losses, one a step, on an Agg canvas; raises as :func:`draw_blocks`."""
    figure = new_figure(9.0, 4.5)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), list(losses), linewidth=0.8)
    _whole_steps(axes)
    axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    axes.set_ylabel("loss of a step, in nats per token")
    figure.suptitle(title)
    return figure


def _draw_errors(panel: Any, blocks: Sequence[Mapping[str, Any]]) -> None:
    _draw_lines(panel, blocks, lambda kind: kind.error)
    panel.set_title(_ERROR, fontsize="medium")
    panel.set_ylim(bottom=0)


def _draw_lines(panel: Any, blocks: Sequence[Mapping[str, Any]], value: Callable[[Kind], float | None]) -> None:
    """Draw a line for each kind of linear layer, over the blocks."""
    matplotlib = import_extra("matplotlib", "plot")
    colors = matplotlib.cycler(color=matplotlib.colormaps["tab10"].colors)
    panel.set_prop_cycle(matplotlib.cycler(linestyle=_STROKES) * colors)
    for name, by_depth in by_kind(blocks).items():
        style = {"label": name, "marker": "o", "markersize": 3, "linewidth": 1.2}
        panel.plot(list(by_depth), [value(kind) for kind in by_depth.values()], **style)  # None is no point
    panel.grid(alpha=0.3)


def _finish(figure: Any, panels: Sequence[Any], title: str) -> None:
    """Say what the lines are, and number the blocks below the last of ``panels``."""
    _whole_steps(panels[-1])
    panels[-1].set_xlabel("block")
    figure.suptitle(title)
    shown: list[str] = []
    for panel in panels:
        labels = panel.get_legend_handles_labels()[1]
        if labels != shown:
            panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
        shown = labels


def _whole_steps(axes: Any) -> None:
    axes.xaxis.set_major_locator(import_extra("matplotlib.ticker", "plot").MaxNLocator(integer=True))
