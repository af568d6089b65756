"""One round of counts: a row of int64 for each competition, counted where the scores are, summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from distprune.collectives import Communicator, sum_together
from distprune.selection.competition import Words
from distprune.shards import fetched, on_host

__all__ = ["Part", "counted_rows"]

Part = tuple[int, torch.device, Callable[[torch.Tensor], None]]  # competition, device, what adds to its row there


def counted_rows(comm: Communicator, num_rows: int, num_words: int, parts: Callable[[], Iterable[Part]]) -> Words:
    """Return what all ranks' ``parts`` add to the rows; one round, and on each device one wait.

    Every rank must call it. What raises on one rank while it makes its parts or counts is raised on all.
    """

    def fill(rows: torch.Tensor) -> None:
        there: dict[torch.device, torch.Tensor] = {}
        for index, device, count in parts():
            if not on_host(device) and device not in there:
                there[device] = torch.zeros_like(rows, device=device)
            count((rows if on_host(device) else there[device])[index])
        for counted in fetched([*there.values()]):
            rows += counted

    summed: Words = sum_together(comm, (num_rows, num_words), fill).numpy()
    return summed
