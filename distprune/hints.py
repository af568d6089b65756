"""What people bring from elsewhere, met with the way to go: keywords, methods and name patterns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Of methods that need calibration samples.
WALK = 'with calibration samples: prune_blocks(model, samples, 0.5, method="{}")'
_SHARE = "say sparsity={}: the share of zeros a call ends with"
_METHOD = 'say method="admm", "sparsegpt" or "wanda", or a Score'
_SCORE = 'say score="magnitude"; methods that need calibration samples, such as "wanda", are those of prune_blocks'
_SCHEDULE = "say schedule=constant({0}), or cubic({0}, stop=1000): the share of zeros at each step"
_STAYS = "say what stays: mlp=0.75, heads=6, layers=24, or parameters=0.8 of all"
_N_BY_M = 'say pattern="2:4"'
_BY_LAYER = "say sparsity={{NAME: share, ...}}, a share for each layer: 0 for one that stays dense"
_SHARES = ("amount", "ratio", "prune_ratio", "pruning_ratio", "sparsity_ratio", "target_sparsity")
_COUNTS = ("n", "m", "prunen", "prunem")

_BY_SCORE: dict[str, str] = {
    **dict.fromkeys(_SHARES, _SHARE),
    **dict.fromkeys(_COUNTS, _N_BY_M),
    **dict.fromkeys(("method", "pruning_method"), _SCORE),
}
_BY_METHOD: dict[str, str] = {
    **_BY_SCORE,
    **dict.fromkeys(("score", "pruning_method"), _METHOD),
    **dict.fromkeys(("include", "exclude"), _BY_LAYER),
}
_HINTS: dict[str, Mapping[str, str]] = {
    "prune_model": _BY_SCORE,
    "prune_shards": _BY_SCORE,
    "compute_masks": _BY_SCORE,
    "prune_blocks": _BY_METHOD,
    "SparseTraining": _BY_SCORE | dict.fromkeys((*_SHARES, "sparsity"), _SCHEDULE),
    "shrink_model": {
        **dict.fromkeys((*_SHARES, *_COUNTS, "sparsity", "pattern"), _STAYS),
        **dict.fromkeys(
            ("method", "pruning_method", "score"), 'say criterion="obs", which chooses the units that stay'
        ),
    },
}


def with_hints(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``function``, or an ``__init__``, which says the way to go for a keyword that it does not have.

    >>> with_hints(lambda sparsity: sparsity)(sparsty=0.5)
    Traceback (most recent call last):
        ...
    TypeError: <lambda>() takes no 'sparsty'; did you mean 'sparsity'?
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    called_as = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(_unknown(called_as, name, value, known))
        return function(*args, **kwargs)

    return called


def _unknown(function: str, name: str, value: Any, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    way = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
    shown = repr(value) if isinstance(value, float) else "0.5"
    return f"{function}() takes no {name!r}; {_HINTS.get(function, {}).get(name, way).format(shown)}"


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
