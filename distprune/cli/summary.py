"""What a person reads when a job is done: at most 20 lines of 80 columns. All of it is in report.json."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.inspect import InspectReport
from distprune.formatting import count, gibibytes, share, worst, zeros
from distprune.jobs import JobReport, PlannedWalk, PrunedBlocks, Sampled, SmallerModel, Trained, Work
from distprune.jobs.figures import evaluated, kinds_of_tensors, work_rows
from distprune.jobs.run import REPORT_NAME

_WIDTH = 80  # columns
_MOST_LINES = 20
_MOST_KINDS = 15  # of tensors
_MEBIBYTE = 1 << 20

Row = tuple[str, str]


def job_lines(report: JobReport[Work]) -> list[str]:
    """Return what a job did, what it took, and what to do next."""
    done = {SmallerModel: "made smaller", Trained: "fine-tuned"}.get(type(report.work), "pruned")
    rows = dict(work_rows(report))
    by = "" if isinstance(report.work, Trained) else f" by {rows['method'].partition(',')[0]}"
    title = f"{name_of_model(report.model)}, {done}{by} on {_ranks(report.num_ranks)} ({report.device})"
    rows["method"] = ", ".join([rows["method"], *([rows.pop("pattern")] if "pattern" in rows else [])])
    first = [(name, rows.pop(name)) for name in ("sparsity", "parameters") if name in rows]
    stages = [f"{stage} {took:.1f}" for stage, took in report.seconds.items() if stage != "total"]
    between = [
        *rows.items(),
        *_more_rows(report.work),
        ("seconds", f"{report.seconds.get('total', 0.0):.1f}: {', '.join(stages)}"),
        *_memory_rows(report.peak_memory, report.peak_device_memory),
    ]
    last = [("output", f"{report.job.output} (report.json there has all)")]
    layers, following = _worst_layers(report.work), _command_row(_next(report))
    measured = [(of.what, f"{of.before} -> {of.after} on {of.on}") for of in evaluated(report)]
    room = _MOST_LINES - len([title, *_laid_out([*first, *between, *last]), *layers, *following])
    return [
        title,
        *_laid_out([*first, *_fitting(measured, room), *between]),
        *layers,
        *_laid_out(last),
        *following,
    ]


def sample_lines(sampled: Sampled, model: str) -> list[str]:
    """Return what was written, what it took, and what to do next."""
    num_tokens = sampled.num_samples * sampled.sequence_length
    rows = [
        ("windows", f"{sampled.num_samples:,} of {sampled.sequence_length:,} tokens"),
        ("seconds", f"{sampled.seconds:.1f}, {num_tokens / max(sampled.seconds, 1e-9):,.0f} tokens a second"),
        *_memory_rows(sampled.peak_memory),
        ("output", str(sampled.path)),
    ]
    words = ["prune", model, "--sparsity", "0.5", "--own-words", str(sampled.path), "--output", "pruned"]
    return [f"{Path(model).name}, own words written", *_laid_out(rows), *_command_row(words)]


def plan_lines(walk: PlannedWalk) -> list[str]:
    """Return how much memory a job would take of each rank."""
    total = gibibytes(sum(walk.terms.values()))
    rows = [f"  {gibibytes(num_bytes):>10}  {name}" for name, num_bytes in walk.terms.items()]
    ranks = _ranks(walk.num_ranks)
    return [f"{walk.model}, {walk.num_windows} windows on {ranks}: {total} of memory a rank", *rows]


def inspection_lines(report: InspectReport) -> list[str]:
    """Return the totals of a directory, and its kinds of tensors, in at most 25 lines."""
    sparsity = report.prunable_zeros
    of_all = f"{share(report.sparsity)} of {count(report.num_elements)} parameters are zero"
    rows = [("sparsity", of_all if sparsity is None else zeros(*sparsity))]
    if sparsity is not None:
        rows.append(("all zeros", of_all))
    rows.append(("tensors", f"{len(report.tensors):,}"))
    kinds = kinds_of_tensors(report.tensors)
    lines = [report.path, *_laid_out(rows), "  sparsity  weights  tensors"]
    for name, tensors in [*kinds.items()][:_MOST_KINDS]:
        num_zeros, num_elements = sum(of.num_zeros for of in tensors), sum(of.num_elements for of in tensors)
        common = [pattern for pattern in tensors[0].patterns if all(pattern in of.patterns for of in tensors)]
        holds = f"  {' '.join(common)}" if common else ""
        zero = share(num_zeros / max(num_elements, 1))
        lines.append(f"  {zero:>8}{count(num_elements):>9}{len(tensors):>9}  {name}{holds}")
    more = f", and {len(kinds) - _MOST_KINDS} more kinds" if len(kinds) > _MOST_KINDS else ""
    return [*lines, f"  --json prints all tensors{more}"]


def _memory_rows(of_ranks: Sequence[int], of_devices: Sequence[int] = ()) -> Iterator[Row]:
    """Yield the most that one rank had."""
    for what, sizes in (("peak memory", of_ranks), ("on a device", of_devices)):
        if sizes:
            largest = f", in the largest of {len(sizes)} processes" if len(sizes) > 1 else ""
            yield what, f"{max(sizes) / _MEBIBYTE:,.0f} MiB{largest}"


def _more_rows(work: Work) -> Iterator[Row]:
    """Yield what is of this run alone, or too long for a card."""
    if isinstance(work, Trained):
        yield "loss", f"{work.losses[0]:.4f} -> {work.losses[-1]:.4f}"
        resumed = f"after step {work.resumed_at}"
    elif isinstance(work, PrunedBlocks | SmallerModel):
        if isinstance(work, PrunedBlocks):
            yield "allocation", work.allocation
        elif work.trials:
            yield "tried", f"{len(work.trials)} divisions of the budget"
        resumed = f"at block {work.resumed_at}: seconds and memory are of this run alone"
    else:
        return
    if work.resumed_at:
        yield "resumed", resumed


def _worst_layers(work: Work) -> list[str]:
    if not isinstance(work, PrunedBlocks):
        return []
    layers = [of for block in work.blocks for of in block["layers"]]
    return worst(
        "worst layers, by relative error",
        layers,
        lambda of: of["name"],
        lambda of: of["relative_error"],
        "{:.4f}".format,
    )


def _next(report: JobReport[Work]) -> list[str]:
    """Return the words of the command that a person may want now."""
    job, output = report.job, report.job.output
    if isinstance(report.work, Trained) and (report.model / REPORT_NAME).is_file():
        return ["compare", job.model, output]
    if isinstance(report.work, Trained):
        return ["inspect", output]
    return ["finetune", output, "--teacher", job.model, "--minutes", "10", "--output", f"{output}-finetuned"]


def _command_row(words: Sequence[str]) -> list[str]:
    """Return the lines of a command of ours, with the shell's sign where it goes on."""
    lines = _laid_out([("next", shlex.join(["distprune", *words]))], _WIDTH - 2)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _ranks(num: int) -> str:
    return f"{num} rank{'s' if num > 1 else ''}"


def _fitting(rows: Sequence[Row], num_lines: int) -> list[Row]:
    """Return those first ``rows`` that take at most so many lines, and how many are left out."""
    if len(_laid_out(rows)) <= num_lines:
        return [*rows]
    shown = [*rows]
    while shown and len(_laid_out(shown)) > num_lines - 1:
        shown.pop()
    return [*shown, ("", f"and {len(rows) - len(shown)} more in report.json")]


def _laid_out(rows: Sequence[Row], width: int = _WIDTH) -> list[str]:
    """Return rows of a name and its text, wrapped; a path or another long word is not cut."""
    lines = []
    for name, text in rows:
        lines += wrap(
            text,
            width,
            initial_indent=f"  {name:<13}",
            subsequent_indent=" " * 15,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
