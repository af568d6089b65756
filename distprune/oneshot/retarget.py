"""Weights that put out what is wanted, before any of them goes: W + share E (X^T X + lambda D)^-1.

D is the diagonal of X^T X, and E, (rows, in), what is wanted beyond W X: W times the shift of the inputs, or the
residual of the hidden states that the layer adds to (see :mod:`distprune.calibration.targets`). All of it overfits few
samples; half of it is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distprune.calibration.moments import Moments
from distprune.oneshot.damping import DAMPING, damped_factor
from distprune.oneshot.rows import Rows, row_parts

_SHIFT = "+"  # beside the names of layers


@dataclass(frozen=True)
class Aim:
    """How far rows are moved to their target, and lambda."""

    share: float = 0.5
    damping: float = DAMPING


def way_to_target(moments: Moments, aim: Aim) -> dict[str, torch.Tensor]:
    """Return, of the owner's ``moments``, what all of the way takes; nothing, if there are no targets. Local.

    ``_SHIFT``: C (X^T X + lambda D)^-1, (in, in), C the shift, which rows are to be multiplied by; by layers that have
    one R^T (X^T X + lambda D)^-1, (out, in), R the residual. float32.

    Raises:
        ValueError: X^T X has no inverse, however much it is damped.
    """
    if not moments.num_tokens or moments.products is None or (moments.shift is None and not moments.residuals):
        return {}
    norms = moments.norms
    scale = torch.where(norms == 0, 1, norms)
    a = moments.products.float().div_(torch.outer(scale, scale))
    lower = damped_factor(a, aim.damping, moments.names[0])[0]
    wanted = {name: residual.float() for name, residual in moments.residuals.items()}
    if moments.shift is not None and wanted.keys() != set(moments.names):
        wanted[_SHIFT] = moments.shift.t().float()
    scales = scale[:, None]
    return {name: torch.cholesky_solve(beyond / scales, lower).div_(scales).t() for name, beyond in wanted.items()}


def retarget(rows: Mapping[str, Rows], way: Mapping[str, torch.Tensor], aim: Aim) -> None:
    """Move ``rows`` part of their ``way``, see :func:`way_to_target`, in place. Local.

    Weights that are 0 stay so. Arithmetic is float32.
    """
    for name, layer in rows.items() if way else ():
        changes = [way[name][start:stop] for start, stop in layer.runs] if name in way else None
        parts = layer.weight if changes is None else torch.cat([way[name][:0], *changes])
        for weight, part in row_parts(layer.weight, parts):
            beyond = part.float() @ way[_SHIFT] if changes is None else part
            weight.add_(beyond.masked_fill(weight == 0, 0).to(weight.dtype), alpha=aim.share)
