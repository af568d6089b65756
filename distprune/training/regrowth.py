"""Drop the smallest of the kept weights and let as many others grow: their number stays, their places move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from typing_extensions import override

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.kernels.held import count_zeros
from distprune.kernels.table import ScoreName
from distprune.masks.in_place import zero_all_where_pruned
from distprune.patterns.as_pattern import as_pattern, says_how_much
from distprune.patterns.base import Pattern, Ranked, check_share
from distprune.patterns.unstructured import Unstructured
from distprune.pruning.agreement import NamedWeights, agreeing, choose_masks, gradients_there
from distprune.scores.as_score import Magnitude
from distprune.scores.base import Elements, LocalScores, Score
from distprune.scores.random import Random
from distprune.shards.local_shard import LocalShard, bits_of
from distprune.shards.parameter_range import ranges_of

GrowBy = Literal["gradient", "random"]


@dataclass(frozen=True)
class Regrow:
    """Every so many steps before ``stop``, a share of the kept weights of each parameter moves within the pattern.

    >>> layer = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> moving = Regrow(stop=750, every=100)  # of 1,000 steps
    >>> training = SparseTraining(layer, optimizer, schedule=constant(0.8), regrow=moving)

    The share begins at ``fraction`` and falls as a cosine to 0 at ``stop``. The kept weights of smallest magnitude are
    dropped, and as many grow, from zero. What was dropped may grow again, and then keeps its value. Patterns hold:

    - unstructured: both are chosen in the whole parameter;
    - ``"2:4"``: the share is dropped in the whole parameter, and each group of four gets back as many as it lost;
    - ``"row"``: the share of each row is dropped, and as many grow in that row;
    - ``"block:16"``, ``"channels:0"``: the share counts blocks or channels, which move as a whole, by sums.

    ``by="random"``: any grow (SET, arXiv 1707.04780). ``"gradient"``: those whose gradient is the largest (RigL, arXiv
    1911.11134, section 3). As in RigL's code (google-research/rigl), the gradients that choose are not stepped on: at
    such a step the optimizers find no gradients, so that weights, moments and weight decay stand still.

    What grew is zero at first, and zeros are pruned first. So from the first step at which weights move up to ``stop``
    :class:`SparseTraining` prunes further only at steps at which they move.

    Measured on text (``benchmarks/bench_recipes.py``), growth by gradient did worse than zeros that never move: more
    than half of it fell into a tenth of the rows. Hence the default.

    With ``"2:4"`` this is training with N:M masks that move. Another way to it, which trains the pruned weights too and
    keeps them beside the model, is :class:`StraightThrough` (SR-STE).

    Raises:
        ValueError, TypeError: on construction: a share out of range, steps that are not positive, or every step.
    """

    stop: int
    every: int = 100
    fraction: float = 0.3
    by: GrowBy = "random"

    def __post_init__(self) -> None:
        check_share(float(self.fraction), "fraction")
        if not isinstance(self.every, Integral) or not isinstance(self.stop, Integral):
            raise TypeError(f"every={self.every!r}, stop={self.stop!r}: steps are whole numbers")
        if self.every < 2 or self.stop < 1:
            raise ValueError(
                f"every={self.every}, stop={self.stop}: regrowth needs stop >= 1, and every >= 2, for what grew must "
                "be trained before the smallest go"
            )
        _check_by(self.by)

    def is_due(self, step: int) -> bool:
        """Return whether weights move at ``step``."""
        return 0 < step < self.stop and step % self.every == 0

    def pruned_at(self, step: int) -> int:
        """Return the last step, ``step`` at most, at which more may be pruned beside what moves."""
        last = min(step, self.stop - 1) // self.every * self.every
        until = last + self.every
        if until >= self.stop:  # nothing moves then
            until = max(self.stop, last + 2)
        return last if last > 0 and step < until else step

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
    weights: NamedWeights,
    share: float,
    pattern: Pattern | str,
    *,
    by: GrowBy,
    seed: int | None,
    look: Callable[[], object],
) -> Counts:
    """Move ``share`` of the kept ``weights`` of each parameter within ``pattern``. Every rank must call it.

    What the pattern drops of the kept weights is that of smallest magnitude. Of all that is not kept then, as much is
    kept from now on, of each tensor, row or group: that of largest gradient, or any. What was dropped may be among it,
    and keeps its value; others start at zero, written as -0.0. ``look`` is local, and called before weights are read.
    Two choices by the pattern, and a round of 16 bytes.

    Raises:
        ValueError: on every rank, nothing changed: no gradient, NaN gradients, arguments that differ, a parameter that
            is frozen, or that the pattern does not fit.
        NotImplementedError: on every rank: the pattern has no ``regrowth``.
    """

    with agreeing(comm) as agreed:
        check_share(float(share), "share")
        _check_by(by)
        within = as_pattern(pattern, None if says_how_much(pattern) else 0.0)
        dropping, growing = within.regrowth(float(share))
        agreed.found = weights.find_for(within)
        agreed.facts = {"share": repr(share), "pattern": repr(within), "by": by, **weights.facts}
        agreed.score = Random(seed) if by == "random" else Magnitude()
        look()
        there = agreed.found.shards
        for shard, where in zip(there, ranges_of(there, weights.model.parameters()), strict=True):
            if where is not None and not where.parameter.requires_grad:
                raise ValueError(f"{shard.name!r} is frozen: what grows could not learn; leave it out with exclude")
    agreed.check_found()
    shards: list[LocalShard] = []
    were_kept: list[torch.Tensor] = []

    def to_drop() -> list[LocalScores]:
        shards[:] = agreed.shards()
        were_kept[:] = [bits_of(shard.local) != 0 for shard in shards]
        return [LocalScores(shard, Magnitude(), {}, kept) for shard, kept in zip(shards, were_kept, strict=True)]

    ranked = Ranked(comm, agreed.roster, Magnitude(), to_drop, of_left=True)
    left, _ = choose_masks(ranked, ranked.choose(dropping))
    score = _Growth(agreed.score, adds_up=not (growing.is_by_row or isinstance(growing, Unstructured)))

    def to_grow() -> list[LocalScores]:
        evidence: list[dict[str, torch.Tensor]] = [{"left": of_left} for of_left in left]
        if by == "gradient":
            for given, gradient in zip(evidence, gradients_there(weights.model, shards), strict=True):
                given["gradient"] = gradient
        return [LocalScores(s, score, given, kept) for s, given, kept in zip(shards, evidence, were_kept, strict=True)]

    ranked = Ranked(comm, agreed.roster, score, to_grow, of_left=True, regrows=True)
    kept, counts = choose_masks(ranked, ranked.choose(growing))

    def count_new(num_moved: torch.Tensor) -> None:  # the last that can fail on one rank
        owned = [(bits_of(shard.local), stay) for shard, stay in zip(shards, kept, strict=True) if shard.owned]
        num_moved[0] = sum(count_zeros([bits for bits, _ in owned], [stay for _, stay in owned]))

    num_moved = int(sum_together(comm, (1,), count_new)[0])
    zero_all_where_pruned([(shard.local, stay) for shard, stay in zip(shards, kept, strict=True)], signs=1)
    num_elements = sum(math.prod(member.global_shape) for member in agreed.roster.members)
    return Counts(sum(num_held for num_held, _ in counts), num_elements, num_moved)


_MOST = (1 << 31) - 1


@dataclass(frozen=True)
class _Growth(Score):
    """How much a weight wants to grow; what was not dropped comes before all.

    ``adds_up``: units are chosen by sums; those that it is in come before all then.
    """

    by: Score
    adds_up: bool

    @property
    @override
    def kernel(self) -> ScoreName | None:  # type: ignore[override]
        return None if self.adds_up else "random" if isinstance(self.by, Random) else "gradient"

    @override
    def seeds(self, name: str) -> tuple[int, int]:
        return self.by.seeds(name)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        left = elements["left"]
        if isinstance(self.by, Random):
            values = self.by.values(elements)
            return values.double().masked_fill_(left, torch.inf) if self.adds_up else values.masked_fill_(left, _MOST)
        size = elements["gradient"].abs()
        values = size.to(torch.promote_types(size.dtype, torch.float32))
        values = values.clamp(max=torch.finfo(values.dtype).max)  # what is infinite comes after what is left
        return values.masked_fill_(left, torch.inf)

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        if isinstance(self.by, Random):
            return torch.float64 if self.adds_up else torch.int32
        return super().dtype(weight)

    @override
    def reads(self, shard: LocalShard, evidence: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return list(evidence.values())


def _check_by(by: object) -> None:
    if by not in ("gradient", "random"):
        raise ValueError(f"by={by!r} is not known; use 'gradient' or 'random'")
