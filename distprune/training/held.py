"""One held parameter on this rank: which weights are kept, read from their bits, and what is masked with that.

Nouns: a weight is *held* where its bits are those of +0.0; all others are *kept*. While weights are held, a kept weight
that happens to be zero is written as -0.0, which is the same number. So the bits alone say what is held, in any layout,
and after any wrapper, checkpoint or change of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from distprune.masks import read_kept, seems_kept, write_signed_zeros, zero_where_pruned
from distprune.shards import LocalShard, ParameterRange, is_laid_out_like, local_of, on_host

# Per-element state that is no moment and no copy of the weight: Rprop's steps; Shampoo's and Alice's matrices, which in
# a square weight have its shape (of the 100 optimizers of pytorch_optimizer 4.1, no others).
_NO_MOMENTS = frozenset({"step_size", "pre_cond_0", "pre_cond_1", "inv_pre_cond_0", "inv_pre_cond_1", "Q", "U"})
# Of the zeros of a parameter: another mask has more of them, dense weights (in bfloat16) may have a few by chance.
_MOST_LEFT = 0.1


class _Version:
    """The version of a storage as masking left it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self.number == tensor._version


Versions: TypeAlias = WeakValueDictionary[int, _Version]  # by storage


def _masked_version(versions: Versions, gradient: torch.Tensor, before: int) -> _Version:
    """Return the version of ``gradient``, now that it is masked; ``before``: its number before that. Local.

    While it stays the same, nobody else has written to the gradient. All views of a storage have one version, and FSDP2
    keeps the gradients of a group in one storage. Gradients that are masked one after the other share what is kept
    here, so masking the next does not make the last look written to.
    """
    storage = gradient.untyped_storage().data_ptr()
    version = versions.get(storage)
    if version is None or version.number != before:
        version = versions[storage] = _Version(before)
    version.number = gradient._version
    return version


class Held:
    """The zeros of one shard."""

    def __init__(self, shard: LocalShard, versions: Versions) -> None:
        self.shard = shard
        self._versions = versions
        # As bytes of numpy's: it asks for huge pages.
        host = torch.from_numpy(np.ones(shard.geometry.local_shape, dtype=np.bool_))
        self.kept = host.to(shard.local.device)
        self.num_held = 0
        self.is_new = True  # state of an optimizer may not be clean where weights are held
        self._masked: tuple[int, _Version] | None = None  # the gradient masked since the last step
        self._counts = torch.zeros(3, dtype=torch.int64, device=self.kept.device)
        self._as_read: tuple[int, int] | None = None  # the version of the weights that ``kept`` is read from

    def read(self) -> torch.Tensor:
        """Read from the bits which weights are kept, unless nobody has written to them since that was done.

        If hardly any of the zeros is left, they were overwritten, and are held all the same. Return how many changed
        since :meth:`take`, how many are held, and whether they were overwritten: int64, on the device.
        """
        if self._as_read != self._version():
            counts = read_kept(self.shard.local, self.kept, math.ceil(self.num_held * _MOST_LEFT))
            counts[0] += self._counts[0]
            counts[2] |= self._counts[2]
            self._counts, self._as_read = counts, self._version()
        return self._counts

    def _version(self) -> tuple[int, int]:
        """Return the versions of the parameter and of its local tensor: a ``DTensor`` counts apart from its own."""
        local = self.shard.local
        return (local if self.shard.tensor is None else self.shard.tensor)._version, local._version

    @staticmethod
    def notice_writes(held: Sequence[Held]) -> None:
        """Have all be read anew if a sample shows a write that torch has not counted, as of those through ``data``."""
        if not all(seems_kept(each.shard.local, each.kept) for each in held):
            for each in held:
                each._as_read = None

    def take(self, counts: torch.Tensor) -> bool:
        """Take over the counts of :meth:`read`, on the host now, and return whether the zeros were overwritten."""
        num_changed, self.num_held, overwritten = counts.tolist()
        if num_changed or overwritten:
            self._counts[0::2] = 0
        if num_changed:
            self.is_new, self._masked = True, None
        return bool(overwritten)

    def expect_others(self) -> None:
        """Take the zeros that are there next as what is held, however few: regrowth or a checkpoint moves them."""
        self.num_held, self._as_read = 0, None

    def move(self, shard: LocalShard) -> None:
        """Hold the same places of ``shard``, which has taken the place of this one in the model."""
        self.shard, self._as_read, self._masked = shard, None, None

    def mask_gradient(self, where: ParameterRange) -> None:
        """Write zeros into the gradient where weights are held."""
        gradient = where.parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            gradient._values().mul_(self.kept[tuple(gradient._indices())].to(gradient.dtype))
        elif not isinstance(gradient, DTensor) or is_laid_out_like(gradient, cast(DTensor, where.parameter)):
            local = local_of(gradient)
            before = local._version
            zero_where_pruned(where.part_of(gradient), self.kept)
            self._masked = id(gradient), _masked_version(self._versions, local, before)
        # A partial sum stays: the optimizer reduces it itself, and what it writes is zeroed then.

    def mask_gradient_again(self, where: ParameterRange) -> None:
        """Do so before a step, unless nobody has touched the gradient since that was done."""
        gradient, masked = where.parameter.grad, self._masked
        if gradient is None or masked is None or masked[0] != id(gradient) or not masked[1].is_of(local_of(gradient)):
            self.mask_gradient(where)
        self._masked = None  # the next gradient may have the same id

    def clean(self, where: ParameterRange, state: dict[str, object]) -> None:
        """Write zeros into an optimizer's per-element ``state`` where weights are held, if the mask has changed."""
        if not self.is_new:
            return
        for name, value in state.items():
            if name in _NO_MOMENTS or not isinstance(value, torch.Tensor) or value.shape != where.parameter.shape:
                continue
            local = local_of(value)
            if type(local) is torch.Tensor and value.is_floating_point():
                zero_where_pruned(where.part_of(value), self.kept)
            elif value.is_floating_point():  # torchao's of 8, 4 and fp8 bits, which copy_ packs and unpacks
                unpacked = torch.empty(local.shape, dtype=torch.float32, device=local.device).copy_(local)
                zero_where_pruned(where.part_of(unpacked), self.kept)
                local.copy_(unpacked)
        self.is_new = False

    def write_zeros(self) -> None:
        """After a step: zeros where weights are held, and -0.0 where a kept one has become zero."""
        local = self.shard.local
        write_signed_zeros(local, self.kept)
        # Reading costs little on an accelerator, and the parts of FSDP1's flat parameters do not share its version.
        is_counted = on_host(local.device) and self.shard.tensor is not None
        self._as_read = self._version() if is_counted else None
