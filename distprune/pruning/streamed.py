"""Prune parameters that lie in files, and that no rank ever holds: chosen over all of them, then piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from distprune.collectives.base import Communicator
from distprune.patterns.base import Pattern
from distprune.pruning.prune_model import Choosing, Request
from distprune.pruning.report import PruneReport
from distprune.scores.base import count_unread_nans, local_scores
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership, bits_of, cut
from distprune.shards.pieces import grain_of, pieces_of, share_of

_PIECE_NUMEL = 1 << 22  # elements in memory at a time, several times over


class StreamedPruning:
    """Which elements of ``values`` go: by parameter name, whole, mapped from files.

    Every rank of ``comm`` must make one, with the same files. Each has an even share of every parameter, which cuts no
    row, group or block that is decided together, so no weight and no score travels. Communicates as ``prune_model``,
    which says what ``request`` may ask for and what is raised; ``request.weights`` were found on the meta device.

    What is read to choose: nothing where groups and rows are decided by themselves. Where elements compete, all of it
    twice, as ``select_lowest`` does, and once more where many tie (16-bit weights do); blocks and channels, twice.
    Memory beside the files: a few pieces, 24 MiB of undecided scores, and 34 bytes for each block of its share.
    """

    def __init__(self, comm: Communicator, request: Request, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self._grains: dict[str, tuple[int, ...]] = {}

        def share(pattern: Pattern, shard: LocalShard) -> LocalShard:
            unit, shape, original = pattern.unit(shard.as_matrix()), shard.shape, None
            if unit == (1, 1) and values[shard.name].is_contiguous():  # anywhere: as one line, which is read fastest
                shape, original = (shard.geometry.global_numel,), shard.shape
            grain = (1,) * len(shape) if unit == (1, 1) else grain_of(shape, shard.as_matrix(), unit)
            geometry = share_of(shape, grain, comm.rank, comm.size)
            self._grains[shard.name] = grain
            local = self.values(shard.name, geometry)
            return dataclasses.replace(
                shard, local=local, geometry=geometry, ownership=Ownership(), original_shape=original, tensor=None
            )

        self._choosing = Choosing(comm, request, share)
        self._shards = {shard.name: shard for shard in self._choosing.ranked.shards()}

    def pieces(self, name: str) -> Iterator[Geometry]:
        """Yield the pieces of this rank's part of parameter ``name``, or of it as one line. Local."""
        return pieces_of(self._shards[name].geometry, self._grains[name], _PIECE_NUMEL)

    def values(self, name: str, piece: Geometry) -> torch.Tensor:
        """Return a piece of parameter ``name``: a view. Local."""
        return cut(self._values[name].reshape(piece.global_shape), piece)

    def prune(self, name: str, piece: Geometry) -> tuple[torch.Tensor, list[int]]:
        """Return a piece of parameter ``name``, 0 where elements are pruned: new. Local; threads may call it.

        Return also how many are pruned, how many of these were before, and how many are NaN, which the caller sums.
        """
        values = self.values(name, piece)
        shard = dataclasses.replace(self._shards[name], local=values, geometry=piece)
        (scores,) = local_scores(self._choosing.ranked.score, [shard], zeros_are_gone=True)
        (num_unread,) = count_unread_nans([scores])
        mask = torch.empty(piece.local_numel, dtype=torch.bool, device="cpu")
        num_pruned, num_gone, num_nans = self._choosing.choice.decide(scores, mask).tolist()
        left = torch.empty(piece.local_shape, dtype=values.dtype, device="cpu")
        keep = mask.view(piece.local_shape).numpy().view(np.int8)
        np.multiply(bits_of(values).numpy(), keep, out=bits_of(left).numpy())
        return left, [num_pruned, num_gone, num_nans + num_unread]

    @property
    def names(self) -> list[str]:
        """The names of all parameters, in the order that the ranks agreed on."""
        return [member.name for member in self._choosing.ranked.roster.members]

    def report(self, counts: Sequence[Sequence[int]]) -> PruneReport:
        """Return what was done; ``counts``: of every one of :attr:`names`, zeros and zeros before. Without masks."""
        return self._choosing.report(counts, reads=False)
