"""How a one-shot job shares its zeros out among linear maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from distprune.oneshot import Allocation
from distprune.patterns import Pattern

__all__ = ["allocation_of", "with_shares"]

GRADIENTS_FROM = 0.6  # the sparsity from which shares by gradients are the default


def allocation_of(asked: Allocation | None, pattern: Pattern, method: str) -> Allocation:
    """Return what was ``asked`` for, or else the default for ``method`` by ``pattern``. Local.

    Raises:
        ValueError: shares by gradients were asked for, and ``pattern`` has no one share for all maps.
    """
    share = vars(pattern).get("sparsity")
    if asked == "gradients" and not isinstance(share, float):
        raise ValueError(
            f"allocation='gradients' needs a pattern with one share, such as 'unstructured' with a sparsity of 0.6; "
            f"{pattern!r} leaves nothing to share out"
        )
    if asked is not None:
        return asked
    # Wanda and SparseGPT are by default as the papers have them.
    by_default = isinstance(share, float) and share >= GRADIENTS_FROM and method == "admm"
    by_default = by_default and pattern.by_row().is_by_row
    return "gradients" if by_default else "uniform"


def with_shares(pattern: Pattern, shares: Mapping[str, float] | None) -> Pattern:
    """Return ``pattern`` for each linear map by itself, with ``shares`` by name where there are some. Local."""
    pattern = pattern.within("tensor") if pattern.has_scope else pattern
    return pattern if shares is None else dataclasses.replace(pattern, sparsity=shares)  # type: ignore[type-var]
