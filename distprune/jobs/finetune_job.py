"""What a fine-tuning job is asked for."""

from __future__ import annotations

import torch
from typing_extensions import override

from distprune.jobs.options import MOST, ask, asked
from distprune.jobs.unfinished import ResumableJob

__all__ = ["FinetuneJob"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@asked
class FinetuneJob(ResumableJob):
    """Train a pruned model with its zeros held.

    The learning rate is at its highest after a tenth of the job. With a teacher the loss is the Kullback-Leibler
    divergence from what it predicts.
    """

    data: str = ask("Text or JSON-lines file to train on.", is_file=True)
    steps: int | None = ask("How many steps to do; or else --minutes.", default=None, least=1)
    minutes: float | None = ask(
        "How long to train, without the time to load, evaluate and write; or else --steps.", default=None, above=0
    )
    teacher: str | None = ask("The dense model: learn what it predicts, and not the text.", default=None, is_file=True)
    learning_rate: float = ask("Of AdamW, at its highest.", default=2e-4, above=0)
    batch_size: int = ask("Windows a step, over all ranks.", default=8, least=1, most=MOST)
    sequence_length: int = ask("Tokens in each.", default=256, least=2, most=MOST)
    compute_dtype: torch.dtype = ask(
        "Of forwards. Weights are trained in float32.", default=torch.bfloat16, choices=_DTYPES
    )
    save_every: float = ask("Seconds between states that --resume can go on with.", default=300.0, least=0)

    @override
    def check_asked(self) -> None:
        super().check_asked()
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"give steps or minutes, not steps={self.steps} and minutes={self.minutes}")

    @override
    def inputs(self) -> list[str]:
        return [*super().inputs(), self.data, *([] if self.teacher is None else [self.teacher])]

    def share(self, num_steps: int, seconds: float) -> float:
        """Return how much of the job is done after so many steps and seconds."""
        return num_steps / self.steps if self.steps is not None else seconds / (60 * (self.minutes or 1))
