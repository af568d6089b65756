"""How sparse a model is at each step, and how a sparsity is divided among its parameters.

A schedule is a function from the step to the share of zeros. Steps count from 0. A schedule never goes down: held zeros
do not come back.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import nn

from distprune.collectives.communicator import Group, communicator
from distprune.hints import with_hints
from distprune.models.find_shards import NamePattern
from distprune.patterns.base import check_share
from distprune.pruning.agreement import NamedWeights

Schedule = Callable[[int], float]


def constant(sparsity: float) -> Schedule:
    """Return a schedule that is ``sparsity`` from the first step on.

    >>> constant(0.5)(0)
    0.5
    """
    return at_once(sparsity, step=0)


def at_once(sparsity: float, *, step: int) -> Schedule:
    """Return a schedule that is 0 before ``step``, and ``sparsity`` from there on.

    >>> [at_once(0.5, step=2)(step) for step in range(4)]
    [0.0, 0.0, 0.5, 0.5]
    """
    return stepwise({step: sparsity})


def stepwise(sparsities: Mapping[int, float]) -> Schedule:
    """Return a schedule that takes each of ``sparsities`` from its step on, and is 0 before the first.

    >>> [stepwise({1: 0.5, 3: 0.8})(step) for step in range(5)]
    [0.0, 0.5, 0.5, 0.8, 0.8]

    Raises:
        ValueError: the sparsities go down, or one is out of range.
    """
    steps = sorted(sparsities)
    levels = [0.0, *(sparsities[step] for step in steps)]
    check_rise(levels, levels[1:])
    return partial(_level_at, steps, levels)


@with_hints
def cubic(final: float, *, stop: int, start: int = 0, initial: float = 0.0, every: int = 1) -> Schedule:
    """Return the cubic schedule: it rises fast at first and slowly at the end.

    s(t) = final + (initial - final) (1 - (t - start) / (stop - start))^3, from ``start`` to ``stop``, taken every so
    many steps; 0 before ``start``. Steps count from 0, so it takes ``stop`` + 1 of them to come to ``final``. (Zhu and
    Gupta, arXiv 1710.01878, equation 1.)

    >>> [round(cubic(0.8, stop=4)(step), 3) for step in range(6)]
    [0.0, 0.463, 0.7, 0.788, 0.8, 0.8]

    Raises:
        ValueError: ``final`` is below ``initial``, one of them is out of range, or ``stop`` is not after ``start``.
    """
    check_share(float(initial), "initial")
    check_rise([initial], [final])
    if not 0 <= start < stop or every < 1:
        raise ValueError(f"a schedule needs 0 <= start < stop and every >= 1, not {start=}, {stop=}, {every=}")

    return partial(_cubic_at, final, stop, start, initial, every)


def _level_at(steps: list[int], levels: list[float], step: int) -> float:
    return levels[bisect.bisect_right(steps, step)]


def _cubic_at(final: float, stop: int, start: int, initial: float, every: int, step: int) -> float:
    if step >= stop:
        return final
    if step < start:
        return 0.0
    passed = (step - start) // every * every / (stop - start)
    return final + (initial - final) * (1 - passed) ** 3


def check_rise(before: Iterable[float], after: Iterable[float]) -> None:
    """Check that schedules may go from each of ``before`` to the one of ``after`` beside it. Local.

    Raises:
        ValueError: one goes down, or is out of range.
    """
    for low, high in zip(before, after, strict=False):
        if not 0 <= low <= high <= 1:
            for level in (low, high):
                check_share(float(level), "a sparsity of the schedule")
            raise ValueError(f"the schedule goes down from {low} to {high}; zeros that are held do not come back")


def erk(
    model: nn.Module,
    sparsity: float,
    *,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> dict[str, float]:
    """Return a sparsity for each parameter by Erdős-Rényi-Kernel, ``sparsity`` over all of them together.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64))
    >>> shares = erk(model, 0.8)
    >>> shares["0.weight"] < 0.8 < shares["1.weight"]
    True

    The density of a parameter is in proportion to the sum of its dims over their product, so small layers stay denser;
    what would be denser than 1 is left whole. (RigL, arXiv 1911.11134, section 3.) Give it to
    :func:`distprune.prune_model` or :func:`distprune.prune_blocks` as ``sparsity``.

    Which parameters, and who must call it: as :func:`distprune.prune_model`. One round; on pipelines up to five.

    Raises:
        ValueError: on every rank: ``sparsity`` is out of range, or differs between ranks, or a pattern matches nothing.
    """

    def look() -> float:
        check_share(float(sparsity))
        return float(sparsity)

    agreed = NamedWeights(model, include, exclude).agree(communicator(group), look)
    return erk_of_shapes({member.name: member.global_shape for member in agreed.roster.members}, sparsity)


def erk_of_shapes(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    """Return a sparsity for each of ``shapes``: see :func:`erk`. Local."""
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / max(numel[name], 1) for name, shape in shapes.items()}
    whole: set[str] = set()
    while True:
        left = [name for name in shapes if name not in whole]
        kept = (1 - sparsity) * sum(numel.values()) - sum(numel[name] for name in whole)
        scale = kept / max(sum(raw[name] * numel[name] for name in left), 1e-300)
        full = {name for name in left if raw[name] * scale > 1}
        if not full:
            return {name: 0.0 if name in whole else 1 - raw[name] * scale for name in shapes}
        whole |= {name for name in full if raw[name] == max(raw[other] for other in full)}
