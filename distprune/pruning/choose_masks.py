"""The last round of a choice: masks, how much they prune, and whether there was a NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from distprune.collectives.agree import sum_together
from distprune.patterns.base import Choice, InPlace, Ranked
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

    def choose() -> list[tuple[int, int, int]]:
        chosen = choice.masks(ranked.scores)
        unread_nans = [0] * len(chosen) if ranked.of_left else count_unread_nans(ranked.scores)
        masks.extend(part.mask for part in chosen)
        then(masks)
        rows = zip(chosen, unread_nans, strict=True)
        return [(part.num_pruned, part.num_gone, part.num_nans + num_unread) for part, num_unread in rows]

    return masks, _counted(ranked, choose)


def zero_chosen(ranked: Ranked, in_place: InPlace) -> list[list[int]]:
    """Write zeros into the weights, and return the counts of :func:`choose_masks`: every rank must call it, one round.

    Raises:
        ValueError: on every rank, nothing changed: scores or weights are NaN.
    """
    in_place.zero()
    return _counted(ranked, lambda: torch.stack([*in_place.counts()]).tolist())


def _counted(ranked: Ranked, count: Callable[[], Iterable[Sequence[int]]]) -> list[list[int]]:
    """Return of every member what ``count`` says of this rank's shards: pruned, gone before, and, to raise, NaN."""
    num_nans: dict[str, int] = {}

    def fill(words: torch.Tensor) -> None:
        totals = words[1:].view(-1, 2).numpy()
        for scores, (*numbers, num) in zip(ranked.scores, count(), strict=True):
            if scores.shard.owned:
                totals[ranked.index[scores.shard.name]], num_nans[scores.shard.name] = numbers, num
        words[0] = sum(num_nans.values())

    words = sum_together(ranked.comm, (1 + 2 * len(ranked.numels),), fill)
    if words[0]:
        raise_nans(ranked.comm, num_nans)
    numbers: list[list[int]] = words[1:].view(-1, 2).tolist()
    return numbers
