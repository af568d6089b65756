"""What a job writes beside the weights: its report, the model card and a picture."""

from __future__ import annotations

from pathlib import Path

from distprune.collectives import together
from distprune.jobs.model_card import write_card
from distprune.jobs.picture import write_picture
from distprune.jobs.report import JobReport, Work
from distprune.jobs.run import Run, write_report

__all__ = ["write_documents"]


def write_documents(run: Run, report: JobReport[Work], folder: Path, *, draws: bool = False) -> None:
    """Write ``report``, its card, and, if it ``draws``, its picture, into ``folder``, on the first rank.

    Every rank must call it: one round of 64 bytes.

    Raises:
        OSError: on every rank: the disk is full or not writable.
    """
    with together(run.comm):
        if run.comm.rank == 0:
            write_report(report.to_dict(), folder)
            write_card(report, folder, run.told.say)
            if draws:
                write_picture(report, folder, run.told.say)
