"""A job that can be killed and go on: its output grows beside the target, with a journal of what is in it.

``.NAME.unfinished`` holds the model's files at their full size, of which some blocks are written, or the state of a
training, and ``journal.json``: what the job was asked for, the report and the digest of each block (of each saved
state) that every rank has on the disk, and a checksum of all that. The folder is renamed onto the target when
everything is there; or another one beside it, where a model of other sizes is made of the one that was written.
Either brings the journal along, which is removed last: a target that holds one says whose folder is left beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.checkpoint import (
    Inputs,
    ModelWriter,
    check_shared,
    digest_together,
    file_digest,
    make_staging,
    publish,
    remove_files,
)
from distprune.checkpoint.digest import as_words, new_digest
from distprune.checkpoint.hf_directory import INDEX_NAME, HfDirectory
from distprune.collectives import Communicator, agree, together
from distprune.jobs.model_card import CARD_NAME
from distprune.jobs.picture import PICTURE_NAME
from distprune.jobs.run import REPORT_NAME, Job
from distprune.shards import bytes_of, flat_chunks, local_shard

__all__ = ["Unfinished", "check_unfinished", "open_unfinished"]

JOURNAL_NAME = "journal.json"
_NEW_JOURNAL = "journal.new"
_OWN_NAMES = {JOURNAL_NAME, _NEW_JOURNAL, INDEX_NAME, REPORT_NAME, PICTURE_NAME, CARD_NAME}
_AT_FAULT = (ValueError, TypeError, NotImplementedError)  # the input is: a job that goes on would get no further
_STATE = re.compile(r"state-\d+\.safetensors")


class Unfinished:
    """The folder of an unfinished job; :attr:`blocks` are the reports of the blocks that are on the disk,
    :attr:`digests` what was noted to know them by.

    ``is_new``: nothing was recorded before. ``sync_files``: what is recorded waits for the disk.
    """

    def __init__(
        self, comm: Communicator, folder: Path, journal: dict[str, Any], *, is_new: bool, sync_files: bool = True
    ) -> None:
        self.comm, self.folder, self._journal = comm, folder, journal
        self.is_new, self.sync_files = is_new, sync_files
        self.blocks: list[dict[str, Any]] = journal["blocks"]
        self.entries: dict[str, Any] = journal["entries"]
        self.digests: list[str] = journal["digests"]
        self.result = folder  # what becomes the target

    @property
    def states(self) -> list[Path]:
        """The files ``state-N.safetensors`` that are there: no part of the output."""
        return _states(self.folder)

    def state(self, num_steps: int) -> Path:
        """Return the file of the state after so many steps."""
        return self.folder / f"state-{num_steps}.safetensors"

    def is_worth_keeping(self, error: Exception) -> bool:
        """Return whether a job can go on with what is here after ``error``. Local."""
        if isinstance(error, _AT_FAULT):
            return bool(self.states)
        return os.path.lexists(self.folder / JOURNAL_NAME)

    def begin_smaller(self, target: Path) -> None:
        """Let what becomes the ``target`` be a new folder. Every rank must call it; raises as :func:`make_staging`."""
        self.result = make_staging(self.comm, target)

    def check_files(self, source: HfDirectory) -> None:
        """Raise a ValueError if anything lies in the folder but this job's files; its model is ``source``. Local."""
        written = [file.path for file in source.weight_files] + [*source.small_files, *self.states]
        names = {path.name for path in written} | _OWN_NAMES
        for path in sorted(self.folder.iterdir()):
            if path.is_symlink() or not path.is_file() or path.name not in names:
                raise ValueError(f"{path} is not from this job; take it away, or remove {self.folder}")

    def check_blocks(self, names: Sequence[str]) -> None:
        """Check that the finished blocks are the first of those ``names``. Every rank must call it: one round.

        Raises:
            ValueError: on every rank: the journal has more blocks than there are, or others.
        """
        with together(self.comm):
            named = [report.get("name") for report in self.blocks]
            if named != list(names[: len(named)]) or len(named) != len(self.digests):
                raise ValueError(f"{self.folder / JOURNAL_NAME} lists the blocks {named}; the model has others")

    def restore(self, writer: ModelWriter, number: int, name: str, block: nn.Module) -> bool:
        """Read finished block ``number`` back, if it is what was written.

        If not, it stays as it is in memory, and it and all that follow are forgotten. Every rank must call it: two
        rounds.
        """
        with together(self.comm):
            before = {key: value.clone() for key, value in _local_parts(block).items()}
            writer.read([name])
        if self.digest(block) == self.digests[number]:
            return True
        for key, part in _local_parts(block).items():
            part.copy_(before[key])
        self.forget(number)
        return False

    def forget(self, number: int) -> None:
        """Take block ``number`` and all that follow for unwritten. Every rank must call it. Local."""
        del self.blocks[number:], self.digests[number:]

    def digest(self, block: nn.Module) -> str:
        """Return a digest of a block's weights over all ranks: the sum of theirs. Every rank: one round of 24 bytes."""

        def own() -> torch.Tensor:
            digest = new_digest()
            for name, part in _local_parts(block).items():
                digest.update(f"{name}:{part.dtype}:{tuple(part.shape)}".encode())
                for _, chunk in flat_chunks(part):
                    digest.update(bytes_of(chunk.cpu()))
            return as_words(digest)

        return digest_together(self.comm, own)

    def is_as_written(self, state: Path) -> bool:
        """Return whether the file ``state`` is what was recorded last. Every rank must call it: one round of 24 bytes.

        Raises:
            OSError: on every rank: it cannot be read.
        """
        return file_digest(self.comm, state) == self.digests[-1]

    def record(self, report: dict[str, Any], digest: str) -> None:
        """Note, on the first rank, that every rank has one more block on the disk. Local."""
        self.blocks.append(report)
        self.digests.append(digest)
        self.record_entries()

    def record_entries(self) -> None:
        """Write the journal, on the first rank, with :attr:`entries` as they are. Local."""
        if self.comm.rank == 0:
            beside = self.folder / _NEW_JOURNAL
            with beside.open("w", encoding="utf-8") as file:
                file.write(json.dumps({**self._journal, "checksum": _checksum(self._journal)}, indent=2) + "\n")
                if self.sync_files:
                    file.flush()
                    os.fsync(file.fileno())
            beside.replace(self.folder / JOURNAL_NAME)


