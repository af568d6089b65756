"""What kernels on a GPU choose from: the weights themselves, where a score is one that kernels know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distprune.kernels.available import has_kernels
from distprune.kernels.lowest import Keys
from distprune.kernels.table import Piece, pieces_of
from distprune.kernels.within import keep_groups, keep_rows
from distprune.patterns.base import Ranked
from distprune.scores.base import LocalScores
from distprune.scores.random import Random
from distprune.selection.order import Order

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def keys_of_weights(ranked: Ranked, scores: Sequence[LocalScores], orders: Iterable[Order]) -> Keys | None:
    """Return how kernels make keys of all of ``scores``, on one GPU; ``None``: they do not. Local."""
    name, distinct, devices = ranked.score.kernel, {*orders}, {each.device for each in scores}
    is_gone = {None if each.gone is None else each.gone is each.shard.local for each in scores}
    if name is None or ranked.regrows or len(distinct) != 1 or len(devices) != 1 or len(is_gone) != 1:
        return None
    (order,), (device,), (zeros_gone,) = distinct, devices, is_gone
    if zeros_gone is False or not has_kernels(device) or not all(map(_is_plain, scores)):
        return None
    wide = name == "magnitude" and any(each.shard.local.dtype is not order.value_dtype for each in scores)
    gone = 0 if name == "magnitude" and zeros_gone else -1
    return Keys(name, gone, order.last, bool(zeros_gone), wide)


def _is_plain(scores: LocalScores) -> bool:
    read = [scores.shard.local, *(scores.evidence[name] for name in scores.score.needs)]
    return all(tensor.is_contiguous() and tensor.dtype in _FLOATS for tensor in read)


def pieces(scores: LocalScores, tensor: int, out: torch.Tensor | None, **place: Any) -> list[Piece]:
    """Return the pieces of one shard: row ``tensor`` of the totals; ``place``: where in its competition."""
    other = scores.evidence[scores.score.needs[0]] if scores.score.needs else None
    seeds = scores.score._seeds(scores.shard.name) if isinstance(scores.score, Random) else (0, 0)
    shard = scores.shard
    return pieces_of(shard.geometry, shard.local, out, other, tensor=tensor, owned=shard.owned, seeds=seeds, **place)


def write_masks(
    scores: Sequence[LocalScores], units: Sequence[tuple[str, int, int]], keys: Keys, outs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Write what stays of shards whose units are whole, and return the counts of each: pruned, gone before, NaN. Local.

    ``units``: ``("groups", n, m)``, or ``("rows", inputs, how many go)``. One launch for all of one kind.
    """
    totals = torch.zeros((len(scores), 3), dtype=torch.int64, device=scores[0].device)
    members: dict[tuple[str, int, int], list[Piece]] = {}
    for i, (each, unit, out) in enumerate(zip(scores, units, outs, strict=True)):
        members.setdefault(unit, []).extend(pieces(each, i, out))
    for (kind, first, second), parts in members.items():
        (keep_groups if kind == "groups" else keep_rows)(parts, first, second, keys, totals)
    return [*totals.unbind()]
