"""Tensors that ranks hold parts of, in one safetensors file: written side by side, and read by any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from distprune.checkpoint.disk import sync_file
from distprune.checkpoint.hf_directory import WeightFile
from distprune.checkpoint.output_files import header_of, planned
from distprune.checkpoint.outputs import writing_file
from distprune.checkpoint.sharded_file import write_shards
from distprune.checkpoint.stored_slices import fill_shards
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.slow import work_together
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard


def write_together(
    comm: Communicator,
    target: str | Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    parts: Sequence[LocalShard],
    *,
    overwrite: bool = False,
) -> None:
    """Write tensors of ``shapes`` to the file ``target``, of which ``parts`` are what this rank has to write.

    Its bytes do not depend on the layout. Every rank must call it, and see ``target``. Rounds: those of
    :func:`writing_file`, one of 64 bytes, and those of :func:`work_together`.

    Raises:
        OSError, ValueError: on every rank, nothing changed: as :func:`writing_file`.
    """
    with writing_file(target, comm, overwrite=overwrite) as staging:
        with together(comm):
            whole = [
                LocalShard(name, torch.empty(tuple(shape), dtype=dtype, device="meta"), Geometry.whole(shape))
                for name, shape in shapes.items()
            ]
            file = planned(staging, whole)
            places = {entry.name: entry for entry in file.tensors}
            if comm.rank == 0:
                staging.write_bytes(header_of(file.tensors))
                os.truncate(staging, file.tensors[-1].stop)

        def write() -> None:
            write_shards([(part, file, places[part.name]) for part in parts])
            sync_file(staging)

        work_together(comm, write)


def fill_from_file(file: WeightFile, shards: Sequence[LocalShard]) -> None:
    """Read this rank's ``shards`` of the tensors of their names from ``file``, in place. Local; nothing is unpickled.

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype; the file is no safetensors file.
    """
    stored = {entry.name: entry for entry in file.tensors}
    for shard in shards:
        entry = stored.get(shard.name)
        if entry is None or (entry.shape, entry.dtype) != (shard.shape, shard.local.dtype):
            held = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
            wanted = f"{shard.local.dtype} {tuple(shard.shape)}"
            raise ValueError(f"{file.path} holds {held} under {shard.name!r}, where {wanted} is called for")
    fill_shards([(shard, file, stored[shard.name]) for shard in shards])
