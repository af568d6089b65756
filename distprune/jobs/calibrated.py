"""How a job that walks through blocks begins: its model, and the windows it is calibrated with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.own_words import SELF
from distprune.checkpoint.hf_load import load_tokenizer
from distprune.collectives.agree import together
from distprune.jobs.files import JobFiles
from distprune.jobs.options import CALIBRATION, METHOD, MOST, RUNNING, Job, ask, asked
from distprune.jobs.own_words import WindowCounts, Windows, ask_words, counts_of, file_of, load_windows
from distprune.jobs.run import Run
from distprune.oneshot.recipe import TargetsOf


def parse_samples(text: str) -> int | None:
    """Return how many windows are meant; ``None``: all."""
    return None if text == "all" else int(text)


@asked
class CalibratedJob(Job):
    """What a job that walks through the blocks with windows of tokens is asked for beside that.

    Args:
        calibration: Text or JSON-lines file. Work block by block, with the inputs this text gives each layer. self: the
            model writes the text.
        samples: Windows of the text, drawn by --seed; without a text, windows that the model writes.
        sequence_length: Tokens in each.
        own_words: Windows that the model writes beside those of the text: a third continue pieces of the text, the
            others begin as documents of many kinds do, and as chats (96 with admm and shrink, else none). Or a file
            that distprune sample has written: all windows in it.
        targets: Aim at each layer's own output, or at the dense model's (the default of admm and of obs).
        target_share: How much of the way to the dense model's output (half of it).
        offload: Keep activations on the CPU between blocks.
        batch_tokens: Tokens that run together, or one window (8192; of wide models on the CPU fewer).
    """

    calibration: str = ask(default=SELF, is_file=True, metavar="PATH|self", panel=CALIBRATION)
    samples: int | None = ask(default=128, parse=parse_samples, metavar="N|all", least=1, most=MOST, panel=CALIBRATION)
    sequence_length: int = ask(default=2048, least=1, most=MOST, panel=CALIBRATION)
    own_words: int | str | None = ask_words(CALIBRATION)
    targets: TargetsOf | None = ask(default=None, panel=METHOD)
    target_share: float | None = ask(default=None, above=0, most=1, panel=METHOD)
    offload: bool = ask(default=False, decides=False, panel=RUNNING)
    batch_tokens: int | None = ask(default=None, least=1, most=MOST, decides=False, panel=RUNNING)

    @override
    def check_asked(self) -> None:
        super().check_asked()
        if self.calibration == SELF and isinstance(self.own_words, int):
            raise ValueError(
                f"own_words={self.own_words} (--own-words) is beside a text; with calibration={SELF!r} the model "
                "writes all windows, and samples (--samples) says how many"
            )
        if file_of(self.own_words) is None:
            counts = self.counts(num_text=self.samples or 1)
            if self.sequence_length < 2 and counts.total > counts.text:
                raise ValueError(
                    "sequence_length=1 (--sequence-length 1) leaves nothing to write; take windows of a text, and "
                    "own_words=0 (--own-words 0)"
                )

    def counts(self, num_text: int, num_in_file: int | None = None) -> WindowCounts:
        """Return how many windows there are of each kind. Local; raises as :func:`counts_of`."""
        words = self.own_words_or_default()
        wanted = words if isinstance(words, int) else None
        return counts_of(self.calibration, self.samples, wanted, num_text=num_text, num_in_file=num_in_file)

    def own_words_or_default(self) -> int | str | None:
        """Return what is to stand in ``own_words``; ``None``: as :func:`counts_of` says. Local."""
        return self.own_words


@dataclass(frozen=True)
class Calibrated:
    """The model of a job, and the windows that are there before it has written any."""

    model: nn.Module
    windows: Windows
    tokenizer: Any

    def samples(self, run: Run, job: CalibratedJob, files: JobFiles) -> torch.Tensor:
        """Return all windows that ``job`` asks for. Every rank must call it: as :meth:`Windows.samples`."""
        return self.windows.samples(run, self.model, self.tokenizer, job.seed, files)


def load_calibrated(run: Run, job: CalibratedJob) -> Calibrated:
    """Return the model of ``run`` and what is there of the windows that ``job`` asks for, and note what was read.

    Every rank must call it. Communicates and raises as :meth:`Run.load` and :func:`load_windows` do; two rounds of 64
    bytes more.
    """
    with together(run.comm):
        tokenizer = load_tokenizer(run.directory.path)
    model = run.load()
    run.note_weights("model", run.directory)
    windows = load_windows(
        run,
        model,
        tokenizer,
        calibration=job.calibration,
        num_samples=job.samples,
        words=job.own_words_or_default(),
        length=job.sequence_length,
        seed=job.seed,
    )
    return Calibrated(model, windows, tokenizer)
