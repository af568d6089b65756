"""How a sparsity is divided among the parameters of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from distprune.collectives.communicator import Group, communicator
from distprune.models.find_shards import NamePattern
from distprune.patterns.base import check_share
from distprune.pruning.agreement import NamedWeights


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
        whole |= {name for name in full if raw[name] == max(raw[each] for each in full)}
