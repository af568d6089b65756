"""One round of counts: int64 counts for each competition, made where the scores are, and summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from distprune.collectives import Communicator, sum_together
from distprune.selection.competition import Undecided, Words
from distprune.selection.scan import Entry
from distprune.shards import fetched, on_host


def summed_counts(
    comm: Communicator,
    states: Sequence[Undecided],
    num_words: int,
    entries: Callable[[], Iterable[Entry]],
    count: Callable[[torch.Tensor, Entry, Undecided], None],
) -> Words:
    """Return the sum over ranks of what ``count`` adds, (competitions, words): one round, and on each device one wait.

    ``count`` is called for each of this rank's ``entries``, with the row of its competition, on the device of its
    scores. Every rank must call this. What raises on one rank while it counts is raised on all.
    """

    def fill(counts: torch.Tensor) -> None:
        there: dict[torch.device, torch.Tensor] = {}
        for entry in entries():
            device = entry.scores.device
            if not on_host(device) and device not in there:
                there[device] = torch.zeros_like(counts, device=device)
            of_device = counts if on_host(device) else there[device]
            count(of_device[entry.competition], entry, states[entry.competition])
        for counted in fetched([*there.values()]):
            counts += counted

    summed: Words = sum_together(comm, (len(states), num_words), fill).numpy()
    return summed
