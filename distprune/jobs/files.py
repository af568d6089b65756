"""A job that can be killed and go on: what it has done lies in a hidden folder beside the output, in whole files.

``.NAME.unfinished`` holds the *recipe*, what decides the result, the *records*, small JSON files of what need not be
found out again, and the directory ``model``, which becomes the output when everything is in it. A file is written
beside its place and renamed, so it is whole or not there. A folder that has a recipe and no ``model`` has had its day:
whoever takes the lock of the output removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.disk import partial_of, write_whole
from distprune.checkpoint.hf_directory import read_json
from distprune.checkpoint.output_lock import RECIPE_NAME, RESULT_NAME, remove_tree, unfinished_of
from distprune.checkpoint.outputs import check_shared, publish
from distprune.checkpoint.replaceable import check_output
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.jobs.options import Job
from distprune.jobs.run import Run
from distprune.mistakes import is_expected
from distprune.version import __version__

STATE = "training"  # the record that names a saved state
_VERSIONS = {"distprune": str(__version__), "torch": torch.__version__}  # with others other bits may come
_AT_FAULT = (ValueError, TypeError, NotImplementedError)  # the input is: a job that goes on would get no further


class JobFiles:
    """The ``folder`` of an unfinished job; its records are the same on every rank, and the first one writes them.

    ``result``: the directory that becomes the output. ``records``: what is recorded, by name. ``sync``: wait for the
    disk.
    """

    def __init__(self, comm: Communicator, folder: Path, records: Mapping[str, Any], *, sync: bool = True) -> None:
        self.comm, self.folder, self.result, self.sync = comm, folder, folder / RESULT_NAME, sync
        self.records = dict(records)

    def known(self, name: str) -> Any:
        """Return what is recorded under ``name``; ``None``: nothing is. Local."""
        return self.records.get(name)

    def record(self, name: str, value: Any) -> None:
        """Record ``value``, which JSON carries, under ``name``. Every rank must call it, with the same. Local."""
        content = json.dumps({"value": value})
        if self.comm.rank == 0:
            write_whole(self.folder / f"{name}.json", content.encode(), sync=self.sync)
        self.records[name] = json.loads(content)["value"]

    def recall(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what is recorded under ``name``, or what ``make`` returns, which is recorded then.

        What comes back is as JSON carries it: tuples are lists. Every rank must call it, and ``make`` return the same
        on all: what ``make`` communicates, and a round of 64 bytes.

        Raises:
            OSError: on every rank: the disk is full or not writable.
        """
        if name not in self.records:
            value = make()
            with together(self.comm):
                self.record(name, value)
        return self.records[name]


@contextmanager
def open_files(run: Run, job: Job, *, sync: bool = True) -> Iterator[JobFiles]:
    """Yield the folder of a ``job``: a new one or, with ``resume``, the one that is there.

    A resumed job must have the options that decide the result, read the same files and be run by the same versions; on
    how many ranks is no matter.

    When the body ends, the result becomes the output. If the body raises, the folder stays if anything is recorded in
    it, but for a mistake in the input that is found at the first start: then only the state of a training stays.

    Every rank must enter it, and the first must hold the output's lock; five rounds, and those of :func:`publish`.

    Raises:
        FileExistsError: on every rank: an unfinished job is there, and ``resume`` is off.
        ValueError: on every rank: the folder is another job's, or a record in it is damaged.
        OSError, ValueError: on every rank: as ``publish`` raises.
    """
    comm, folder = run.comm, unfinished_of(run.output)
    with together(comm):
        recipe = json.loads(json.dumps({**job.flags(deciding=True), **_VERSIONS, **run.read}))
        there = _read_records(folder) if comm.rank == 0 else []
    before, records = comm.broadcast(there)
    was_begun = bool(records)
    with together(comm):
        if was_begun:
            _check_same(folder, before, recipe, job.resume)
        elif comm.rank == 0:
            _make_folder(folder, recipe)
    if job.resume and not was_begun:
        run.reporter.say("nothing was recorded yet: starting at the beginning")
    with together(comm):
        check_shared(folder / RESULT_NAME)
    files = JobFiles(comm, folder, records, sync=sync)
    try:
        yield files
    except BaseException as error:  # also Ctrl-C and SIGTERM
        is_input = isinstance(error, _AT_FAULT) and is_expected(error) and not was_begun
        if files.known(STATE) is not None if is_input else bool(files.records):
            if "resume=" not in str(error):
                run.reporter.say(f"what is done is kept in {folder}; resume=True (--resume) goes on with it")
        elif isinstance(error, Exception) and comm.rank == 0:
            remove_tree(folder)
        raise
    check = partial(check_output, run.output, overwrite=job.overwrite, inputs=run.inputs)
    publish(comm, files.result, run.output, check, sync_files=sync)


def _read_records(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe, and all records by their names. Local."""
    found: dict[str, Any] = {path.stem: read_json(path).get("value") for path in sorted(folder.glob("*.json"))}
    return found.pop(Path(RECIPE_NAME).stem, {}), found


def _make_folder(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Make the folder with its recipe, which comes last. Local; for one rank."""
    if (folder / RECIPE_NAME).exists():  # killed before anything was recorded
        remove_tree(folder)
    remove_tree(partial_of(folder / RECIPE_NAME))
    for left in (folder / RESULT_NAME, folder):  # killed before there was a recipe: nothing is in it
        with suppress(OSError):
            left.rmdir()
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} holds more than a job has written; move it away")
    (folder / RESULT_NAME).mkdir(parents=True)
    write_whole(folder / RECIPE_NAME, json.dumps({"value": recipe}).encode())


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], resume: bool) -> None:
    if not resume:
        raise FileExistsError(f"{folder} is an unfinished job; pass resume=True to go on with it, or remove it")
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in different)
        raise ValueError(f"{folder} cannot be resumed, the job was another: {shown}; ask for the same, or remove it")
