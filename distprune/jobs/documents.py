"""What a job writes beside the weights: its report, the model card and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from distprune.collectives import together
from distprune.jobs.model_card import write_card
from distprune.jobs.picture import write_picture
from distprune.jobs.report import JobReport, Work
from distprune.jobs.run import Run, write_report

__all__ = ["write_documents"]

_W = TypeVar("_W", bound=Work)


def write_documents(
    run: Run, folder: Path, before: dict[str, Any], after: dict[str, Any], work: _W, *, draws: bool = False
) -> JobReport[_W]:
    """Return :meth:`Run.report`; write it, its card, and, if it ``draws``, its picture, into ``folder``.

    The first rank writes. Every rank must call it: three rounds of 64 bytes.

    Raises:
        OSError: on every rank: the disk is full or not writable.
        RuntimeError: on every rank: the watcher of one has failed.
    """
    report = run.report(before, after, work)
    with together(run.comm):
        if run.comm.rank == 0:
            write_report(report.to_dict(), folder)
            write_card(report, folder, run.told.say)
            if draws:
                write_picture(report, folder, run.told.say)
    run.told.check()
    return report
