"""One held parameter on this rank: which weights are kept, read from their bits, and what is masked with that.

Nouns: a weight is *held* where its bits are those of +0.0; all others are *kept*. While weights are held, a kept weight
that happens to be zero is written as -0.0, which is the same number. So the bits alone say what is held, in any layout,
and after any wrapper, checkpoint or change of the number of ranks.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from distprune.masks import read_kept, settle_kept, zero_where_pruned
from distprune.shards import LocalShard, Place, is_laid_out_like, local_of

__all__ = ["Held"]

# Per-element state of torch's optimizers that is no moment and no copy of the weight.
_NO_MOMENTS = ("step_size",)


class Held:
    """The zeros of one shard."""

    def __init__(self, shard: LocalShard) -> None:
        self.shard = shard
        # As bytes of numpy's: it asks for huge pages.
        host = torch.from_numpy(np.ones(shard.geometry.local_shape, dtype=np.bool_))
        self.kept = host.to(shard.local.device)
        self.num_held = 0
        self.is_new = True  # state of an optimizer may not be clean where weights are held
        self._masked: tuple[int, int] | None = None  # the gradient masked since the last step, and its version
        self._num_changed: torch.Tensor | int = 0
        self._as_read: tuple[int, torch.Tensor] | None = None  # the version of the weights, and the counts

    def read(self) -> torch.Tensor:
        """Read from the bits which weights are kept.

        Return how many changed since :meth:`take`, and how many are held: int64, on the device.
        """
        counts = read_kept(self.shard.local, self.kept)
        counts[0] += self._num_changed
        self._num_changed = counts[0]
        self._as_read = self.shard.local._version, counts
        return counts

    def read_again(self) -> torch.Tensor:
        """Do so before a step, unless nobody has written to the weights since they were read with their gradient."""
        if self._as_read is not None and self._as_read[0] == self.shard.local._version:
            return self._as_read[1]
        return self.read()

    def take(self, counts: torch.Tensor) -> None:
        """Take over the counts of :meth:`read`, which are on the host now."""
        num_changed, self.num_held = counts.tolist()
        self._num_changed, self._as_read = 0, None
        if num_changed:
            self.is_new, self._masked = True, None

    def mask_gradient(self, place: Place) -> None:
        """Write zeros into the gradient where weights are held."""
        gradient = place.parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            gradient._values().mul_(self.kept[tuple(gradient._indices())].to(gradient.dtype))
        elif not isinstance(gradient, DTensor) or is_laid_out_like(gradient, cast(DTensor, place.parameter)):
            zero_where_pruned(place.part_of(gradient), self.kept)
            self._masked = id(gradient), local_of(gradient)._version
        # A partial sum stays: the optimizer reduces it itself, and what it writes is settled.

    def mask_gradient_again(self, place: Place) -> None:
        """Do so before a step, unless nobody has touched the gradient since that was done."""
        gradient, masked = place.parameter.grad, self._masked
        self._masked = None  # the next gradient may have the same id
        if gradient is None or gradient.is_sparse or masked != (id(gradient), local_of(gradient)._version):
            self.mask_gradient(place)
            self._masked = None

    def clean(self, place: Place, state: dict[str, object]) -> None:
        """Write zeros into an optimizer's per-element ``state`` where weights are held, if the mask has changed."""
        if not self.is_new:
            return
        for name, value in state.items():
            if name in _NO_MOMENTS or not isinstance(value, torch.Tensor) or value.shape != place.parameter.shape:
                continue
            if type(local_of(value)) is torch.Tensor and value.is_floating_point():
                zero_where_pruned(place.part_of(value), self.kept)
        self.is_new = False

    def settle(self) -> None:
        """After a step: zeros where weights are held, and -0.0 where a kept one has become zero."""
        settle_kept(self.shard.local, self.kept)
