"""Tensors that ranks hold parts of, in one safetensors file: written side by side, and read by any number of ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from distprune.checkpoint.disk import kernel_of, share_to_sync, sync_file
from distprune.checkpoint.hf_directory import WeightFile
from distprune.checkpoint.output_files import header_of, planned
from distprune.checkpoint.sharded_file import chunks_of, write_chunk
from distprune.checkpoint.stored_slices import fill_shards
from distprune.collectives import Communicator, together, work_together
from distprune.shards import Geometry, LocalShard


def write_together(
    comm: Communicator, path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, parts: Sequence[LocalShard]
) -> None:
    """Write tensors of ``shapes`` to the file ``path``, of which ``parts`` are what this rank has to write.

    The file is written beside ``path`` and takes its place when all of it is on the disk; its bytes do not depend on
    the layout. Every rank must call it, and see ``path``. Rounds: 2 to tell a name, 2 of 18 bytes a rank, 4 of 64
    bytes, and those of :func:`work_together`, twice.

    Raises:
        OSError: on every rank, nothing changed: ``path`` cannot be written, or a rank does not see it.
        ValueError: on every rank: paths differ.
    """
    with together(comm, path=str(path)):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; name a file, such as {path / 'masks.safetensors'}")
        whole = [
            LocalShard(name, torch.empty(tuple(shape), dtype=dtype, device="meta"), Geometry.whole(shape))
            for name, shape in shapes.items()
        ]
        file = planned(path, whole)
        places = {entry.name: entry for entry in file.tensors}
        kernel, token = kernel_of(path.parent), secrets.token_hex(4)
    token = comm.broadcast(token)
    share = share_to_sync(comm, kernel)
    with together(comm):
        staging = path.with_name(f".{path.name}.partial-{token}")

    def write() -> None:
        with staging.open("r+b", buffering=0) as handle:
            for part in parts:
                for values, stretches in chunks_of(part):
                    write_chunk(handle.fileno(), places[part.name], values, stretches)

    def sync() -> None:
        for each in [staging][share]:
            sync_file(each)

    try:
        with together(comm):
            if comm.rank == 0:
                staging.write_bytes(header_of(file.tensors))
                os.truncate(staging, file.tensors[-1].stop)
        work_together(comm, write)
        work_together(comm, sync)
        with together(comm):
            if comm.rank == 0:
                staging.replace(path)
                sync_file(path.parent)
    except BaseException:
        if comm.rank == 0:
            with suppress(OSError):
                staging.unlink()
        raise


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
