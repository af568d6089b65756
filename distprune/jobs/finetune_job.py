"""What a fine-tuning job is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from typing_extensions import override

from distprune.jobs.options import Job, ask
from distprune.jobs.unfinished import check_unfinished

__all__ = ["FinetuneJob"]

_MOST = 1 << 30
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(Job):
    """Train a pruned model with its zeros held.

    The learning rate is at its highest after a tenth of the job. With a teacher the loss is the Kullback-Leibler
    divergence from what it predicts.
    """

    data: str = field(metadata=ask("Text or JSON-lines file to train on.", metavar="PATH", is_file=True))
    steps: int | None = field(default=None, metadata=ask("How many steps to do; or else --minutes.", least=1))
    minutes: float | None = field(
        default=None,
        metadata=ask("How long to train, without the time to load, evaluate and write; or else --steps.", above=0),
    )
    teacher: str | None = field(
        default=None, metadata=ask("The dense model: learn what it predicts, and not the text.", is_file=True)
    )
    learning_rate: float = field(default=2e-4, metadata=ask("Of AdamW, at its highest.", above=0))
    batch_size: int = field(default=8, metadata=ask("Windows a step, over all ranks.", least=1, most=_MOST))
    sequence_length: int = field(default=256, metadata=ask("Tokens in each.", least=2, most=_MOST))
    compute_dtype: torch.dtype = field(
        default=torch.bfloat16, metadata=ask("Of forwards. Weights are trained in float32.", choices=_DTYPES)
    )
    save_every: float = field(
        default=300.0, metadata=ask("Seconds between states that --resume can go on with.", least=0)
    )
    resume: bool = field(
        default=False,
        metadata=ask("Go on where a job that was killed has saved its last state.", in_facts=False),
    )

    @override
    def check_asked(self) -> None:
        super().check_asked()
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"give steps or minutes, not steps={self.steps} and minutes={self.minutes}")

    @override
    def check(self) -> None:
        check_unfinished(self, self.resume)
        super().check()

    @override
    def inputs(self) -> list[str]:
        return [*super().inputs(), self.data, *([] if self.teacher is None else [self.teacher])]

    def share(self, num_steps: int, seconds: float) -> float:
        """Return how much of the job is done after so many steps and seconds."""
        return num_steps / self.steps if self.steps is not None else seconds / (60 * (self.minutes or 1))
