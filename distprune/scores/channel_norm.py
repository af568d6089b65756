"""The L_n norm of every channel, ranked alike in every layout: the score of ``ln_structured``.

A norm is a sum over elements that several ranks may hold, and float sums depend on their order; so
the addends |x|^n are summed on a common grid (``exact_sum``). What is returned is ordered as the norms
are; no root is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import Communicator
from distprune.scores.exact_sum import grid_scale, on_grid
from distprune.shards import LocalShard, chunk_size

__all__ = ["ChannelPart", "Norm", "channel_norms", "check_norm", "unpruned_channels"]

Norm = int | float | str
Integers = npt.NDArray[np.int64]

_MAX_PRODUCT = 8  # integer powers up to this are products, whose bits do not depend on a libm


@dataclass(frozen=True)
class ChannelPart:
    """One parameter on this rank: the values whose norms count, and the mask so far (``None``: all is kept).

    ``masks_values``: pruned elements count as zero; otherwise the values stand as they are.
    """

    shard: LocalShard
    mask: torch.Tensor | None  # bool, local shape
    dim: int
    index: int  # of the parameter in the call
    masks_values: bool


def check_norm(n: Norm) -> float:
    """Return the exponent that ``n`` names, as ``torch.norm`` reads it (``"fro"`` is 2).

    Raises:
        NotImplementedError: ``"nuc"``, which needs whole channels in one place.
        ValueError: another name, or NaN.
        TypeError: neither a number nor a name.
    """
    if n == "fro":
        return 2.0
    if n == "nuc":
        raise NotImplementedError("n='nuc' needs the singular values of whole channels; use a number or 'fro'")
    if isinstance(n, str):
        raise ValueError(f"n={n!r} is no norm; use a number, inf, -inf or 'fro'")
    if isinstance(n, bool) or not isinstance(n, int | float):
        raise TypeError(f"n must be a number or 'fro', not {n!r}")
    if math.isnan(n):
        raise ValueError("n is NaN; use a number, inf, -inf or 'fro'")
    return float(n)


def channel_norms(
    comm: Communicator,
    parts: Sequence[ChannelPart],
    names: Sequence[str],
    num_channels: Sequence[int],
    channel_sizes: Sequence[int],
    n: Norm,
) -> list[Integers]:
    """Return per parameter one integer a channel, ordered as the norms are. Every rank of ``comm`` must call it.

    ``names``, ``num_channels`` and ``channel_sizes`` (elements in a channel) are those of every parameter
    of the call; ``parts`` are the rank's own. Two rounds for all parameters together: 8 bytes a parameter, and
    24 bytes a channel.

    Raises:
        ValueError: on every rank: values are NaN.
    """
    exponent = check_norm(n)
    if math.isinf(exponent):
        return _extremes(comm, parts, names, num_channels, smallest=exponent < 0)
    power = _power(exponent)
    largest = torch.zeros(len(num_channels), dtype=torch.float64)
    for part in _owned(parts):
        for _, values in _chunks(part):
            addends = power(values)
            finite = addends.masked_fill(~addends.isfinite(), 0.0)
            largest[part.index] = max(float(largest[part.index]), float(finite.max()))
    scales = [
        grid_scale(size, largest_addend)
        for size, largest_addend in zip(channel_sizes, comm.max(largest).tolist(), strict=True)
    ]
    totals = [torch.zeros((3, num), dtype=torch.int64) for num in num_channels]  # sums, infinities, NaNs
    for part in _owned(parts):
        sums, infinite, nans = totals[part.index]
        for channels, values in _chunks(part):
            addends = power(values)
            is_infinite, is_nan = addends.isinf(), addends.isnan()
            finite = addends.masked_fill(is_infinite | is_nan, 0.0)
            whole = on_grid(finite, scales[part.index])
            for total, addend in ((sums, whole), (infinite, is_infinite), (nans, is_nan)):
                _add(total, channels, addend, part.dim)
    ranked: list[Integers] = []
    for name, (sums, infinite, nans) in zip(names, _sum(comm, totals), strict=True):
        _check_nans(nans, name)
        ranks = np.where(infinite > 0, np.iinfo(np.int64).max, sums)
        ranked.append(-ranks if exponent < 0 else ranks)
    return ranked


def unpruned_channels(
    comm: Communicator, parts: Sequence[ChannelPart], num_channels: Sequence[int]
) -> list[npt.NDArray[np.bool_]]:
    """Return, per parameter and channel, whether any element is left: one round of 8 bytes a channel.

    Every rank of ``comm`` must call it.
    """
    totals = [torch.zeros((1, num), dtype=torch.int64) for num in num_channels]
    for part in _owned(parts):
        keep = part.mask if part.mask is not None else torch.ones(part.shard.geometry.local_shape, dtype=torch.bool)
        _add(totals[part.index][0], _channels(part), keep, part.dim)
    return [kept[0] > 0 for kept in _sum(comm, totals)]


def _extremes(
    comm: Communicator,
    parts: Sequence[ChannelPart],
    names: Sequence[str],
    num_channels: Sequence[int],
    *,
    smallest: bool,
) -> list[Integers]:
    """The largest |x| of every channel, or the smallest; both found as a maximum."""
    found = [torch.full((2, num), -torch.inf, dtype=torch.float64) for num in num_channels]  # extremes, NaNs
    for part in _owned(parts):
        best, nans = found[part.index]
        for channels, values in _chunks(part):
            sizes = -values.abs() if smallest else values.abs()
            is_nan = sizes.isnan()
            sizes.masked_fill_(is_nan, -torch.inf)
            others = [dim for dim in range(sizes.ndim) if dim != part.dim]
            best[channels] = torch.maximum(best[channels], sizes.amax(others).cpu())
            nans[channels] = torch.maximum(nans[channels], is_nan.to(torch.float64).amax(others).cpu())
    reduced = comm.max(torch.cat([each.reshape(-1) for each in found]))
    ranked: list[Integers] = []
    for name, pair in zip(names, torch.split(reduced, [2 * num for num in num_channels]), strict=True):
        best, nans = pair.view(2, -1).numpy()
        _check_nans(nans > 0, name)
        bits = (-best if smallest else best).copy().view(np.int64)
        ranked.append(np.where(bits < 0, -(bits & np.iinfo(np.int64).max), bits))  # -0.0 ranks as 0.0
    return ranked


def _check_nans(nans: npt.NDArray[np.generic], name: str) -> None:
    if nans.any():
        raise ValueError(
            f"values are NaN in {int(np.count_nonzero(nans))} channels of {name!r}; NaN has no place in the order, "
            "mend them first"
        )


def _owned(parts: Sequence[ChannelPart]) -> list[ChannelPart]:
    return [part for part in parts if part.shard.owned and part.shard.geometry.local_numel]


def _channels(part: ChannelPart) -> torch.Tensor:
    """Return the channel of every local index along the channels' dim."""
    runs = part.shard.geometry.dim_runs[part.dim]
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


