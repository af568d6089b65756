"""Competitors so few that their keys are told in one round, not counted: every rank then knows which are lowest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.selection.competition import Ranges, Standings
from distprune.selection.scan import Entry
from distprune.shards.device import fetched

_MOST = (1 << 14) - 3  # words of a message of 128 KiB, but for those that say whether all is well


def can_tell(standings: Standings) -> bool:
    """Return whether all keys fit into one message. Local."""
    return int(standings.num_positions.sum()) <= _MOST


def tell_keys(comm: Communicator, standings: Standings, entries: Callable[[], Sequence[Entry]]) -> bool:
    """Decide all competitions; return whether the elements are as was said. Every rank must call it: one round.

    If not, nothing is decided.
    """
    num = int(standings.num_positions.sum())
    firsts = np.cumsum(standings.num_positions) - standings.num_positions

    def fill(words: torch.Tensor) -> None:
        own = entries()
        orders = [standings.competitions[entry.competition].order for entry in own]
        everything = [slice(0, entry.geometry.local_numel) for entry in own]
        found = [entry.scores.keys(order, at) for entry, order, at in zip(own, orders, everything, strict=True)]
        for entry, order, at, keys in zip(own, orders, everything, fetched(found), strict=True):
            places = entry.geometry.flat_indices(at.start, at.stop) + entry.first_position
            words.index_add_(0, places + int(firsts[entry.competition]), keys.to(torch.int64))
            words[num] += len(keys)
            words[num + 1] += (keys > order.last).sum()

    words = sum_together(comm, (num + 2,), fill).numpy()
    if words[num] != num or words[num + 1]:
        return False
    keys, of = words[:num], np.repeat(np.arange(len(firsts)), standings.num_positions)
    lowest_first = np.lexsort((keys, of))  # stable: of equal keys the lowest position
    last = np.maximum(standings.num_lowest - 1, 0)
    place = lowest_first[np.minimum(firsts + last, max(num - 1, 0))] if num else firsts
    key = keys[place] if num else firsts
    standings.only_gone[:] = (standings.num_lowest == 0) | (key < standings.all_keys.low)
    standings.keys = Ranges(key.copy(), key.copy())
    standings.positions = Ranges(place - firsts, place - firsts)
    standings.needs_scan[:] = False
    return True
