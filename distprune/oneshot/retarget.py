"""Weights that put out what is wanted, before any of them goes: W + share E (X^T X + lambda D)^-1.

D is the diagonal of X^T X, and E, (rows, in), what is wanted beyond W X: W times the shift of the inputs, or the
residual of the hidden states that the layer adds to (see :mod:`distprune.calibration.targets`). All of it overfits few
samples; half of it is the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distprune.calibration.moments import Moments
from distprune.oneshot.damping import DAMPING, damped_factor
from distprune.oneshot.rows import Rows

_CHUNK = 1 << 20  # weights that are worked on at a time


@dataclass(frozen=True)
class Aim:
    """How far rows are moved to their target, and lambda."""

    share: float = 0.5
    damping: float = DAMPING


def has_target(moments: Moments, aim: Aim) -> bool:
    """Return whether rows are moved to a target: the same on all ranks that have the ``moments``."""
    return aim.share > 0 and moments.num_tokens > 0 and (moments.shift is not None or bool(moments.residuals))


def target_factor(moments: Moments, aim: Aim) -> torch.Tensor:
    """Return L (in, in), lower triangular, of X^T X + lambda D = S L L^T S, S^2 being D, and 1 where that is 0. Local.

    Raises:
        ValueError: X^T X has no inverse, however much it is damped.
    """
    scale = _scale_of(moments)
    a = torch.outer(scale, scale)
    torch.div(moments.values, a, out=a)
    return damped_factor(a, aim.damping, moments.names[0])[0]


def retarget(rows: Mapping[str, Rows], moments: Moments, aim: Aim, lower: torch.Tensor) -> Moments:
    """Move ``rows`` part of the way to their target, in place, and return ``moments`` without it. Local.

    ``lower`` is the :func:`target_factor`. Weights that are 0 stay so, and an input that was always 0 moves nothing.
    Arithmetic is float32.
    """
    aimed = [(name, of) for name, of in rows.items() if of.weight.numel()]
    done, scale = dataclasses.replace(moments, shift=None, residuals={}), _scale_of(moments)
    for name, of in aimed:
        residual = moments.residuals.get(name)
        wanted = None if residual is None else torch.cat([residual[:, start:stop] for start, stop in of.runs], dim=1)
        step = max(1, _CHUNK // max(of.num_in, 1))
        for start in range(0, len(of.weight), step):
            weight = of.weight[start : start + step]
            if wanted is not None:
                beyond = wanted[:, start : start + step]
            else:
                assert moments.shift is not None
                beyond = (weight.float() @ moments.shift).t()
            change = torch.cholesky_solve(beyond / scale[:, None], lower).div_(scale[:, None]).t()
            weight.add_(change.masked_fill_(weight == 0, 0).to(weight.dtype), alpha=aim.share)
    return done


def _scale_of(moments: Moments) -> torch.Tensor:
    """Return the diagonal of S, (in,)."""
    scale = moments.square_sums.sqrt()
    return torch.where(scale == 0, 1, scale)
