"""The model card beside a pruned model: README.md, as the Hugging Face hub shows it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from distprune.checkpoint import import_extra, name_of_model
from distprune.jobs.figures import by_kind, evaluated, range_of, trial_rows, work_rows
from distprune.jobs.options import Job, options_of
from distprune.jobs.report import JobReport, PrunedBlocks, SmallerModel, Trained, Work
from distprune.patterns import Pattern
from distprune.pruning import PruneReport

CARD_NAME = "README.md"

_TAGS = ("distprune", "pruned")
# What was done in words, the command, and what its output is called.
_DONE: dict[type, tuple[str, str, str]] = {
    Trained: ("fine-tuned with its zeros held", "finetune", "finetuned"),
    SmallerModel: ("made smaller", "shrink", "smaller"),
    PruneReport: ("pruned", "prune", "pruned"),
    PrunedBlocks: ("pruned", "prune", "pruned"),
}


def model_card(report: JobReport[Work]) -> bytes:
    """Return ``README.md`` of the job of ``report``. Local.

    The metadata of the card of the model before stay (its license, its languages), and its text follows.
    """
    before = report.model / CARD_NAME
    original = before.read_text(encoding="utf-8") if before.is_file() else ""
    card_type = import_extra("huggingface_hub", "hf").ModelCard
    has_metadata = original.startswith("---")
    card = card_type(original if has_metadata else "---\nlibrary_name: transformers\n---\n" + original)
    path = report.model
    name = name_of_model(path)
    card.data.base_model = name
    is_sparse = not isinstance(report.work, SmallerModel)
    card.data.tags = sorted({*(card.data.tags or ()), *_TAGS, *(("sparse",) if is_sparse else ())})
    done, verb, result = _DONE[type(report.work)]
    rows = [f"| {what} | {how_much} |" for what, how_much in _rows(report)]
    lines = [f"# {name}, {done}", "", "| | |", "|---|---|", *rows]
    if not isinstance(getattr(report.job, "pattern", None), Pattern):  # from Python, it is no option
        revision = "" if name == path.name else f"@{path.name}"  # of the hub: the commit
        lines += ["", "Made by", "", "```bash", _command(report.job, verb, name + revision, result), "```"]
    if card.text.strip():
        lines += ["", f"What follows is the card of {name} before it was {done}.", "", card.text.strip()]
    card.text = "\n".join(lines) + "\n"
    return str(card).encode()


def _rows(report: JobReport[Work]) -> Iterator[tuple[str, str]]:
    """Yield what was done: (what, how much)."""
    yield from work_rows(report)
    if isinstance(report.work, PrunedBlocks) and report.work.allocation == "gradients":
        shares = {
            kind: range_of([of_block.sparsity for of_block in by_depth.values()], ".1%")
            for kind, by_depth in by_kind(report.work.blocks).items()
        }
        yield "zeros by layer, allocated by gradients", "<br>".join(f"{kind} {share}" for kind, share in shares.items())
    if isinstance(report.work, SmallerModel):
        yield from trial_rows(report.work)
    yield from ((f"{of.what} on {of.on}", f"{of.before} before, {of.after} after") for of in evaluated(report))
    yield "made with", f"distprune {report.versions['distprune']}, torch {report.versions['torch']}"


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
