"""One held parameter on this rank: which weights are kept, read from their bits, and what is masked with that.

Nouns: a weight is *held* where its bits are those of +0.0; all others are *kept*. While weights are held, a kept weight
that happens to be zero is written as -0.0, which is the same number. So the bits alone say what is held, in any layout,
and after any wrapper, checkpoint or change of the number of ranks. What others have pruned, by a product with a mask,
has zeros of both signs: before the first reading, and after another state was loaded, both are held.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from distprune.kernels.held import HeldOnDevice
from distprune.masks.in_place import (
    make_zeros_positive,
    read_kept,
    seems_kept,
    write_signed_zeros,
    zero_all_where_pruned,
    zero_where_pruned,
)
from distprune.shards.device import Arriving, on_host
from distprune.shards.layouts import is_laid_out_like, local_of
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import ParameterRange

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
        self._versions = versions
        shape, device = shard.geometry.local_shape, shard.local.device
        if on_host(device):  # numpy asks for huge pages
            self.kept = torch.from_numpy(np.ones(shape, dtype=np.bool_))
        else:
            self.kept = torch.ones(shape, dtype=torch.bool, device=device)
        self.num_held = 0  # on a device as of what has arrived
        self._nothing = torch.zeros((), dtype=torch.int64, device=device)
        self.num_there = self._nothing  # the same on a device, as of now
        self.is_new = True  # state of an optimizer may not be clean where weights are held
        self.may_be_foreign = True  # others have written the weights: the sign of a zero says nothing
        self.may_be_new = False  # on a device: they were written to since
        self.counts: torch.Tensor | tuple[int, int, bool] | None = None  # read, and not taken over yet
        self._masked: tuple[int, _Version] | None = None  # the gradient masked since the last step
        self._as_read: tuple[int, int] | None = None  # the version of the weights that ``kept`` is read from
        self._as_left: tuple[int, int] | None = None  # that after the last step
        self.move(shard)

    def take_over(self) -> None:
        """Write +0.0 over every -0.0 of weights that others have written: from here on the sign speaks.

        If all that is held is +0.0 there too, they are from a training like this one.
        """
        if self.may_be_foreign:
            make_zeros_positive(self.shard.local, unless_held=self.kept)
            self.may_be_foreign, self._as_read = False, None

    def read(self) -> None:
        """Read from the bits which weights are kept, unless nobody has written to them since that was done.

        If hardly any of the zeros is left, they were overwritten, and are held all the same. On the host.
        """
        if not self.is_read():
            num_changed, num_held, overwritten = read_kept(self.shard.local, self.kept, self.least())
            if self.counts is not None:
                num_changed, overwritten = num_changed + int(self.counts[0]), overwritten or bool(self.counts[2])
            self.counts, self._as_read = (num_changed, num_held, overwritten), self._version()

    def note(self, counts: torch.Tensor, num_held: torch.Tensor) -> None:
        """Take the weights, on a device, as read: the ``counts`` are those of ``read_kept``, of them ``num_held``."""
        self.may_be_new |= self._as_left != self._version()
        self._as_read, self._masked, self.num_there = self._version(), None, num_held
        if isinstance(self.counts, torch.Tensor):
            counts = counts.clone()
            counts[0] += self.counts[0]
            counts[2] |= self.counts[2]
        self.counts = counts

    def is_read(self) -> bool:
        """Return whether nobody has written to the weights since they were read, as far as that was noticed."""
        return self._as_read == self._version()

    def least(self) -> int:
        """Return how many zeros there must be: with fewer, they were overwritten."""
        return math.ceil(self.num_held * _MOST_LEFT)

    def _version(self) -> tuple[int, int]:
        """Return the versions of the parameter and of its local tensor: a ``DTensor`` counts apart from its own."""
        local = self.shard.local
        return (local if self.shard.tensor is None else self.shard.tensor)._version, local._version

    def notice_write(self) -> None:
        """Have :meth:`read` do so: somebody has written to the weights, and torch may not have counted it."""
        self._as_read = None

    def take(self, counts: Sequence[int]) -> bool:
        """Take over counts, on the host now, and return whether the zeros were overwritten."""
        num_changed, self.num_held, overwritten = counts
        if num_changed:
            self.is_new, self._masked = True, None
        return bool(overwritten)

    def take_read(self) -> bool:
        """Take over the counts of an earlier :meth:`read`, if they were not."""
        counts, self.counts = self.counts, None
        return isinstance(counts, tuple) and self.take(counts)

    def expect_others(self) -> None:
        """Take the zeros that are there next as what is held, however few: regrowth or a checkpoint moves them."""
        self.num_held, self.num_there, self._as_read = 0, self._nothing, None

    def move(self, shard: LocalShard) -> None:
        """Hold the same places of ``shard``, which has taken the place of this one in the model."""
        self.shard = shard
        self._as_read, self._as_left, self._masked = None, None, None
        # Reading costs little on an accelerator, and the parts of FSDP1's flat parameters do not share its version.
        self._is_counted = on_host(shard.local.device) and shard.tensor is not None

    def mask_gradient(self, where: ParameterRange) -> None:
        """Write zeros into the gradient where weights are held."""
        part = self._gradient_of(where)
        if part is not None:
            before = part._version
            zero_where_pruned(part, self.kept)
            self._masked = id(where.parameter.grad), _masked_version(self._versions, part, before)

    def gradient_to_mask(self, where: ParameterRange) -> torch.Tensor | None:
        """Return what is to be masked before a step: ``None`` if nobody has touched it since that was done."""
        gradient, masked = where.parameter.grad, self._masked
        self._masked = None  # the next gradient may have the same id
        if gradient is None or masked is None or masked[0] != id(gradient) or not masked[1].is_of(local_of(gradient)):
            return self._gradient_of(where)
        return None

    def _gradient_of(self, where: ParameterRange) -> torch.Tensor | None:
        """Return the shard's part of the gradient, detached. ``None`` if there is none, or it was masked here."""
        gradient = where.parameter.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            gradient._values().mul_(self.kept[tuple(gradient._indices())].to(gradient.dtype))
            return None
        if isinstance(gradient, DTensor) and not is_laid_out_like(gradient, cast(DTensor, where.parameter)):
            return None  # a partial sum: the optimizer reduces it itself, and what it writes is zeroed then
        return where.part_of(gradient)

    def moments(self, where: ParameterRange, state: dict[str, object]) -> Iterator[torch.Tensor]:
        """Yield what is per element of an optimizer's ``state``, to be masked; what is packed is masked here."""
        for name, value in state.items():
            if name in _NO_MOMENTS or not isinstance(value, torch.Tensor) or value.shape != where.parameter.shape:
                continue
            local = local_of(value)
            if type(local) is torch.Tensor and value.is_floating_point():
                yield where.part_of(value)
            elif value.is_floating_point():  # torchao's of 8, 4 and fp8 bits, which copy_ packs and unpacks
                unpacked = torch.empty(local.shape, dtype=torch.float32, device=local.device).copy_(local)
                zero_where_pruned(where.part_of(unpacked), self.kept)
                local.copy_(unpacked)

    def write_zeros(self) -> None:
        """Write zeros where weights are held, and -0.0 where a kept one has become zero. On the host."""
        write_signed_zeros(self.shard.local, self.kept)

    def know_read(self) -> None:
        """Take the weights as read: ``kept`` says where they are zero."""
        version = self._version()
        self._as_read = version if self._is_counted else None
        self._as_left = None if self.shard.tensor is None else version


