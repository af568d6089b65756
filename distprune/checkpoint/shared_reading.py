"""The files of a checkpoint, each read by one rank for all: file i by rank i mod W, of the W that see the same files.

Ranks see the same files where size, time of the last change and inode of every one are the same. Nodes may have copies
of their own: then those that see one *copy* share its files, and what they find in different copies is compared.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from distprune.checkpoint.digest import NUM_WORDS, as_words, new_digest
from distprune.checkpoint.disk import share_of
from distprune.checkpoint.hf_directory import HfDirectory, list_files, read_header
from distprune.collectives.agree import agree, same_everywhere, sum_together, together
from distprune.collectives.base import Communicator

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of every weight file
_WORD = 8  # bytes


@dataclass(frozen=True)
class _Sight:
    """``copy``: which of ``num_copies`` this rank sees. ``share``: which of its files this rank reads for all."""

    copy: int
    num_copies: int
    share: slice


def open_together(comm: Communicator, path: str | Path) -> HfDirectory:
    """Return what ``open_directory`` returns, on every rank; each header is read once and told to all, compressed.

    Every rank must call it, and find the same: three rounds of 64 bytes, one of 8 bytes a file (and 16), one of the
    headers (about 12 bytes a tensor). Where there are copies three rounds more, 34 bytes a rank and 16 a copy.

    Raises:
        Exception: on every rank: what ``open_directory`` raises.
        ValueError: on every rank: headers of copies differ.
    """
    with together(comm):
        files = list_files(path)
        seen = _seen(files.stamps)
    sight = _sight(comm, seen, [*files.stamps])
    own: dict[int, bytes] = {}

    def measure(words: torch.Tensor) -> None:
        lengths, digests = words[: len(files.paths)], words[len(files.paths) :].view(-1, NUM_WORDS)
        for number, of_file in [*enumerate(files.paths)][sight.share]:
            header = read_header(of_file)
            digests[sight.copy] += as_words(new_digest(f"{number}:".encode() + header))
            if sight.copy == 0:
                own[number] = zlib.compress(header)
                lengths[number] = len(own[number])

    measured = sum_together(comm, (len(files.stamps) + sight.num_copies * NUM_WORDS,), measure)
    bounds = [*itertools.accumulate(measured[: len(files.stamps)].tolist(), initial=0)]

    def tell(words: torch.Tensor) -> None:
        told = words.numpy().view("u1")
        for number, header in own.items():
            told[bounds[number] : bounds[number + 1]] = bytearray(header)

    told = sum_together(comm, (-(-bounds[-1] // _WORD),), tell)  # bytes of different ranks have no bit in common
    digest = _text(measured[len(files.stamps) :], sight)
    with together(comm, headers=digest):
        text = told.numpy().tobytes()
        return files.directory(zlib.decompress(text[start:stop]) for start, stop in itertools.pairwise(bounds))


def sample_together(comm: Communicator, directory: HfDirectory) -> str:
    """Return a digest of bytes from all over the weight files, 256 KiB of each: it tells models of one shape apart.

    The same for any number of ranks; of different copies it may not be the same. Every rank must call it, for
    directories of equal names: two rounds of 64 bytes and one of 24; where there are copies three more, 34 bytes a rank
    and 16 a copy.

    Raises:
        OSError: on every rank: a file cannot be read.
    """
    with together(comm):
        seen = _seen(directory.stamps)
    sight = _sight(comm, seen, [*directory.stamps])

    def sample(words: torch.Tensor) -> None:
        for number, file in [*enumerate(directory.weight_files)][sight.share]:
            digest = new_digest(f"{number}:".encode())
            last = max(file.path.stat().st_size - _SAMPLE_BYTES, 0)
            with file.path.open("rb", buffering=0) as handle:
                for place in range(_NUM_SAMPLES):
                    handle.seek(last * place // (_NUM_SAMPLES - 1))
                    digest.update(handle.read(_SAMPLE_BYTES))
            words[sight.copy] += as_words(digest)

    return _text(sum_together(comm, (sight.num_copies, NUM_WORDS), sample), sight)


def _seen(stamps: dict[str, list[int]]) -> str:
    return str(new_digest(repr(stamps).encode()).hexdigest())


def _sight(comm: Communicator, seen: str, names: list[str]) -> _Sight:
    """Return which of the files called ``names`` this rank reads; ``seen`` is the same where they are the same files.

    Every rank must call it: one round of 64 bytes; where there are copies three more, 34 bytes a rank in all.

    Raises:
        ValueError: on every rank: names differ.
    """
    if same_everywhere(comm, seen)[0]:
        return _Sight(0, 1, slice(comm.rank, None, comm.size))
    agree(comm, {"weight files": names})
    all_seen = comm.gather(seen)
    copies = [*dict.fromkeys(all_seen)]
    return _Sight(copies.index(seen), len(copies), share_of(all_seen, comm.rank))


def _text(digests: torch.Tensor, sight: _Sight) -> str:
    """Return the digest of this rank's copy as text."""
    return digests.numpy().tobytes()[sight.copy * NUM_WORDS * _WORD :][: NUM_WORDS * _WORD].hex()
