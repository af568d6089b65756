"""A job that can be killed and go on: its output grows beside the target, with a journal of what is in it.

``.NAME.unfinished`` holds the model's files at their full size, of which some tensors are written, and
``journal.json``: what the job was asked for, and how many blocks are on the disk. It is renamed onto the
target when everything is there. The journal never says more than what every rank has written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distprune.checkpoint.output_directory import publish
from distprune.checkpoint.replaceable import check_output
from distprune.collectives import Communicator, agree, together

__all__ = ["Unfinished", "open_unfinished"]

JOURNAL_NAME = "journal.json"


class Unfinished:
    """The folder of an unfinished job, and its journal as the ranks know it."""

    def __init__(self, comm: Communicator, folder: Path, target: Path, facts: dict[str, Any], journal: dict[str, Any]):
        self.comm, self.folder = comm, folder
        self.journal = journal
        self._target, self._facts = target, facts

    @property
    def num_done(self) -> int:
        """Blocks that are on the disk."""
        return int(self.journal.get("blocks_done", 0))

    def record(self, num_done: int, **entries: Any) -> None:
        """Note, on the first rank, what every rank has written by now. Local."""
        self.journal = {**self.journal, **entries, "blocks_done": num_done}
        if self.comm.rank == 0:
            path = self.folder / JOURNAL_NAME
            text = json.dumps({**self.journal, "facts": self._facts}, indent=2) + "\n"
            beside = path.with_suffix(".new")
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)

    def discard(self) -> None:
        """Remove it, on the first rank: there is nothing in it to go on with. Local."""
        if self.comm.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, *, overwrite: bool) -> None:
        """Make it the target, on every rank: one round."""
        with together(self.comm):
            if self.comm.rank == 0:
                publish(self.folder, self._target, overwrite=overwrite)
                # Last: a job that is killed in between has finished, and one that is killed before can go on.
                (self._target / JOURNAL_NAME).unlink()


def open_unfinished(
    comm: Communicator, target: str | Path, facts: Mapping[str, Any], *, resume: bool, overwrite: bool, source: Path
) -> Unfinished:
    """Return the folder for a job of these ``facts``, new or, with ``resume``, the one that is there.

    Every rank must call it; four rounds.

    Raises:
        FileExistsError: on every rank: an unfinished job is there, and ``resume`` is off.
        ValueError: on every rank: the one that is there was asked for something else; it says what.
        OSError, ValueError: on every rank: as :func:`check_output` raises.
    """
    journal: dict[str, Any] = {}
    plain = json.loads(json.dumps(dict(facts)))
    with together(comm):
        path = check_output(target, overwrite=overwrite, inputs=[source])
        folder = path.parent / f".{path.name}.unfinished"
        there = (folder / JOURNAL_NAME).is_file()
        if there and not resume:
            raise FileExistsError(
                f"{folder} is what an unfinished job has left; pass --resume to go on with it, or remove it"
            )
        if there:
            journal = _read(folder / JOURNAL_NAME)
            before = journal.pop("facts", {})
            different = [key for key in sorted({*before, *plain}) if before.get(key) != plain.get(key)]
            if different:
                shown = "; ".join(f"{key}: {before.get(key)!r} then, {plain.get(key)!r} now" for key in different)
                raise ValueError(f"{folder} cannot be resumed, the job was another: {shown}")
    agree(comm, {"unfinished": str(folder), "journal": journal})
    with together(comm):
        if comm.rank == 0 and not journal:
            shutil.rmtree(folder, ignore_errors=True)  # killed before its first journal
            folder.mkdir(parents=True)
    with together(comm):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not visible here; the output must be on storage all ranks share")
    return Unfinished(comm, folder, path, plain, journal)


def _read(path: Path) -> dict[str, Any]:
    try:
        journal = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove its folder and start anew") from error
    if not isinstance(journal, dict):
        raise ValueError(f"{path} is damaged; remove its folder and start anew")
    return journal
