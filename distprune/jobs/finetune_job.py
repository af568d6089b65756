"""What a fine-tuning job is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from typing_extensions import override

from distprune.jobs.run import Job
from distprune.jobs.unfinished import check_unfinished

__all__ = ["FinetuneJob"]


@dataclass(frozen=True, kw_only=True)
class FinetuneJob(Job):
    """Train a pruned model with its zeros held; the fields of :class:`Job`, whose ``seed`` draws the text.

    Args:
        data: a text or JSON-lines file. Every step reads ``batch_size`` windows of ``sequence_length`` tokens, over
            all ranks, drawn from all over it.
        steps: how many. Either these are given, or ``minutes``, without the time to load, evaluate and write.
        teacher: the dense model, named as ``model`` is: the loss is then the Kullback-Leibler divergence from what it
            predicts.
        learning_rate: at its highest, after a tenth of the job.
        compute_dtype: of forwards, bfloat16 or float32; weights and moments are float32 until they are written.
        save_every: seconds between two states that ``resume`` can go on with.
        resume: go on where a job that was killed has saved its last state.
    """

    data: str
    steps: int | None = None
    minutes: float | None = None
    teacher: str | None = None
    learning_rate: float = 2e-4
    batch_size: int = 8
    sequence_length: int = 256
    compute_dtype: torch.dtype = torch.bfloat16
    save_every: float = 300.0
    resume: bool = False

    def check_length(self) -> None:
        """Raise a ValueError unless it is said in one way how long to train, and how. Local."""
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"either steps or minutes are called for, not {self.steps=} and {self.minutes=}")
        for name in ("steps", "minutes", "learning_rate", "batch_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} is not above 0, and finite")
        if self.compute_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"compute_dtype={self.compute_dtype} is neither bfloat16 nor float32")
        if self.sequence_length < 2 or not self.save_every >= 0:
            raise ValueError(
                f"{self.sequence_length=}, {self.save_every=}: a window has two tokens or more, and time goes forward"
            )

    @override
    def check(self) -> None:
        check_unfinished(self, self.resume)
        self.check_length()
        super().check()

    @override
    def inputs(self) -> list[str]:
        return [*super().inputs(), self.data, *([] if self.teacher is None else [self.teacher])]

    def share(self, num_steps: int, seconds: float) -> float:
        """Return how much of the job is done after so many steps and seconds."""
        return num_steps / self.steps if self.steps is not None else seconds / (60 * (self.minutes or 1))
