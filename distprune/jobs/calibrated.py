"""How a job with calibration text begins: its model and the samples."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration import load_samples, token_digest
from distprune.checkpoint import load_tokenizer
from distprune.collectives import together
from distprune.jobs.block_journal import digest_of
from distprune.jobs.options import MOST, ask, asked, parse_samples
from distprune.jobs.run import Run
from distprune.jobs.unfinished import ResumableJob
from distprune.oneshot import TargetsOf


@asked
class CalibratedJob(ResumableJob):
    """What a job that walks through the blocks with a text is asked for beside that."""

    calibration: str = ask(
        "Text or JSON-lines file. Work block by block, with the inputs this text gives each layer.",
        is_file=True,
    )
    samples: int | None = ask(
        "Calibration windows, drawn by --seed.", default=128, parse=parse_samples, metavar="N|all", least=1, most=MOST
    )
    sequence_length: int = ask("Tokens in each.", default=2048, least=1, most=MOST)
    targets: TargetsOf | None = ask(
        "Aim at each layer's own output, or at the dense model's (the default of admm and of obs).", default=None
    )
    target_share: float | None = ask(
        "How much of the way to the dense model's output (half of it).", default=None, above=0, most=1
    )
    offload: bool = ask("Keep activations on the CPU between blocks.", default=False)

    @override
    def inputs(self) -> list[str]:
        return [*super().inputs(), self.calibration]


def load_calibrated(run: Run, job: CalibratedJob) -> tuple[nn.Module, torch.Tensor]:
    """Return the model of ``run`` and the samples that ``job`` asks for, and note what was read.

    Every rank must call it. Communicates and raises as :meth:`Run.load` and :func:`load_samples` do; two rounds of 64
    bytes more.
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
    with together(run.comm):
        run.read["calibration tokens"] = token_digest(samples)
    return model, samples
