"""What ranks tell each other where each may have something else to tell: every different value once."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distprune.collectives.agree import same_everywhere, sum_together
from distprune.collectives.base import Communicator

Told = list[tuple[Sequence[int], Any]]  # the ranks that told a value, ascending, and the value as JSON carries it

_WORD = 8  # bytes


def told_by_all(comm: Communicator, make: Callable[[], Any]) -> Told:
    """Return every different value that the ranks' ``make`` return, with the ranks, in the order of the first of those.

    Every rank must call it; ``make`` must not communicate. One round of 64 bytes if all values are the same, else the
    two of :func:`each_different` besides. What ``make`` raises on one rank is raised on all.
    """
    values: list[Any] = []

    def made() -> Any:
        values.append(make())
        return values[0]

    if same_everywhere(comm, made)[0]:
        return [(range(comm.size), json.loads(json.dumps(values[0])))]
    return each_different(comm, values[0])


def each_different(comm: Communicator, value: Any) -> Told:
    """Return every different ``value`` of the ranks, as :func:`told_by_all` does.

    Every rank must call it. Two rounds: 16 bytes a rank, and each different value, compressed, from the first rank that
    has it.
    """
    packed = zlib.compress(json.dumps(value).encode())
    digest = int.from_bytes(hashlib.sha256(packed).digest()[: _WORD - 1], "little")

    def announce(words: torch.Tensor) -> None:
        words[comm.rank] = torch.tensor([digest, len(packed)], dtype=torch.int64, device="cpu")

    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, (number, size) in enumerate(sum_together(comm, (comm.size, 2), announce).tolist()):
        ranks.setdefault((number, size), []).append(rank)
    sizes = [-(-size // _WORD) for _, size in ranks]
    firsts = [same[0] for same in ranks.values()]

    def tell(words: torch.Tensor) -> None:
        if comm.rank in firsts:
            buffer = torch.split(words, sizes)[firsts.index(comm.rank)].view(torch.uint8)
            buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    parts = torch.split(sum_together(comm, (sum(sizes),), tell), sizes)
    return [
        (same, json.loads(zlib.decompress(bytes(part.view(torch.uint8)[:size].numpy()))))
        for ((_, size), same), part in zip(ranks.items(), parts, strict=True)
    ]
