"""How a job with calibration text begins: its model, the samples, and what a job that goes on must have in common."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import nn

from distprune.calibration import load_samples
from distprune.checkpoint import load_tokenizer
from distprune.collectives import together
from distprune.jobs.block_journal import digest_of
from distprune.jobs.run import Run

__all__ = ["calibration_facts", "load_calibrated"]


class _Calibrated(Protocol):
    """A job that asks for ``samples`` windows of ``sequence_length`` tokens of the text ``calibration``."""

    @property
    def calibration(self) -> str: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def seed(self) -> int: ...


def load_calibrated(run: Run, job: _Calibrated) -> tuple[nn.Module, torch.Tensor]:
    """Return the model of ``run`` and the samples that ``job`` asks for. Every rank must call it.

    Communicates and raises as :meth:`Run.load` and :func:`load_samples` do; a round of 64 bytes more.
    """
    with together(run.comm):
        tokenizer = load_tokenizer(run.directory.path)
    model = run.load()
    run.read["weights as read"] = digest_of(run.comm, model)
    samples = load_samples(
        tokenizer,
        job.calibration,
        model,
        num_samples=job.samples,
        sequence_length=job.sequence_length,
        seed=job.seed,
        group=run.comm,
    )
    return model, samples


def calibration_facts(run: Run, samples: torch.Tensor) -> dict[str, object]:
    """Return :meth:`Run.facts`, with the number of ranks and the tokens of ``samples``. Local."""
    tokens = hashlib.sha256(samples.numpy().tobytes()).hexdigest()
    return run.facts(**{"calibration tokens": tokens, "ranks": run.comm.size})
