"""How much of what two masks prune is the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from distprune.formatting import one_line, share
from distprune.shards.device import count_true, fetched
from distprune.shards.local_shard import flat_chunks


@dataclass(frozen=True)
class Overlap:
    """How much of what two masks prune is the same: intersection over union, ``total`` and ``by_name``; 1: all.

    >>> layer = torch.nn.Linear(8, 4)
    >>> masks, other = compute_masks(layer, 0.5), compute_masks(layer, 0.5, score="random")
    >>> masks.overlap(masks).total, masks.overlap(other).by_name.keys()
    (1.0, dict_keys(['weight']))
    """

    total: float
    by_name: dict[str, float]

    @staticmethod
    def of(counts: Mapping[str, Sequence[int]]) -> Overlap:
        """Return it from the number of elements of each parameter that both masks prune, and that at least one does.

        >>> Overlap.of({"a": (1, 4), "b": (0, 0)}).by_name
        {'a': 0.25, 'b': 1.0}
        """
        in_both, in_either = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
        return Overlap(_ratio(in_both, in_either), {name: _ratio(*pair) for name, pair in counts.items()})

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.total)} of what either prunes, {len(self.by_name)} parameters")


def _ratio(num_in_both: int, num_in_either: int) -> float:
    return num_in_both / num_in_either if num_in_either else 1.0


def counts_pruned(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[list[int]]:
    """Return of each pair of masks of one shape how many elements both prune, and how many at least one. Local.

    A device is waited for once.
    """
    kept, nums = list[torch.Tensor](), list[int]()
    for one, other in pairs:
        chunks = [(a, b) for (_, a), (_, b) in zip(flat_chunks(one), flat_chunks(other), strict=True)]
        kept += [count_true(op(a, b)) for op in (torch.logical_or, torch.logical_and) for a, b in chunks]
        nums.append(len(chunks))
    left = iter(fetched(kept))
    return [
        [one.numel() - sum(map(int, itertools.islice(left, num))) for _ in range(2)]
        for (one, _), num in zip(pairs, nums, strict=True)
    ]
