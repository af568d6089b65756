"""The last round of a choice: masks, how much they prune, and whether there was a NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distprune.collectives.agree import sum_together
from distprune.patterns.base import Choice, Ranked
from distprune.scores.base import count_unread_nans
from distprune.selection.radix import raise_nans


def choose_masks(
    ranked: Ranked, choice: Choice, then: Callable[[Sequence[torch.Tensor]], object] = len
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return the mask of each of this rank's shards; and of every member, over all ranks, how many elements are pruned,
    and how many of these were before.

    ``then`` is local. It is given the masks, and what it raises on one rank is raised on all. Every rank must call it:
    one round of 16 bytes a parameter.

    Raises:
        ValueError: on every rank: scores are NaN, or weights that they do not read, unless shares are of what is left.
    """
    masks: list[torch.Tensor] = []
    num_nans: dict[str, int] = {}

    def count(words: torch.Tensor) -> None:
        totals, chosen = words[1:].view(-1, 2).numpy(), choice.masks(ranked.scores)
        unread_nans = [0] * len(chosen) if ranked.of_left else count_unread_nans(ranked.scores)
        for scores, part, num_unread in zip(ranked.scores, chosen, unread_nans, strict=True):
            masks.append(part.mask)
            if scores.shard.owned:
                totals[ranked.index[scores.shard.name]] = part.num_pruned, part.num_gone
                num_nans[scores.shard.name] = part.num_nans + num_unread
        words[0] = sum(num_nans.values())
        then(masks)

    words = sum_together(ranked.comm, (1 + 2 * len(ranked.numels),), count)
    if words[0]:
        raise_nans(ranked.comm, num_nans)
    return masks, words[1:].view(-1, 2).tolist()