def check_unfinished(job: Job, resume: bool) -> None:
    """Raise a FileExistsError if ``resume`` is asked for, and the job has finished. Local.

    What it has left, because it was killed after its output had taken its place, is removed.
    """
    target = Path(job.output)
    if (target / REPORT_NAME).is_file():
        _tidy(target)
        if resume and not job.overwrite:
            raise FileExistsError(f"nothing is left to resume: {job.output} is finished, it holds a {REPORT_NAME}")


@contextmanager
def open_unfinished(
    comm: Communicator,
    target: Path,
    facts: Mapping[str, Any],
    *,
    source: HfDirectory,
    resume: bool,
    overwrite: bool,
    inputs: Inputs,
    sync_files: bool = True,
) -> Iterator[Unfinished]:
    """Yield the folder for a job of these ``facts`` on ``source``, new or, with ``resume``, the one that is there.

    When the body ends it becomes ``target``. If the body raises, it stays if anything is recorded in it; but where the
    input is at fault only if that is a state of a training. Every rank must enter it, and the first must hold the
    target's lock; five rounds. Without ``sync_files`` neither it nor its journal waits for the disk: what is recorded
    must be looked at before a job goes on.

    Raises:
        FileExistsError: on every rank: an unfinished job is there, and ``resume`` is off.
        ValueError: on every rank: the one that is there was asked for something else, its journal is damaged, or
            anything lies in it that this job has not written.
        OSError, ValueError: on every rank: as ``publish`` raises.
    """
    folder = _folder_of(target)
    with together(comm):
        plain = json.loads(json.dumps(dict(facts)))
        journal: dict[str, Any] = {"facts": plain, "entries": {}, "blocks": [], "digests": []}
        is_new = not os.path.lexists(folder / JOURNAL_NAME)
        if not is_new:
            if not resume:
                raise FileExistsError(f"{folder} is an unfinished job; pass --resume to go on with it, or remove it")
            journal = _read(folder / JOURNAL_NAME)
            before = journal["facts"]
            different = [key for key in sorted({*before, *plain}) if before.get(key) != plain.get(key)]
            if different:
                shown = "; ".join(f"{key}: {before.get(key)!r} then, {plain.get(key)!r} now" for key in different)
                raise ValueError(
                    f"{folder} cannot be resumed, the job was another: {shown}; ask for the same, or remove it"
                )
    agree(comm, {"unfinished": str(folder), "journal": journal})
    with together(comm):
        if comm.rank == 0 and is_new:
            remove_files(folder)  # killed before anything was recorded
            if os.path.lexists(folder):
                raise FileExistsError(f"{folder} holds more than a job has written; move it away")
            folder.mkdir()
    unfinished = Unfinished(comm, folder, journal, is_new=is_new, sync_files=sync_files)
    with together(comm):
        check_shared(folder)
        unfinished.check_files(source)
    try:
        yield unfinished
    except Exception as error:
        if comm.rank == 0 and not unfinished.is_worth_keeping(error):
            remove_files(folder)
        raise
    with together(comm):
        if comm.rank == 0:
            if unfinished.result != folder:
                shutil.copyfile(folder / JOURNAL_NAME, unfinished.result / JOURNAL_NAME)
            publish(unfinished.result, target, overwrite=overwrite, inputs=inputs, sync_files=sync_files)
            # Last: a job that is killed in between has finished, and one that is killed before can go on.
            _tidy(target)


def _states(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _STATE.fullmatch(path.name)]


def _folder_of(target: Path) -> Path:
    return target.parent / f".{target.name}.unfinished"


def _tidy(target: Path) -> None:
    """Remove what the job that has finished ``target`` needs no more; if it was killed, another may do that. Local."""
    own, beside = target / JOURNAL_NAME, _folder_of(target) / JOURNAL_NAME
    with suppress(FileNotFoundError, ValueError):  # it is done, or the file is none of ours
        journal = _read(own)
        if not beside.exists() or _read(beside) == journal:  # else the folder is another job's
            remove_files(beside.parent)
        for path in _states(target):
            path.unlink()
        own.unlink()


def _local_parts(block: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_shard(name, tensor).local for name, tensor in block.state_dict(keep_vars=True).items()}


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Return the journal, whose checksum says that it is as it was written."""
    try:
        journal = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(journal, dict) and journal.pop("checksum", None) == _checksum(journal):
            return journal
        reason = "it is not what was written"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise ValueError(f"{path} is damaged: {reason}; remove its folder and start anew")
