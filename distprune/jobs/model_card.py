"""The model card beside a pruned model: README.md, as the Hugging Face hub shows it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distprune.checkpoint import import_extra, name_of_model
from distprune.jobs.figures import by_metric, removal_rows, shares_by_kind
from distprune.jobs.options import Job, options_of
from distprune.jobs.report import JobReport, PrunedBlocks, SmallerModel, Trained, Walked, Work
from distprune.patterns import Pattern
from distprune.pruning import PruneReport

__all__ = ["CARD_NAME", "model_card", "write_card"]

CARD_NAME = "README.md"

_TAGS = ("distprune", "pruned")
# What was done in words, the command, and what its output is called.
_DONE: dict[type, tuple[str, str, str]] = {
    Trained: ("fine-tuned with its zeros held", "finetune", "finetuned"),
    SmallerModel: ("made smaller", "shrink", "smaller"),
    PruneReport: ("pruned", "prune", "pruned"),
    PrunedBlocks: ("pruned", "prune", "pruned"),
}


def write_card(report: JobReport[Work], folder: Path, say: Callable[[str], None]) -> None:
    """Write ``README.md``, the model card. Local; for one rank.

    One that cannot be made, of a model whose own card is damaged, is left out, and that is said.
    """
    original = report.model / CARD_NAME
    try:
        card = model_card(report, original.read_text(encoding="utf-8") if original.is_file() else None)
    except Exception as error:
        say(f"{CARD_NAME} is left as it was: {type(error).__name__}: {error}")
        return
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


def model_card(report: JobReport[Work], original: str | None) -> str:
    """Return the card of the job of ``report``; ``original``: the card of the model before. Local.

    The metadata of ``original`` stay (its license, its languages), and its text follows.
    """
    card_type = import_extra("huggingface_hub", "hf").ModelCard
    begins = original is not None and original.startswith("---")
    card = card_type(original if begins else "---\nlibrary_name: transformers\n---\n" + (original or ""))
    path = report.model
    name = name_of_model(path)
    card.data.base_model = name
    is_sparse = not isinstance(report.work, SmallerModel)
    card.data.tags = sorted({*(card.data.tags or ()), *_TAGS, *(("sparse",) if is_sparse else ())})
    done, verb, result = _DONE[type(report.work)]
    rows = [*_of_work(report.job, report.work), *_of_all(report)]
    lines = [f"# {name}, {done}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
    if not isinstance(getattr(report.job, "pattern", None), Pattern):  # from Python, it is no option
        revision = "" if name == path.name else f"@{path.name}"  # of the hub: the commit
        lines += ["", "Made by", "", "```bash", _command(report.job, verb, name + revision, result), "```"]
    if card.text.strip():
        lines += ["", f"What follows is the card of {name} before it was {done}.", "", card.text.strip()]
    card.text = "\n".join(lines) + "\n"
    return str(card)


def _of_work(job: Job, work: Work) -> Iterator[tuple[str, str]]:
    """Yield what was done: (what, how much)."""
    asked = job.arguments()
    if isinstance(work, PruneReport):
        yield "zeros in the pruned weights", _share(work.num_zeros, work.num_elements)
        yield from (("method", work.score), ("pattern", work.pattern))
    elif isinstance(work, Trained):
        yield "zeros", _share(work.num_zeros, work.num_elements)
        yield "method", work.method
        windows = f"{asked['batch_size']} windows of {asked['sequence_length']} tokens"
        yield "trained", f"{work.num_steps} steps of {windows} of {Path(asked['data']).name}"
    elif isinstance(work, SmallerModel):
        yield from removal_rows(work)
        yield "method", f"{work.walk.method}, {asked['refit'].replace('_', ' ')}"
        yield "calibration", _calibration(asked, work)
    else:
        layers = [of for block in work.blocks for of in block["layers"]]
        zeros, elements = (sum(of[key] for of in layers) for key in ("num_zeros", "num_elements"))
        yield "zeros in the pruned weights", _share(zeros, elements)
        yield from (("method", work.walk.method), ("pattern", work.pattern))
        if work.allocation == "gradients":
            by_kind = (f"{kind} {shares}" for kind, shares in shares_by_kind(work.blocks).items())
            yield "zeros by layer, allocated by gradients", "<br>".join(by_kind)
        yield "calibration", _calibration(asked, work)


def _calibration(asked: Mapping[str, Any], work: Walked) -> str:
    return f"{work.walk.num_samples} windows of {asked['sequence_length']} tokens of {Path(asked['calibration']).name}"


def _of_all(report: JobReport[Work]) -> Iterator[tuple[str, str]]:
    for file, after in report.after.perplexity.items():
        where = f"{Path(file).name}, in windows of {report.job.evaluation_length} tokens"
        yield f"perplexity on {where}", f"{report.before.perplexity[file]:.2f} before, {after:.2f} after"
    for task, metric, before, after in by_metric(report):
        yield f"{task}, {metric}", f"{before:.4f} before, {after:.4f} after"
    yield "made with", f"distprune {report.versions['distprune']}, torch {report.versions['torch']}"


def _share(num_zeros: int, num_elements: int) -> str:
    return f"{num_zeros:,} of {num_elements:,} ({num_zeros / max(num_elements, 1):.2%})"


def _command(job: Job, verb: str, model: str, result: str) -> str:
    """Return the command line that does the job on ``model``, and writes to its name and ``result``."""
    words = ["distprune", verb, model]
    for name, option in options_of(type(job)).items():
        value = getattr(job, name)
        if name in ("model", "output") or not (option.in_card and option.in_facts) or value is False:
            continue
        if name == "samples" and value is None:
            value = "all"
        for each in value if isinstance(value, tuple) else [] if value is None else [value]:
            words.append(option.flag)
            if each is not True:
                words.append(Path(each).name if option.is_file else str(each).removeprefix("torch."))
    return shlex.join([*words, "--output", f"{model.partition('@')[0].rpartition('/')[2]}-{result}"])
