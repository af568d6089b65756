"""How sparse a model is at each step: a schedule is a function from the step to the share of zeros.

Steps count from 0. A schedule never goes down: held zeros do not come back.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from functools import partial

from distprune.hints import with_hints
from distprune.patterns.base import check_share

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
    for before, after in itertools.pairwise(levels):
        check_rises(before, after)
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
    check_rises(initial, final)
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


def check_rises(before: float, after: float) -> None:
    """Check that a schedule may go from ``before`` to ``after``. Local.

    Raises:
        ValueError: it goes down, or ``after`` is out of range.
    """
    check_share(float(after), "a sparsity of the schedule")
    if after < before:
        raise ValueError(f"the schedule goes down from {before} to {after}; zeros that are held do not come back")
