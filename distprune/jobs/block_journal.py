"""A walk through decoder blocks in a job: finished blocks go to the disk; those that are there are read back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from distprune.checkpoint import ModelWriter
from distprune.collectives import together
from distprune.jobs.run import Run, clock
from distprune.jobs.unfinished import Unfinished
from distprune.oneshot import BlockReport

__all__ = ["BlockJournal"]


class BlockJournal:
    """Writes and reads back the ``blocks`` that a walk goes through, (index, name, module) in its order.

    ``updated`` are the modules whose weights are changed where they are not pruned.
    """

    def __init__(
        self,
        run: Run,
        unfinished: Unfinished,
        writer: ModelWriter,
        blocks: Sequence[tuple[int, str, nn.Module]],
        updated: Collection[str],
    ) -> None:
        self._run, self._unfinished, self._writer, self._updated = run, unfinished, writer, updated
        self._blocks = list(blocks)
        self._numbers = {index: number for number, (index, _, _) in enumerate(self._blocks)}
        self._num_done = len(unfinished.blocks)
        self.resumed_at = len(self._blocks)

    def begin(self) -> None:
        """Make the model's files, or check what is there of them. Every rank must call it.

        Raises:
            OSError, ValueError: on every rank: the disk is full; files or finished blocks that are not this job's.
        """
        self._writer.allocate()  # what is there of the weights stays
        self._unfinished.check_blocks([name for _, name, _ in self._blocks])

    def finished(self, index: int) -> bool:
        """Read block ``index`` back if it is done. What ``prune_blocks`` calls; every rank."""
        number, told = self._numbers[index], self._run.told
        _, name, block = self._blocks[number]
        if number < len(self._unfinished.blocks):
            if self._unfinished.restore(self._writer, number, name, block):
                return True
            told.say(f"{name} is not on the disk as it was written: it is pruned again")
        if self._num_done:
            told.say(f"going on at block {number} of {len(self._blocks)}")
        self.resumed_at = number
        return False

    def on_block(self, index: int, report: BlockReport, **more: Any) -> None:
        """Write block ``index`` and note its ``report``, with ``more``. What ``prune_blocks`` calls; every rank.

        Beside its stages a block's seconds have ``write``, its digest included.
        """
        run, number = self._run, self._numbers[index]
        entry: dict[str, Any] = {**report.to_dict(), **more}
        with clock(entry["seconds"], "write"):
            with together(run.comm):
                try:
                    self._writer.write([report.name], updated=self._updated)
                except OSError as error:
                    num_all = len(self._blocks)
                    kept = f"; {number} of {num_all} blocks are kept, --resume goes on with them" if number else ""
                    raise OSError(error.errno, f"cannot write {report.name!r}: {error.strerror}{kept}") from error
            digest = self._unfinished.digest(self._blocks[number][2])
        # Local from here on: what one rank raises, prune_blocks raises on all.
        self._unfinished.record(entry, digest)
        run.told.block(entry, self._blocks[-1][0] + 1)
        run.told.check_here()

    def end(self) -> list[Mapping[str, Any]]:
        """Return the reports of all blocks, and say so if all were done before. Local."""
        if self.resumed_at == len(self._blocks):
            self._run.told.say(f"going on at block {self.resumed_at} of {self.resumed_at}")
        return list(self._unfinished.blocks)
