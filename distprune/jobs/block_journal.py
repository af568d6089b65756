"""A walk through decoder blocks in a job: finished blocks go to the disk; those that are there are read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.digest import as_words, digest_together, new_digest
from distprune.checkpoint.hf_save import ModelWriter
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.slow import work_together
from distprune.jobs.journal import Item
from distprune.jobs.run import Run, clock
from distprune.jobs.unfinished import Unfinished
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.report import BlockReport
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import bytes_of, flat_chunks
from distprune.shards.staged import fetch_in_turn

BLOCK = "block"  # an item's kind


class BlockJournal:
    """Writes and reads back the blocks of ``model`` that a walk goes through.

    ``layers``: their indices (``None``: all).

    Every rank must make one: four rounds of 64 bytes. Weights that are in the folder stay; raises as
    :class:`ModelWriter`.
    """

    def __init__(self, run: Run, unfinished: Unfinished, model: nn.Module, layers: Iterable[int] | None = None) -> None:
        self._run, self._unfinished = run, unfinished
        self.writer = ModelWriter(model, run.directory, unfinished.folder, group=run.comm)
        blocks = decoder_blocks(model)
        self.names = [name for name, _ in blocks]  # also of blocks that the walk leaves out
        self._blocks = [(index, *blocks[index]) for index in (range(len(blocks)) if layers is None else layers)]
        self._numbers = {index: number for number, (index, _, _) in enumerate(self._blocks)}
        self._is_resumed = bool(unfinished.items(BLOCK))
        self.resumed_at = len(self._blocks)
        self.writer.allocate()

    def finished(self, index: int) -> bool:
        """Read block ``index`` back if it is done. What ``prune_blocks`` calls; every rank."""
        number, reporter = self._numbers[index], self._run.reporter
        _, name, block = self._blocks[number]
        if done := self._unfinished.items(BLOCK)[number : number + 1]:
            if self._restore(done[0], name, block):
                return True
            reporter.say(f"{name} is not on the disk as it was written: it is pruned again")
        if self._is_resumed:
            reporter.say(f"going on at block {number} of {len(self._blocks)}")
        self.resumed_at = number
        return False

    def _restore(self, item: Item, name: str, block: nn.Module) -> bool:
        """Read a block back if it is what was written; if not, it stays as it is in memory.

        Every rank must call it: two rounds.
        """
        with together(self._run.comm):
            before = {key: value.clone() for key, value in _local_parts(block).items()}
            self.writer.read([name])
        if self._unfinished.verify(item, digest_of(self._run.comm, block)):
            return True
        for key, part in _local_parts(block).items():
            part.copy_(before[key])
        return False

    def on_block(self, index: int, report: BlockReport, **more: Any) -> None:
        """Write block ``index`` and note its ``report``, with ``more``. What ``prune_blocks`` calls; every rank.

        Beside its stages a block's seconds have ``write``, its digest included.
        """
        run, number = self._run, self._numbers[index]
        entry: dict[str, Any] = {**report.to_dict(), **more}
        with clock(entry["seconds"], "write"):
            with together(run.comm), self._naming(number):
                self.writer.write([report.name])
            work_together(run.comm, self._naming(number)(self.writer.sync))
            digest = digest_of(run.comm, self._blocks[number][2])
        # Local from here on: what one rank raises, prune_blocks raises on all.
        self._unfinished.record(Item(BLOCK, entry, digest))
        run.reporter.block(entry, self._blocks[-1][0] + 1)
        run.reporter.check_here()

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Say in an OSError of the body how many blocks are kept."""
        try:
            yield
        except OSError as error:
            kept = f"; {number} of {len(self._blocks)} blocks are kept, resume=True goes on with them" if number else ""
            raise OSError(error.errno, f"{error.strerror}{kept}") from error

    def end(self) -> list[Mapping[str, Any]]:
        """Return the reports of all blocks, and say so if all were done before. Local."""
        if self.resumed_at == len(self._blocks):
            self._run.reporter.say(f"going on at block {self.resumed_at} of {self.resumed_at}")
        return [item.value for item in self._unfinished.items(BLOCK)]


def digest_of(comm: Communicator, module: nn.Module) -> str:
    """Return a digest of a module's weights over all ranks: the sum of theirs. Every rank: one round of 24 bytes."""

    def own() -> torch.Tensor:
        digest = new_digest()
        for name, part in _local_parts(module).items():
            digest.update(f"{name}:{part.dtype}:{tuple(part.shape)}".encode())
            for chunk in fetch_in_turn(chunk for _, chunk in flat_chunks(part)):
                digest.update(bytes_of(chunk))
        return as_words(digest)

    return digest_together(comm, own)


def _local_parts(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_shard(name, tensor).local for name, tensor in module.state_dict(keep_vars=True).items()}