class HeldTogether:
    """Several of a model's shards: what one optimizer moves, or all.

    Those on a device are read all together. What is counted there is on its way to
    the host while that goes on: so it is one of the next steps that warns of zeros that were overwritten.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._all = held
        self._here = [each for each in held if on_host(each.shard.local.device)]
        there: dict[torch.device, list[Held]] = {}
        for each in held:
            if not on_host(each.shard.local.device):
                there.setdefault(each.shard.local.device, []).append(each)
        self._there = [(of, HeldOnDevice([(each.shard.local, each.kept) for each in of])) for of in there.values()]
        self._arriving: deque[tuple[list[Held], Arriving]] = deque()

    def notice_writes(self) -> None:
        """Have all be read anew that were written to, also if torch has not counted it, as of those through ``data``.

        Of a large one a sample must show it; then all large ones are read anew.
        """
        if not all(seems_kept(each.shard.local, each.kept) for each in self._here):
            for each in self._here:
                each.notice_write()

    def read(self, *, waits: bool = False) -> list[Held]:
        """Read which weights are zero now, and return those whose zeros were overwritten, as far as that has arrived.

        ``waits``: until all has; once for each device.
        """
        for each in self._all:
            each.take_over()
        self.notice_writes()
        self._read_there()
        lost = self._arrived(waits=waits)
        for each in self._here:
            each.read()
            if each.take_read():
                lost.append(each)
        return lost

    def read_for(self, held: Held) -> None:
        """Read which weights of ``held``, one of these, are zero now; on a device those of all. No wait."""
        held.take_over()
        if held.is_read():
            return
        if on_host(held.shard.local.device):
            held.read()
        else:
            self._read_there()

    def _read_there(self) -> None:
        for held, on_device in self._there:
            if not all(each.is_read() for each in held):
                before = torch.stack([each.num_there for each in held])
                counts = on_device.read(before.to(torch.float64).mul_(_MOST_LEFT).ceil_().to(torch.int64))
                for each, of_each, num_held in zip(held, counts.unbind(), counts[:, 1].unbind(), strict=True):
                    each.note(of_each, num_held)

    def _arrived(self, *, waits: bool) -> list[Held]:
        """Send what was counted on devices, take over what has arrived, and return whose zeros were overwritten."""
        for held, _ in self._there:
            counts = [(each, each.counts) for each in held if isinstance(each.counts, torch.Tensor)]
            if counts:
                values = torch.stack([of_each for _, of_each in counts])
                self._arriving.append(([each for each, _ in counts], Arriving(values)))
                for each, _ in counts:
                    each.counts = None
        lost: list[Held] = []
        while self._arriving and (there := self._arriving[0][1].values(waits=waits)) is not None:
            of, _ = self._arriving.popleft()
            lost += [each for each, of_each in zip(of, there.tolist(), strict=True) if each.take(of_each)]
        return lost

    def clean(self, states: Sequence[tuple[Held, ParameterRange, dict[str, object]]]) -> None:
        """Write zeros into an optimizer's state where weights are held, of those whose mask may have changed."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for held, where, state in states:
            if held.is_new or held.may_be_new:
                parts += [(moment, held.kept) for moment in held.moments(where, state)]
                held.is_new = held.may_be_new = False
        zero_all_where_pruned(parts)

    def mask_gradients(self, ranges: Sequence[tuple[Held, ParameterRange]]) -> None:
        """Mask the gradients before a step, of those that somebody has touched since that was done."""
        parts = [(held.gradient_to_mask(where), held.kept) for held, where in ranges]
        zero_all_where_pruned([(part, kept) for part, kept in parts if part is not None])

    def write_zeros(self) -> None:
        """After a step: zeros where weights are held, and -0.0 where a kept one has become zero."""
        for _, on_device in self._there:
            on_device.write_signed_zeros()
        for each in self._here:
            each.write_zeros()
        for each in self._all:
            each.know_read()


def warn_of_overwritten(lost: Sequence[Held]) -> None:
    """Warn that the zeros of ``lost`` were overwritten, and are held all the same."""
    num_lost, names = sum(each.num_held for each in lost), ", ".join(repr(each.shard.name) for each in lost[:4])
    warnings.warn(
        f"{num_lost} weights that are held at zero were overwritten, in {names}{', ...' if len(lost) > 4 else ''} "
        f"({len(lost)} parameters): a dense checkpoint was loaded, an adapter merged (see distprune.merge_adapters), "
        "or an optimizer such as Lookahead wrote weights that it had kept. They become zero again; to train them, call "
        "remove(), and to hold others, prune first",
        stacklevel=3,
    )
