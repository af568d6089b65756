"""Elements that compete one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.census import Competing, num_lowest, take_census
from distprune.patterns.on_gpu import ElementsOnGpu, runs_on_gpu
from distprune.patterns.within_rows import PerRow
from distprune.scores.base import LocalScores
from distprune.selection.highest import keep_highest_per_row
from distprune.selection.host import Source
from distprune.selection.radix import select_lowest
from distprune.shards.matrix import Matrix


@final
@dataclass(frozen=True)
class Unstructured(Pattern):
    """The lowest ``sparsity`` of all weights, one by one: a fraction, rounded by ``round()``, or (an int) a number.

    >>> layer = torch.nn.Linear(8, 4)
    >>> prune_model(layer, pattern=Unstructured(10)).num_pruned  # or a share: 0.5, pattern="unstructured"
    10

    The weights of all parameters compete (``scope="global"``), or those of each (``"tensor"``), which may have a
    sparsity each: ``Unstructured({"0.weight": 0.5, "2.weight": 0.8}, scope="tensor")``. In one-shot pruning
    the weights of one matrix compete, except where the paper says otherwise. Wanda: those of each row (arXiv
    2306.11695, section 3), as :class:`PerRow`. SparseGPT: those of each block of 128 columns, over all rows (arXiv
    2301.00774, section 3.3).

    Raises:
        TypeError: ``sparsity`` is not a number.
        ValueError: it is out of range.
    """

    needs_matrix = False
    width = 1

    sparsity: Shares
    scope: Scope = "global"

    def __post_init__(self) -> None:
        check_share(self.sparsity, scope=self.scope)

    @override
    def __str__(self) -> str:
        return "unstructured"

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, and those of ``select_lowest``."""
        num_gone = take_census(ranked, counts_gone=ranked.of_left)[0] if ranked.checks else [0] * len(ranked.numels)
        return choose_elements(ranked, self.sparsity, self.scope, num_gone)

    def keep_alone(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """Return what stays of ``keys``, integers, all of parameter ``name``, which competes with no other. Local."""
        num = num_lowest(self.sparsity, [name], keys.numel(), 0, of_left=False)
        return keep_highest_per_row(keys.view(1, -1), num).view_as(keys)

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, 1

    @override
    def by_row(self) -> Pattern:
        return PerRow(self.sparsity)


def choose_elements(ranked: Ranked, share: Shares, scope: Scope, num_gone: Sequence[int], what: str = "") -> Choice:
    """Return the choice of the ``share`` lowest elements. Every rank must call it, after the census.

    Arguments are those of :meth:`Competing.competitions`, rounds and errors those of :func:`select_lowest`.
    """
    competing = Competing(ranked, scope, ranked.numels)

    def source(scores: LocalScores) -> Source:
        shard = scores.shard
        return Source(shard.name, scores.device, scores.keys, shard.geometry, shard.owned, *competing.place(scores))

    competitions = competing.competitions(share, num_gone, ranked.order, what)
    if ranked.on_gpu and runs_on_gpu(ranked, competitions):
        on_gpu = ElementsOnGpu(ranked, competing, competitions)
        in_place = on_gpu if on_gpu.reads_weights else None
        return Choice(on_gpu.thresholds, lambda s, out: on_gpu.write_masks([s], [out])[0], on_gpu.write_masks, in_place)
    selection = select_lowest(ranked.comm, competitions, lambda: [*map(source, ranked.scores)])
    return Choice(competing.by_member(selection.thresholds), lambda scores, out: selection.decide(source(scores), out))
