"""A walk through decoder blocks in a job: a finished block is a file; those that are there are read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.disk import check_room
from distprune.checkpoint.hf_save import ModelWriter
from distprune.checkpoint.stored_slices import Stored, fill_shards
from distprune.collectives.agree import sum_together, together
from distprune.evaluation import Progress
from distprune.jobs.run import JobFiles, Run
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.report import BlockReport, clock

_OTHERS = "model.others.safetensors"  # the tensors that are in no block


class BlockFiles:
    """Writes and reads back the blocks of ``model`` that a walk goes through, one file each in ``folder``.

    ``layers``: their indices (``None``: all). A block is finished when its report is recorded, behind its file.

    Every rank must make one: that of a :class:`ModelWriter`, as which it raises, and a round of 64 bytes.
    """

    def __init__(
        self, run: Run, files: JobFiles, model: nn.Module, folder: Path, layers: Iterable[int] | None = None
    ) -> None:
        self._run, self._files, self._folder = run, files, folder
        self._writer = ModelWriter(model, run.directory, group=run.comm)
        names = [name for name, _ in decoder_blocks(model)]
        self._stored = self._writer.by_module(names)
        self._names = {index: names[index] for index in (range(len(names)) if layers is None else layers)}
        self.resumed_at = len(self._names)
        with together(run.comm):
            if run.comm.rank == 0:
                folder.mkdir(exist_ok=True)
                left = [stored for name, stored in self._stored.items() if not self._path(name).exists()]
                check_room(folder, sum(map(self._writer.num_bytes, left)))

    def _path(self, name: str) -> Path:
        return self._folder / (f"{name}.safetensors" if name else _OTHERS)

    def finished(self, index: int) -> bool:
        """Read block ``index`` back if it is done, and say where the job goes on. What ``prune_blocks`` calls.

        Every rank must call it. One round of 16 bytes, and of a block that is done one of 64.
        """
        number, name, say = list(self._names).index(index), self._names[index], self._run.reporter.say
        work: list[Stored] = []

        def look(num_damaged: torch.Tensor) -> None:
            try:
                work.extend(self._writer.written(self._path(name), self._stored[name]))
            except (ValueError, FileNotFoundError):
                num_damaged += 1

        if self._files.known(name) is not None:
            if not int(sum_together(self._run.comm, (1,), look)):  # before any rank's weights change
                with together(self._run.comm):
                    fill_shards(work)
                if number + 1 == len(self._names):
                    say(f"going on at block {number + 1} of {number + 1}")
                return True
            say(f"{self._path(name)} is missing or damaged: {name} is pruned again")
        if any(self._files.known(name) is not None for name in self._names.values()):
            say(f"going on at block {number} of {len(self._names)}")
        self.resumed_at = number
        return False

    def on_block(self, index: int, report: BlockReport, **more: Any) -> None:
        """Write block ``index`` and record its ``report``, with ``more``. What ``prune_blocks`` calls; every rank.

        Beside its stages a block's seconds have ``write``.
        """
        run, name = self._run, self._names[index]
        entry: dict[str, Any] = {**report.to_dict(), **more}
        with clock(entry["seconds"], "write"):
            self._writer.write(self._path(name), self._stored[name])
        # Local from here on: what one rank raises, prune_blocks raises on all.
        self._files.record(name, entry)
        run.reporter.block(entry, max(self._names) + 1)
        run.reporter.check_here()

    def reports(self) -> list[Mapping[str, Any]]:
        """Return the reports of all blocks. Local."""
        return [self._files.known(name) for name in self._names.values()]

    def finish(self, progress: Progress) -> None:
        """Write what is in no block, and what makes a model of the folder. Every rank must call it.

        As :meth:`ModelWriter.write`, and a round of 64 bytes.
        """
        self._writer.write(self._path(""), self._stored[""], progress)
        self._writer.finish(self._folder, {self._path(name).name: stored for name, stored in self._stored.items()})
