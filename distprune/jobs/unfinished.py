"""A job that can be killed and go on: what it has done lies beside the target, with a journal of it.

``.NAME.unfinished`` holds the journal and either the model's files at their full size, of which some blocks or
stretches are written, or what is needed to make them. The folder becomes the target when everything is there; or
another one beside it does, in which the output is made in one go. Either way the journal comes along, and is removed
last: a target that holds one says whose folder is left beside it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from distprune.checkpoint.disk import partial_of
from distprune.checkpoint.hf_directory import INDEX_NAME, HfDirectory, small_folders
from distprune.checkpoint.outputs import check_shared, make_staging, publish
from distprune.checkpoint.replaceable import check_output
from distprune.collectives.agree import agree, together
from distprune.collectives.base import Communicator
from distprune.collectives.slow import work_together
from distprune.jobs.journal import JOURNAL_NAME, Item, Journal
from distprune.jobs.leftovers import WORDS_NAME, folder_of, remove_folder, states_in, tidy
from distprune.jobs.model_card import CARD_NAME
from distprune.jobs.options import RUNNING, Job, ask, asked
from distprune.jobs.picture import PICTURE_NAME
from distprune.jobs.run import REPORT_NAME, Run
from distprune.mistakes import is_expected
from distprune.version import __version__

STATE = "state"  # an item's kind: of a training, in a directory of its own
_OWN_NAMES = {JOURNAL_NAME, WORDS_NAME, INDEX_NAME, REPORT_NAME, PICTURE_NAME, CARD_NAME}
VERSIONS = {"distprune": str(__version__), "torch": torch.__version__}  # with others other bytes may come
_AT_FAULT = (ValueError, TypeError, NotImplementedError)  # the input is: a job that goes on would get no further


class Unfinished:
    """The ``folder`` of an unfinished job, and its journal, the same on every rank; the first one writes it."""

    def __init__(self, comm: Communicator, folder: Path, journal: Journal) -> None:
        self.comm, self.folder, self._journal, self.sync_files = comm, folder, journal, journal.sync
        self.result = folder  # what becomes the target

    @property
    def states(self) -> list[Path]:
        """The directories of saved states that are there."""
        return states_in(self.folder)

    def state(self, num_steps: int) -> Path:
        """Return the directory of the state after so many steps."""
        return self.folder / f"state-{num_steps}"

    def items(self, kind: str) -> list[Item]:
        """Return what is recorded of this kind, in order."""
        return [item for item in self._journal.items if item.kind == kind]

    def record(self, item: Item) -> None:
        """Note that ``item`` is done; on every rank, if it stands for files. Every rank must call it. Local."""
        self._journal.append(item)

    def recall(self, kind: str, make: Callable[[], Any], *, at_once: bool = False) -> Any:
        """Return the value that is recorded under ``kind``, or what ``make`` returns, and record that.

        ``at_once``: not only with the next item. Every rank must call it, and find the same: what ``make``
        communicates, and a round of 64 bytes.
        """
        if found := self.items(kind):
            return found[0].value
        value = make()
        with together(self.comm):
            self._journal.append(Item(kind, value), at_once=at_once)
        return value

    def verify(self, item: Item, digest: str) -> bool:
        """Return whether ``item`` is on the disk as it was written, where ``digest`` is found now.

        If it is not, it and what was done after it count as not done. Every rank must call it. Local.
        """
        if item.digest != digest:
            self._journal.forget(item)
        return item.digest == digest

    def is_same(self, kind: str, value: Any) -> bool:
        """Return whether ``value`` is recorded under ``kind``, if anything is; if not, nothing counts as done.

        It is recorded with the next item. Every rank must call it, with the same: a round of 64 bytes.
        """
        others = [item for item in self.items(kind) if item.value != value]
        if others:
            self._journal.forget(others[0])
        self.recall(kind, lambda: value)
        return not others

    def begin_result(self, target: Path) -> None:
        """Let what becomes the ``target`` be a new folder. Every rank must call it; raises as :func:`make_staging`."""
        self.result = make_staging(self.comm, target)


@asked
class ResumableJob(Job):
    """A job that can go on."""

    resume: bool = ask("Go on where a job that was killed has stopped.", default=False, decides=False, panel=RUNNING)

    @override
    def check(self) -> None:
        """Raise also if ``resume`` is asked for and the job has finished."""
        target = Path(self.output)
        is_left = (folder_of(target) / JOURNAL_NAME).exists()
        if self.resume and not self.overwrite and (target / REPORT_NAME).is_file() and not is_left:
            raise FileExistsError(f"nothing is left to resume: {self.output} is finished, it holds a {REPORT_NAME}")
        super().check()


@contextmanager
def open_unfinished(
    run: Run, job: ResumableJob, *, same_ranks: bool = True, sync_files: bool = True
) -> Iterator[Unfinished]:
    """Yield the folder for a ``job``, new or, with ``resume``, the one that is there.

    A resumed job must have the options that decide the result, read the same files, be run by the same versions and,
    with ``same_ranks``, on as many ranks.

    When the body ends, the folder becomes the output. If the body raises, the folder is kept if anything is recorded in
    it. Only a mistake in the input that a check has found removes more, and only what this start has recorded, but for
    the state of a training: what an earlier start has recorded shows that the input serves. Without ``sync_files``
    neither the folder nor its journal waits for the disk: a resumed job must verify what is recorded.

    Every rank must enter it, and the first must hold the target's lock; four rounds, and those of :func:`publish`.

    Raises:
        FileExistsError: on every rank: an unfinished job is there, and ``resume`` is off.
        ValueError: on every rank: the folder is another job's, its journal is damaged, or it holds something that this
            job has not written.
        OSError, ValueError: on every rank: as ``publish`` raises.
    """
    comm, target = run.comm, run.output
    folder = folder_of(target)
    with together(comm):
        facts = {**job.facts(), **VERSIONS, **run.read, **({"ranks": comm.size} if same_ranks else {})}
        journal = Journal(folder / JOURNAL_NAME, facts, writes=comm.rank == 0, sync=sync_files)
        if journal.is_begun:
            _check_same_job(folder, journal.facts, journal.asked, job.resume)
    agree(comm, {"unfinished": str(folder), "journal": [journal.facts, list(map(vars, journal.items))]})
    with together(comm):
        if comm.rank == 0 and not journal.is_begun:
            remove_folder(folder, run.directory.path)  # killed before anything was recorded
            if os.path.lexists(folder):
                raise FileExistsError(f"{folder} holds more than a job has written; move it away")
            folder.mkdir()
    was_begun = journal.is_begun
    if job.resume and not journal.is_begun:
        run.reporter.say("nothing was recorded yet: starting at the beginning")
    unfinished = Unfinished(comm, folder, journal)
    with together(comm):
        check_shared(folder)
        if comm.rank == 0:
            _check_files(unfinished, run.directory)
    try:
        yield unfinished
    except BaseException as error:  # also Ctrl-C and SIGTERM
        is_input = isinstance(error, _AT_FAULT) and is_expected(error) and not was_begun
        if unfinished.items(STATE) if is_input else journal.is_begun:
            if "resume=" not in str(error):
                run.reporter.say(f"what is done is kept in {folder}; resume=True (--resume) goes on with it")
        elif isinstance(error, Exception) and comm.rank == 0:
            remove_folder(folder, run.directory.path)
        raise
    if unfinished.result != folder:
        with together(comm):
            journal.flush()
            if comm.rank == 0:
                shutil.copyfile(folder / JOURNAL_NAME, unfinished.result / JOURNAL_NAME)
    check = partial(check_output, target, overwrite=job.overwrite, inputs=run.inputs)
    publish(comm, unfinished.result, target, check, sync_files=sync_files)

    def clear() -> None:
        if comm.rank == 0:
            tidy(target)

    work_together(comm, clear)  # last: a job that is killed in between has finished, before that it can go on


def _check_same_job(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], resume: bool) -> None:
    if not resume:
        raise FileExistsError(f"{folder} is an unfinished job; pass resume=True to go on with it, or remove it")
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in different)
        raise ValueError(f"{folder} cannot be resumed, the job was another: {shown}; ask for the same, or remove it")


def _check_files(unfinished: Unfinished, source: HfDirectory) -> None:
    """Raise a ValueError if anything lies in the folder but files of this job, on the model ``source``. Local.

    What was written in part is removed.
    """
    written = [*(file.path for file in source.weight_files), *source.small_files]
    files = {path.relative_to(source.path) for path in written} | {Path(name) for name in _OWN_NAMES}
    partials = {partial_of(name) for name in files}
    folders, states = {*small_folders(source.path)}, {*unfinished.states}
    for path in sorted(unfinished.folder.rglob("*")):
        name = path.relative_to(unfinished.folder)
        is_ours = path.is_dir() if name in folders else path.is_file() and name in files | partials
        if not states.isdisjoint((path, *path.parents)):
            continue
        if path.is_symlink() or not is_ours:
            raise ValueError(f"{path} is not from this job; take it away, or remove {unfinished.folder}")
        if name in partials:
            path.unlink()
