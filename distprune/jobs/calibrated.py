"""What a job that walks through blocks is asked for, and how it begins: its model, and the windows of tokens."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from distprune.calibration.own_words import SELF
from distprune.jobs.options import CALIBRATION, METHOD, MOST, RUNNING, Job, ask, asked
from distprune.jobs.own_words import Windows, ask_words, counts_of, load_windows
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
        words = self.own_words_or_default()
        if not isinstance(words, str):
            counts = counts_of(self.calibration, self.samples, words, num_text=self.samples or 1, num_in_file=None)
            if self.sequence_length < 2 and counts.total > counts.text:
                raise ValueError(
                    "sequence_length=1 (--sequence-length 1) leaves nothing to write; take windows of a text, and "
                    "own_words=0 (--own-words 0)"
                )

    def own_words_or_default(self) -> int | str | None:
        """Return what is to stand in ``own_words``; ``None``: as :func:`counts_of` says. Local."""
        return self.own_words

    def windows(self, run: Run, model: nn.Module) -> Windows:
        """Return what is there of the windows, and note what was read. Every rank: as :func:`load_windows`."""
        return load_windows(
            run,
            model,
            calibration=self.calibration,
            num_samples=self.samples,
            words=self.own_words_or_default(),
            length=self.sequence_length,
        )
