"""Which elements compete with each other, and the exact choice among them over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral, Real

from distprune.patterns.base import Pattern, Scope, check_share, shares_of
from distprune.patterns.block import Block
from distprune.patterns.channels import Channels
from distprune.patterns.n_by_m import NByM
from distprune.patterns.unstructured import Unstructured
from distprune.patterns.within_rows import PerRow


def as_pattern(
    pattern: Pattern | str,
    sparsity: float | Mapping[str, float] | None = None,
    scope: Scope | None = None,
) -> Pattern:
    """Return ``pattern`` as a :class:`Pattern`. Local.

    ``sparsity``: a share, or one for each parameter by name.
    ``pattern``: a pattern, or its text. ``"unstructured"``, ``"row"``, ``"block:16"`` and
    ``"channels:0"`` need ``sparsity``; ``"2:4"`` does not take it. ``scope`` replaces the pattern's own.

    Raises:
        ValueError: a text that is not a pattern; a sparsity that is out of range, missing, or given twice; a scope
            that does not go with the pattern.
        TypeError: neither a pattern nor a text; a sparsity that is not a float.
    """
    if sparsity is not None:
        if not isinstance(sparsity, Real | Mapping) or isinstance(sparsity, bool):
            raise TypeError(f"sparsity must be a share such as 0.5, or one for each name, not {sparsity!r}")
        check_share(sparsity)
        if any(isinstance(each, Integral) for each in shares_of(sparsity)):
            raise TypeError(f"sparsity={sparsity!r} must be a share such as 0.5; Unstructured({sparsity!r}) is a count")
    if isinstance(pattern, str):
        found = _from_text(pattern, sparsity)
    elif not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern or its text, such as '2:4', not {pattern!r}")
    elif sparsity is not None:
        raise ValueError(f"pattern={pattern!r} says how much is pruned; leave out sparsity={sparsity!r}")
    else:
        found = pattern
    return found if scope is None else found.within(scope)


def says_how_much(pattern: Pattern | str) -> bool:
    """Return whether ``pattern`` itself says how much is pruned, as ``"2:4"`` does. Local."""
    return isinstance(pattern, Pattern) or (isinstance(pattern, str) and pattern[:1].isdigit())


def _from_text(text: str, sparsity: float | Mapping[str, float] | None) -> Pattern:
    name, _, number = text.partition(":")
    if re.fullmatch(r"\d+:\d+", text):
        if sparsity is not None:
            raise ValueError(f"pattern={text!r} says how much is pruned; leave out sparsity={sparsity!r}")
        return NByM(int(name), int(number))
    if not re.fullmatch(r"unstructured|row|block:\d+|channels:-?\d+", text):
        raise ValueError(
            f"pattern={text!r} is not known; use 'unstructured', 'row', N:M such as '2:4', 'block:SIZE' such as "
            "'block:16', or 'channels:DIM' such as 'channels:0'"
        )
    if sparsity is None:
        raise ValueError(f"pattern={text!r} needs sparsity=..., the share of zeros to end with, such as 0.5")
    scope: Scope = "tensor" if isinstance(sparsity, Mapping) else "global"
    if name == "block":
        return Block(int(number), sparsity, scope)
    if name == "channels":
        return Channels(sparsity, int(number))
    if name == "row":
        return PerRow(sparsity)
    return Unstructured(sparsity, scope)
