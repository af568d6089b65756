"""One checkpoint on all ranks: each opens it for itself, and all compare what they see. Nodes may have copies."""

from __future__ import annotations

from pathlib import Path

from distprune.checkpoint.digest import new_digest
from distprune.checkpoint.hf_directory import HfDirectory, open_directory
from distprune.collectives.agree import agree, together
from distprune.collectives.base import Communicator

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of every weight file


def open_together(comm: Communicator, path: str | Path) -> HfDirectory:
    """Return what ``open_directory`` returns, on every rank. Every rank must call it: two rounds of 64 bytes.

    Raises:
        Exception: on every rank: what ``open_directory`` raises.
        ValueError: on every rank: ranks see other configs, weight files or tensors.
    """
    with together(comm):
        directory = open_directory(path)
        facts = {"weight files": [*directory.stamps], "model files": directory.fingerprint()}
    agree(comm, facts)
    return directory


def sample_together(comm: Communicator, directory: HfDirectory) -> str:
    """Return a digest of bytes from all over the weight files, 256 KiB of each: it tells models of one shape apart.

    The same for any number of ranks. Every rank must call it, and reads them: two rounds of 64 bytes.

    Raises:
        OSError: on every rank: a file cannot be read.
        ValueError: on every rank: ranks see other weights.
    """
    with together(comm):
        digest = new_digest()
        for file in directory.weight_files:
            last = max(file.path.stat().st_size - _SAMPLE_BYTES, 0)
            with file.path.open("rb", buffering=0) as handle:
                for place in range(_NUM_SAMPLES):
                    handle.seek(last * place // (_NUM_SAMPLES - 1))
                    digest.update(handle.read(_SAMPLE_BYTES))
        sample = str(digest.hexdigest())
        facts = {"model files": directory.fingerprint(), "weights (256 KiB of each file)": sample}
    agree(comm, facts)
    return sample
