"""What a job that was killed has left beside its output, and in the output if that was in its place already."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from distprune.checkpoint.hf_directory import small_folders
from distprune.checkpoint.output_lock import remove_files
from distprune.jobs.journal import JOURNAL_NAME, Journal

WORDS_NAME = "own_words.tokens"  # what the model wrote; by its name no weights
_STATE_NAME = re.compile(r"state-\d+")


def folder_of(target: Path) -> Path:
    """Return where the job to ``target`` keeps what it has done. Local."""
    return target.parent / f".{target.name}.unfinished"


def states_in(folder: Path) -> list[Path]:
    """Return the directories of saved states in the folder of an unfinished job. Local."""
    return [path for path in folder.glob("state-*") if _STATE_NAME.fullmatch(path.name) and not path.is_symlink()]


def remove_folder(folder: Path, model: Path) -> None:
    """Remove the folder of an unfinished job, as far as that goes. Local.

    With it go the states in it, and the sub-folders that the directory ``model`` has, too.
    """
    with suppress(OSError):  # the model is gone
        for name in small_folders(model):
            remove_files(folder / name)
    for state in states_in(folder):
        remove_files(state)
    remove_files(folder)


def tidy(target: Path) -> None:
    """Remove what the job that has finished ``target`` needs no more. Local; whoever calls it must hold the lock."""
    own, beside = target / JOURNAL_NAME, folder_of(target) / JOURNAL_NAME
    with suppress(FileNotFoundError, ValueError):  # it is done, or the file is none of ours
        if Journal(own, {}).is_begun or own.stat().st_size == 0:  # the disk may have lost what nothing waited for
            if not beside.exists() or beside.read_bytes() == own.read_bytes():  # else the folder is another job's
                remove_folder(beside.parent, target)
            (target / WORDS_NAME).unlink(missing_ok=True)
            own.unlink()
