"""Which rank does the work on an input: factors its second moments, and sweeps the rows of the layers it is given to.

Nouns: the *owner* of an input is the rank that factors its X^T X. Where owners alone share the work out well, a
owner also sweeps all rows of the input's layers: then nothing has to be agreed on, and no other rank needs X^T X or
its factor. What is too large for that is *spread*: the owner sends its factor to all, and every rank sweeps the rows
that it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

_FACTOR = 4  # multiplications of a factorization that take as long as one of a sweep
_WORTH = 1.25  # what owners may take longer than the best way to spread: rounds cost more than that
_MOST_WEIGHTS = 2  # times its share of a block's weights that a rank may sweep as an owner: it has them in memory


@dataclass(frozen=True)
class SharedInput:
    """What the layers ``names``, of ``num_out`` rows in all, are given: ``num_tokens`` times ``num_in`` features."""

    names: tuple[str, ...]
    num_in: int
    num_out: int
    num_tokens: int


@dataclass(frozen=True)
class OwnerRank:
    """``rank`` factors; it also sweeps, unless that is ``spread`` over all ranks."""

    rank: int
    spread: bool = False


@lru_cache(maxsize=16)  # blocks are alike
def find_owners(shapes: tuple[tuple[int, int], ...], num_ranks: int) -> tuple[OwnerRank, ...]:
    """Return the owner of every input, the same on every rank; ``shapes``: of each, (``num_in``, ``num_out``).

    As few inputs are spread, the largest first, as keep the busiest rank within a quarter of the best there is,
    by number of multiplications (in^2 for each row, and in^3 for the factor, which go faster), and leave no rank
    with more than twice its share of the weights.
    """
    sweeps = [num_out * num_in**2 for num_in, num_out in shapes]
    factors = [num_in**3 // _FACTOR for num_in, _ in shapes]
    weights = [num_out * num_in for num_in, num_out in shapes]
    by_size = sorted(range(len(shapes)), key=lambda i: -sweeps[i])
    plans: list[tuple[float, tuple[OwnerRank, ...]]] = []
    for num_spread in range(len(shapes) + 1):
        spread = set(by_size[:num_spread])
        jobs = [factors[i] + (0 if i in spread else sweeps[i]) for i in range(len(shapes))]
        owners = tuple(OwnerRank(rank, i in spread) for i, rank in enumerate(_share_out(jobs, num_ranks)))
        loads, swept = [0] * num_ranks, [0] * num_ranks
        for i, owner in enumerate(owners):
            loads[owner.rank] += jobs[i]
            swept[owner.rank] += 0 if owner.spread else weights[i]
        if max(swept) * num_ranks <= _MOST_WEIGHTS * sum(weights):
            plans.append((max(loads) + sum(sweeps[i] for i in spread) / num_ranks, owners))
    best = min(time for time, _ in plans)
    return next(owners for time, owners in plans if time <= _WORTH * best)


def find_routed_owners(
    inputs: Sequence[SharedInput], holders: Sequence[Collection[int]], num_ranks: int
) -> tuple[OwnerRank, ...]:
    """Return the owner of every routed input, the same on every rank: one of its ``holders``, if there are any.

    ``holders``: ranks that have all rows of the input's layers, of each; nothing has to be sent to them but tokens. The
    largest input goes first, each to the rank that has the least to do.
    """
    jobs = [of.num_in**2 * (of.num_tokens + of.num_out) + of.num_in**3 // _FACTOR for of in inputs]
    loads, ranks = [0] * num_ranks, [0] * len(inputs)
    for i in sorted(range(len(inputs)), key=lambda i: -jobs[i]):
        ranks[i] = min(holders[i] or range(num_ranks), key=loads.__getitem__)
        loads[ranks[i]] += jobs[i]
    return tuple(map(OwnerRank, ranks))


def _share_out(jobs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of every job: the largest job first, each to the rank that has the least to do."""
    ranks = [0] * len(jobs)
    loads = [(0, rank) for rank in range(num_ranks)]
    for i in sorted(range(len(jobs)), key=lambda i: -jobs[i]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + jobs[i], rank))
        ranks[i] = rank
    return ranks
