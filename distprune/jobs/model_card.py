"""The model card beside a pruned model: README.md, as the Hugging Face hub shows it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from distprune.checkpoint.hub import hub_id_of, name_of_model
from distprune.checkpoint.optional_packages import import_extra
from distprune.jobs.options import options_of
from distprune.jobs.report import OF_A_RUN, JobReport, SmallerModel, Trained, Work, rows
from distprune.patterns.base import Pattern

CARD_NAME = "README.md"

_TAGS = ("distprune", "pruned")
_LOADING = """Load it:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path}  # this directory, or its id on the hub
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
```"""
_VERBS: dict[type, str] = {Trained: "finetune", SmallerModel: "shrink"}  # the others prune
_SAID = {"method", "calibration", "streamed"}  # also where they are the default: they tell jobs apart


def model_card(report: JobReport[Work]) -> bytes:
    """Return ``README.md`` of the job of ``report``. Local.

    The metadata of the card of the model before stay (its license, its languages), and its text follows.
    """
    before = report.model / CARD_NAME
    original = before.read_text(encoding="utf-8") if before.is_file() else ""
    card_type = import_extra("huggingface_hub", "hf").ModelCard
    has_metadata = original.startswith("---")
    card = card_type(original if has_metadata else "---\nlibrary_name: transformers\n---\n" + original)
    name = name_of_model(report.model)
    of_hub = bool(hub_id_of(report.model))
    if of_hub:  # else what the card before says of its base is true of this model, too
        card.data.base_model = name
    is_sparse = report.zeros is not None and report.zeros.num_zeros > 0
    card.data.tags = sorted({*(card.data.tags or ()), *_TAGS, *(("sparse",) if is_sparse else ())})
    shown = [row for row in rows(report.to_dict()) if row[0] not in OF_A_RUN]  # the same job writes the same card
    shown.append(("made with", f"distprune {report.versions['distprune']}, torch {report.versions['torch']}"))
    lines = [f"# {name}, {report.done}", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {how_much} |" for what, how_much in shown]
    lines += ["", _LOADING.format(path=json.dumps(Path(report.job.output).name))]
    if not isinstance(getattr(report.job, "pattern", None), Pattern):  # from Python, it is no option
        model = f"{name}@{report.model.name}" if of_hub else name  # with the commit
        lines += ["", "Made by", "", "```bash", _command(report, model), "```"]
    if card.text.strip():
        lines += ["", f"What follows is the card of {name} before it was {report.done}.", "", card.text.strip()]
    card.text = "\n".join(lines) + "\n"
    return str(card).encode()


def _command(report: JobReport[Work], model: str) -> str:
    """Return the command line that does the job on ``model``, without what it does by default and where files lie."""
    job = report.job
    words = ["distprune", _VERBS.get(type(report.work), "prune"), model]
    for name, option in options_of(type(job)).items():
        value = getattr(job, name)
        is_said = name in _SAID or value != option.default
        if name in ("model", "output") or not (option.decides and is_said):
            continue
        if name == "samples" and value is None:
            value = "all"
        for word in value if isinstance(value, tuple) else [] if value is None or value is False else [value]:
            words.append(option.flag)
            if word is not True:
                text = str(word)
                words.append(os.path.basename(os.path.abspath(text)) if option.is_file else text.removeprefix("torch."))
    return shlex.join([*words, "--output", Path(job.output).name])
