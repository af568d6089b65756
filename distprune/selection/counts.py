"""One round of counts: int64 counts for each competition, made where the scores are, and summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from distprune.collectives import Communicator, sum_together
from distprune.selection.competition import Words
from distprune.shards import fetched, on_host

__all__ = ["Contribution", "summed_counts"]

# Competition, device, and what adds to the counts of that competition there.
Contribution = tuple[int, torch.device, Callable[[torch.Tensor], None]]


def summed_counts(
    comm: Communicator, num_competitions: int, num_words: int, contributions: Callable[[], Iterable[Contribution]]
) -> Words:
    """Return the sum of all ranks' ``contributions``, (competitions, words): one round, and on each device one wait.

    Every rank must call it. What raises on one rank while it counts is raised on all.
    """

    def fill(counts: torch.Tensor) -> None:
        there: dict[torch.device, torch.Tensor] = {}
        for index, device, count in contributions():
            if not on_host(device) and device not in there:
                there[device] = torch.zeros_like(counts, device=device)
            count((counts if on_host(device) else there[device])[index])
        for counted in fetched([*there.values()]):
            counts += counted

    summed: Words = sum_together(comm, (num_competitions, num_words), fill).numpy()
    return summed