def _chunks(part: ChannelPart) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (channels, values as float64) over the local elements, some rows at a time."""
    local, channels = part.shard.local, _channels(part)
    step = max(1, chunk_size(local.device) * local.shape[0] // local.numel())
    for start in range(0, local.shape[0], step):
        values = local[start : start + step].to(torch.float64)
        if part.masks_values and part.mask is not None:
            values = values.masked_fill(~part.mask[start : start + step], 0.0)
        yield (channels[start : start + step] if part.dim == 0 else channels), values


def _add(total: torch.Tensor, channels: torch.Tensor, addends: torch.Tensor, dim: int) -> None:
    others = [other for other in range(addends.ndim) if other != dim]
    total[channels] += addends.sum(others, dtype=torch.int64).cpu()


def _sum(comm: Communicator, totals: Sequence[torch.Tensor]) -> list[Integers]:
    reduced = comm.sum(torch.cat([total.reshape(-1) for total in totals]))
    pieces = torch.split(reduced, [total.numel() for total in totals])
    return [piece.view(total.shape).numpy() for piece, total in zip(pieces, totals, strict=True)]


def _power(exponent: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function x -> |x|**exponent (float64), whose bits depend on nothing but x."""
    if exponent == 0:
        return lambda values: (values != 0).to(torch.float64).masked_fill(values.isnan(), torch.nan)
    if exponent < 0:
        positive = _power(-exponent)
        return lambda values: positive(values).reciprocal()
    if exponent == 1:
        return torch.abs
    if exponent == 0.5:
        return lambda values: values.abs().sqrt()
    if exponent.is_integer() and exponent <= _MAX_PRODUCT:

        def product(values: torch.Tensor) -> torch.Tensor:
            size = values.abs()
            result = size
            for _ in range(int(exponent) - 1):
                result = result * size
            return result

        return product
    # One implementation for every device and every alignment.
    return lambda values: torch.from_numpy(np.power(values.abs().cpu().numpy(), exponent)).to(values.device)
