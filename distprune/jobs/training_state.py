"""The state of a training on the disk, by torch.distributed.checkpoint: readable at any number of ranks.

The files are safetensors: nothing in them is unpickled, unlike the ``.metadata`` of DCP's own format.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distprune.checkpoint.disk import sync_file
from distprune.checkpoint.output_lock import remove_tree
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import ProcessGroup
from distprune.collectives.slow import work_together

_FILE_BYTES = 1 << 30  # of all ranks together: a rank has its part of a file in memory twice


def write_state(comm: Communicator, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write ``state`` into the new directory ``folder``, on the disk. Every rank must call it: what DCP communicates.

    Raises:
        OSError: on every rank: the disk is full or not writable.
    """
    with together(comm):
        if comm.rank == 0:
            remove_tree(folder)
            folder.mkdir(mode=0o700)
        numbers, num_bytes = dict[str, int](), 0
        for name, tensor in state.items():
            numbers[name] = 1 + num_bytes // _FILE_BYTES
            num_bytes += tensor.numel() * tensor.element_size()
    writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
    with _causes():
        save(dict(state), storage_writer=writer, **_ranks(comm))

    def sync() -> None:
        for path in sorted(folder.iterdir()):
            sync_file(path)

    work_together(comm, sync)


def read_state(comm: Communicator, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read ``state`` in place from what :func:`write_state` has written. Every rank: what DCP communicates.

    Raises:
        OSError: on every rank: a file cannot be read.
        ValueError: on every rank: a file is damaged, or lacks something.
    """
    try:
        with _causes():
            load(dict(state), storage_reader=HuggingFaceStorageReader(str(folder)), **_ranks(comm))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{folder} is not as it was written, remove {folder.parent} and start anew: {error}"
        ) from error


def _ranks(comm: Communicator) -> dict[str, Any]:
    group: dist.ProcessGroup | None = comm.group if isinstance(comm, ProcessGroup) else None
    return {"process_group": group, "no_dist": comm.size == 1}


@contextmanager
def _causes() -> Iterator[None]:
    """Raise what one rank has met, not the exception, no ``Exception``, in which DCP carries it to all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank needs none
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
