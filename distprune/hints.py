"""What people bring from elsewhere, met with the way to go: keywords, methods and name patterns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Of methods that need calibration samples.
WALK = 'with calibration samples: prune_blocks(model, samples, 0.5, method="{}")'
_SHARES = ["amount", "ratio", "prune_ratio", "pruning_ratio", "sparsity_ratio", "target_sparsity"]
# By keyword, what to say where a function has no such one.
_WAYS = {
    **dict.fromkeys(_SHARES, "say sparsity={}: the share of zeros a call ends with"),
    **dict.fromkeys(("n", "m", "prunen", "prunem"), 'say pattern="2:4"'),
    "method": 'say score="magnitude"; methods that need calibration samples, such as "wanda", are of prune_blocks',
    "score": 'say method="admm", "sparsegpt" or "wanda", or a Score',
    **dict.fromkeys(("include", "exclude"), "say sparsity={{NAME: share, ...}}, 0 for a layer that stays dense"),
}
_STAYS = "say what stays: mlp=0.75, heads=6, layers=24, or parameters=0.8 of all"
_SCHEDULE = "say schedule=constant({0}), or cubic({0}, stop=1000): the share of zeros at each step"
_WAYS_OF = {
    "SparseTraining": dict.fromkeys([*_SHARES, "sparsity"], _SCHEDULE),
    "shrink_model": dict.fromkeys([*_SHARES, "sparsity", "pattern"], _STAYS) | {"method": 'say criterion="obs"'},
}


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``function``, or an ``__init__``, which says the way to go for a keyword that it does not have.

    >>> with_hints(lambda sparsity: sparsity)(sparsty=0.5)
    Traceback (most recent call last):
        ...
    TypeError: <lambda>() takes no 'sparsty'; did you mean 'sparsity'?
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(_unknown(function.__qualname__.removesuffix(".__init__"), name, value, known))
        return function(*args, **kwargs)

    return called


def _unknown(function: str, name: str, value: Any, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    near = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
    way = _WAYS_OF.get(function, {}).get(name) or _WAYS.get(name, near)
    return f"{function}() takes no {name!r}; {way.format(repr(value) if isinstance(value, float) else '0.5')}"


def as_int(name: str, number: object) -> int:
    """Return ``number``, of the argument ``name``, as an int: numpy's integers too. Local.

    Raises:
        TypeError: it is no integer, or it is a bool.
    """
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{name} must be an int, not {number!r}")
    return int(number)


def near_names(pattern: str, names: Sequence[str]) -> str:
    """Return what to say of a name pattern that matches none of ``names``.

    >>> near_names("attn", ["0.attn.q", "0.mlp"])
    "a pattern matches whole names: '*attn*' would match 1, such as '0.attn.q'"
    >>> near_names("*.mpl", ["0.attn.q", "0.mlp"])
    "near it are '0.mlp'"
    """
    inside = [name for name in names if fnmatchcase(name, f"*{pattern}*")]
    if inside:
        wider = f"*{pattern.strip('*')}*"
        return f"a pattern matches whole names: {wider!r} would match {len(inside)}, such as {inside[0]!r}"
    close = get_close_matches(pattern, names, cutoff=0.4)
    return f"{'near it are' if close else 'names are such as'} {', '.join(map(repr, close or names[:3]))}"
