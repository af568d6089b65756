"""A model's shards into a Hugging Face directory: every rank writes its own elements at their place.

No weight travels and no rank holds more than its shard: the place of every byte in the output files is
known beforehand, so the ranks write side by side. The target must be on a file system all ranks see.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from distprune.checkpoint.disk import sync_file
from distprune.checkpoint.hf_directory import HfDirectory, WeightFile
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.output_files import allocate_directory, planned
from distprune.checkpoint.outputs import writing
from distprune.checkpoint.shared_reading import open_together
from distprune.checkpoint.source_tensors import SourceTensor, output_of
from distprune.checkpoint.stored_slices import Progress, Stored, fill_shards, write_shards
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.slow import work_together
from distprune.models.find_shards import check_model
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard


def save(
    model: nn.Module,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    source: str | Path | None = None,
    layers: Sequence[int] | None = None,
    overwrite: bool = False,
    group: Group = None,
) -> None:
    """Write ``model`` to a Hugging Face ``directory``, from whatever shards it is in; ``from_pretrained`` reads it.

    >>> model = load(folder / "model")
    >>> report = prune_model(model, 0.5)
    >>> save(model, folder / "half")

    Args:
        model: plain, FSDP2, HSDP or tensor parallel, pruned in place; of :func:`load`, or of ``from_pretrained``.
        directory: must not exist, or be empty; all ranks must see it.
        tokenizer: of transformers, written beside the model. Default: that of ``source``.
        source: the directory, or the hub's id, whose config, tokenizer and division into files the output has.
            Default: where ``model`` was loaded from.
        layers: which decoder layers of the source are left, as ``Shrunk.layers`` says. Default: all.
        overwrite: replace the model in ``directory``.
        group: the ranks that hold parts of the model.

    Every rank writes its own elements; nothing is gathered. It is written beside ``directory`` and renamed when all is
    on the disk. Every rank of ``group`` must call it, with equal arguments. Rounds: two of 64 bytes, and those of
    ``resolve_model``, ``open_together``, ``writing`` and ``save_model``.

    Raises:
        ImportError: on every rank: the extra ``hf`` is not installed.
        FileExistsError, OSError: on every rank: ``directory`` is not empty, or cannot be written.
        ValueError: on every rank: the source is not known, or holds other tensors than ``model``, such as those of a
            model whose masks are not removed; ``directory`` is the source.
    """
    comm = communicator(group)
    with together(comm):
        check_model(model)
        known = source or getattr(getattr(model, "config", None), "name_or_path", None)
        if not known:
            raise ValueError(f"where this {type(model).__name__} was loaded from is not known: say source='DIRECTORY'")
        if masked := [name for name, _ in model.named_parameters() if name.endswith("_orig")]:
            raise ValueError(f"{masked[0]!r} has a mask beside it: make zeros of the masks first, by prune.remove")
    path = resolve_model(str(known), group=comm)
    read = open_together(comm, path)
    with writing(directory, comm, overwrite=overwrite, inputs=[path]) as staging:
        save_model(model, read, staging, layers=layers, group=comm)
        with together(comm):
            if tokenizer is not None and comm.rank == 0:
                tokenizer.save_pretrained(staging)


def save_model(
    model: nn.Module,
    source: HfDirectory,
    target: Path,
    *,
    layers: Sequence[int] | None = None,
    group: Group = None,
    progress: Progress = None,
) -> None:
    """Write ``model`` into the existing directory ``target``, with the files of ``source``.

    ``layers``: which decoder blocks of ``source`` the model still has, by number, in order; they are numbered anew
    (``None``: all).

    The weight files, their names and which tensor is in which are those of ``source``; sizes and dtypes are the
    model's. The bytes are the same whatever the number of ranks and the layout. Tokenizer, config and the other small
    files are copied; the config of a model with other sizes than ``source`` is the model's own.

    Every rank of ``group`` must call it. Communicates four rounds of 64 bytes, to agree and to raise together, and
    waits for the disk as :func:`work_together`.

    Raises:
        OSError: on every rank: the disk is full or not writable.
        ValueError: on every rank: the model's tensors are not those of ``source`` in name, or have other shapes than
            its config makes; or ranks were given different arguments, or models of different dtypes.
        NotImplementedError: on every rank: ``layers`` whose tensors are not stored under their numbers.
    """
    writer = ModelWriter(model, source, target, layers=layers, group=group)
    writer.allocate()
    with together(writer.comm):
        writer.write(progress=progress)
    work_together(writer.comm, writer.sync)


class ModelWriter:
    """Writes a model's tensors to their places in the files of ``target``, all at once or some at a time.

    Every rank of ``group`` must make one: two rounds of 64 bytes; raises as :func:`save_model`.
    """

    def __init__(
        self,
        model: nn.Module,
        source: HfDirectory,
        target: Path,
        *,
        layers: Sequence[int] | None = None,
        group: Group = None,
    ) -> None:
        self.comm = communicator(group)
        self._source, self._target = source, target
        with together(self.comm):
            self._output = output_of(model, source, layers)
            shards = {name: local_shard(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
            self._files: list[WeightFile] = []  # that are written
            # This rank's parts, where they are written, and the modules that each is in.
            self._parts: list[tuple[Stored, set[str]]] = []
            for file in source.weight_files:
                tensors = [self._output.tensors[e.name] for e in file.tensors if e.name in self._output.tensors]
                if not tensors:  # all its layers were removed
                    continue
                parts = [_parts_of(tensor, shards) for tensor in tensors]
                written = planned(target / file.path.name, [of_tensor[0] for of_tensor in parts])
                self._files.append(written)
                for tensor, of_tensor, entry in zip(tensors, parts, written.tensors, strict=True):
                    for region, part in zip(tensor.regions, of_tensor, strict=True):
                        modules = {*itertools.accumulate(region.name.split("."), "{}.{}".format)}
                        self._parts.append(((part, written, entry), modules))
            self._unsynced: set[Path] = set()  # files that this rank has written to
            dtypes = [str(entry.dtype) for file in self._files for entry in file.tensors]
            facts = {"source": source.fingerprint(), "target": str(target), "dtypes": dtypes, "layers": layers}
        agree(self.comm, facts)

    def allocate(self) -> None:
        """Make the files at their full size, and copy the small ones. Every rank must call it: one round.

        Of weight files that are there the weights stay; headers and small files are written anew.
        """
        with together(self.comm):
            if self.comm.rank == 0:
                config, num_removed = self._output.config, self._output.num_removed
                allocate_directory(self._source, self._files, self._target, config, num_removed)
                self._unsynced.update(file.path for file in self._files)

    def write(
        self, prefixes: Sequence[str] | None = None, *, written: Collection[str] = (), progress: Progress = None
    ) -> None:
        """Write this rank's part of the tensors inside the modules ``prefixes`` (``None``: of all). Local.

        Those inside the modules ``written`` are left out. The system writes them to the disk when it likes, or by
        :meth:`sync`.
        """
        # A plain tensor is on every rank; the first one writes it.
        rank, first = self.comm.global_rank(self.comm.rank), self.comm.global_rank(0)
        chosen = self._chosen(prefixes, written)
        settled = [(part.owned_by(rank, first, self.comm.size), file, entry) for part, file, entry in chosen]
        own = [work for work in settled if work[0].owned and work[0].local.numel()]
        self._unsynced.update(file.path for _, file, _ in own)
        write_shards(own, progress)

    def sync(self) -> None:
        """Wait until what this rank has written is on the disk. Local."""
        for path in sorted(self._unsynced):
            sync_file(path)
        self._unsynced.clear()

    def read(self, prefixes: Sequence[str]) -> None:
        """Read this rank's part of the tensors inside the modules ``prefixes`` back into the model. Local."""
        fill_shards(self._chosen(prefixes))

    def _chosen(self, prefixes: Collection[str] | None, without: Collection[str] = ()) -> list[Stored]:
        """Return this rank's parts inside the modules ``prefixes`` and not inside ``without``."""
        return [
            work
            for work, modules in self._parts
            if (prefixes is None or not modules.isdisjoint(prefixes)) and modules.isdisjoint(without)
        ]


def _parts_of(tensor: SourceTensor, shards: Mapping[str, LocalShard]) -> list[LocalShard]:
    """Return this rank's parts of a tensor that is written, one in each of its regions; ``shards``: of the model's.

    Raises:
        ValueError: the model holds them in several dtypes.
    """
    dtypes = {region.name: shards[region.name].local.dtype for region in tensor.regions}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"tensor {tensor.name!r} is stored as one, and the model has several dtypes for it: {dtypes}")
    return [region.part_of(shards[region.name], tensor.shape) for region in tensor.regions]
