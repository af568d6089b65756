"""Drop the smallest of the kept weights and let as many others grow: the number of zeros stays, their places move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from typing_extensions import override

from distprune.collectives import Communicator, sum_together
from distprune.masks import bits_of, zero_where_pruned
from distprune.models import Found, NamePattern, find_shards
from distprune.patterns import Ranked, Unstructured, check_share
from distprune.pruning.agreement import Agreed, Facts, agree_on, all_shown
from distprune.pruning.prune_model import choose_masks, gradients_there
from distprune.scores import Elements, LocalScores, Magnitude, Random, Score
from distprune.shards import LocalShard, count_zeros

GrowBy = Literal["gradient", "random"]
_NUM_HASH_BITS = 1  # that make room for a value above all hashes


@dataclass(frozen=True)
class Regrow:
    """Every so many steps before ``stop``, a share of the kept weights of each parameter moves.

    The share begins at ``fraction`` and falls as a cosine to 0 at ``stop``. ``by="gradient"``: those grow whose
    gradient is the largest (RigL, arXiv 1911.11134, section 3); ``"random"``: any (SET, arXiv 1707.04780).

    Raises:
        ValueError: on construction: a share out of range, or steps that are not positive.
    """

    stop: int
    every: int = 100
    fraction: float = 0.3
    by: GrowBy = "gradient"

    def __post_init__(self) -> None:
        check_share(float(self.fraction), "fraction")
        if self.every < 1 or self.stop < 1:
            raise ValueError(f"regrowth needs every >= 1 and stop >= 1, not every={self.every}, stop={self.stop}")
        _check_by(self.by)

    def is_due(self, step: int) -> bool:
        """Return whether weights move at ``step``."""
        return 0 < step < self.stop and step % self.every == 0

    def share(self, step: int) -> float:
        """Return the share of the kept weights that move at ``step``."""
        return self.fraction / 2 * (1 + math.cos(math.pi * step / self.stop))


@dataclass(frozen=True)
class Counts:
    """Weights over all ranks, replicas once: how many are held at zero, of how many.

    ``num_moved``: how many regrowth let grow, and as many others became zero.
    """

    num_held: int
    num_elements: int
    num_moved: int = 0

    @property
    def sparsity(self) -> float:
        """The share of held weights."""
        return self.num_held / max(self.num_elements, 1)


def regrow(
    comm: Communicator,
    model: nn.Module,
    share: float,
    *,
    by: GrowBy = "gradient",
    seed: int | None = None,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
) -> Counts:
    """Move ``share`` of the kept weights of each parameter. Every rank must call it.

    The kept weights of smallest magnitude are dropped. Of all that are not kept then, as many are kept from now on:
    those of largest gradient, or any. What was dropped may be among them, and keeps its value; others start at zero,
    written as -0.0. Two choices, each as by :class:`distprune.Unstructured` of each tensor, and a round of 16 bytes.

    Raises:
        ValueError: on every rank, nothing changed: no gradient, NaN gradients, or arguments that differ.
    """

    def look() -> tuple[Found, Facts, Score, None]:
        check_share(float(share), "share")
        _check_by(by)
        facts = {"share": repr(share), "by": by, "include": all_shown(include), "exclude": all_shown(exclude)}
        return find_shards(model, include, exclude), facts, Random(seed) if by == "random" else Magnitude(), None

    agreed, _ = agree_on(comm, look)
    agreed.check_found()
    shards: list[LocalShard] = []

    def to_drop() -> list[LocalScores]:
        shards[:] = agreed.shards()
        return [LocalScores(shard, Magnitude(), {}, bits_of(shard.local) != 0) for shard in shards]

    left, counts = _chosen(agreed, Magnitude(), to_drop, share, of_left=True)
    num_held = {m.name: before for m, (_, before) in zip(agreed.roster.members, counts, strict=True)}
    score = _Growth(agreed.score)

    def to_grow() -> list[LocalScores]:
        evidence: list[dict[str, torch.Tensor]] = [{"kept": of_left} for of_left in left]
        if by == "gradient":
            for own, gradient in zip(evidence, gradients_there(model, shards), strict=True):
                own["gradient"] = gradient
        return [LocalScores(shard, score, own) for shard, own in zip(shards, evidence, strict=True)]

    kept, _ = _chosen(agreed, score, to_grow, num_held)
    new: list[torch.Tensor] = []

    def find_new(num_moved: torch.Tensor) -> None:  # the last that can fail on one rank
        new[:] = [of_kept & (bits_of(shard.local) == 0) for shard, of_kept in zip(shards, kept, strict=True)]
        owned = [of_new for of_new, shard in zip(new, shards, strict=True) if shard.owned]
        num_moved[0] = sum(of_new.numel() for of_new in owned) - sum(count_zeros(owned))

    num_moved = int(sum_together(comm, (1,), find_new)[0])
    for shard, of_kept, of_new in zip(shards, kept, new, strict=True):
        zero_where_pruned(shard.local, of_kept)
        shard.local.masked_fill_(of_new, -0.0)
    num_elements = sum(math.prod(member.global_shape) for member in agreed.roster.members)
    return Counts(sum(num_held.values()), num_elements, num_moved)


def _chosen(
    agreed: Agreed,
    score: Score,
    make_scores: Callable[[], list[LocalScores]],
    share: float | Mapping[str, int],
    *,
    of_left: bool = False,
) -> tuple[list[torch.Tensor], list[list[int]]]:
    ranked = Ranked(agreed.comm, agreed.roster, score, make_scores, of_left=of_left)
    return choose_masks(ranked, Unstructured(share, scope="tensor").choose(ranked))


@dataclass(frozen=True)
class _Growth(Score):
    """How much a weight that is zero wants to grow; what is kept already comes before all."""

    by: Score

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        is_kept = elements["kept"]
        if isinstance(self.by, Random):
            values = self.by.values(elements) >> _NUM_HASH_BITS
            return values.masked_fill_(is_kept, torch.iinfo(values.dtype).max)
        gradient = elements["gradient"]
        return (gradient if gradient.dtype is torch.float64 else gradient.float()).abs().masked_fill(is_kept, torch.inf)

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return self.by.dtype(weight) if isinstance(self.by, Random) else super().dtype(weight)

    @override
    def reads(self, shard: LocalShard, evidence: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return list(evidence.values())


def _check_by(by: object) -> None:
    if by not in ("gradient", "random"):
        raise ValueError(f"by={by!r} is not known; use 'gradient' or 'random'")
