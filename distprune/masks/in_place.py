"""A mask on a parameter, in place: pruned weights are zero, everything else stays as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from distprune.kernels.held import Masked, Tables, zero_where_masked
from distprune.shards.device import chunk_size, on_host
from distprune.shards.local_shard import bits_of


def zero_where_pruned(local: torch.Tensor, mask: torch.Tensor, *, where: bool = False) -> None:
    """Write 0 (never -0) into ``local`` wherever ``mask`` (bool, same local shape) is ``where``. Local.

    On the host chunk by chunk; on a device one operation, which needs no memory.
    """
    if on_host(local.device) and not local.is_complex():
        for values, flags in _chunks(bits_of(local.detach()), mask):
            values *= (~flags if where else flags).view(np.int8)  # as integers: 0 has the bits of 0.0
        increment_version(local)  # numpy does not
    elif where or local.is_complex():
        local.detach().masked_fill_(mask if where else ~mask, 0)
    else:
        bits_of(local.detach()).mul_(mask)


def zero_all_where_pruned(
    shards: Sequence[Masked], *, where: bool = False, signs: int = 0, tables: Tables | None = None
) -> None:
    """Do so for many shards, each with its mask; for those on a GPU all together, as :class:`Tables` says. Local.

    ``signs`` 1: and write -0.0 over a +0.0 where the mask is not ``where``. -1: write +0.0 over every -0.0 instead,
    whatever the mask.
    """
    there: defaultdict[torch.device, list[Masked]] = defaultdict(list)
    for local, mask in shards:
        if not on_host(local.device) and not local.is_complex():
            there[local.device].append((local, mask))
        elif signs > 0:
            write_signed_zeros(local, mask, where=where)
        elif signs < 0:
            bits = bits_of(local)
            for (values,) in _chunks(bits):
                _fill(values, values == torch.iinfo(bits.dtype).min, 0)
        else:
            zero_where_pruned(local, mask, where=where)
    for pairs in there.values():
        zero_where_masked(pairs, where, tables or Tables(), signs=signs)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield views of all, of one shape, that cover them, of about a chunk's elements each.

    On the host they are arrays: numpy takes three quarters of the time torch does, and a slice a tenth.
    """
    device, numel = tensors[0].device, tensors[0].numel()
    is_large = numel > chunk_size(device)
    if is_large and all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple([tensor.view(-1) for tensor in tensors])
    views: Any = [tensor.numpy() for tensor in tensors] if on_host(device) else tensors
    if not is_large:
        yield tuple(views)
        return
    num_rows = len(views[0])
    step = max(1, chunk_size(device) * num_rows // numel)
    for start in range(0, num_rows, step):
        yield tuple([view[start : start + step] for view in views])


def read_held(local: torch.Tensor, held: torch.Tensor, least: int = 0) -> tuple[int, int, bool]:
    """Write into ``held`` (bool, same local shape) where ``local`` is +0.0; -0.0 counts as kept.

    With fewer than ``least`` zeros in ``local``, ``held`` stays as it is. Return how many places of ``held`` changed,
    how many are True now, and whether there were too few zeros. Local, on the host, chunk by chunk.
    """
    too_few = least > 0 and not _has_zeros(bits_of(local), least)
    num_changed = num_held = 0
    for bits, before in _chunks(bits_of(local), held):
        now = before if too_few else bits == 0
        if num := int(np.count_nonzero(now != before)):
            before[...] = now
        num_changed += num
        num_held += int(np.count_nonzero(now))
    return num_changed, num_held, too_few


def _has_zeros(bits: torch.Tensor, least: int) -> bool:
    """Return whether at least ``least`` of ``bits``, which is above 0, are zero; read no further. On the host."""
    for (values,) in _chunks(bits):
        least -= values.size - int(np.count_nonzero(values))
        if least <= 0:
            return True
    return False


@torch.no_grad()
def write_signed_zeros(local: torch.Tensor, mask: torch.Tensor, *, where: bool) -> None:
    """Write +0.0 where ``mask`` is ``where``, and -0.0 over a +0.0 where it is not. Local, chunk by chunk.

    So the bits of ``local`` say which weights are kept.
    """
    bits = bits_of(local)
    negative_zero = torch.iinfo(bits.dtype).min
    for values, flags in _chunks(bits, mask):
        if where and on_host(local.device) and np.array_equal(values == 0, flags):
            continue  # as a rule, after a step: a write would take longer than the read
        kept = ~flags if where else flags
        values *= kept
        _fill(values, (values == 0) & kept, negative_zero)
        increment_version(local)


@torch.no_grad()
def set_aside(local: torch.Tensor, aside: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Move what ``mask`` (bool, True = keep) prunes of ``local`` into ``aside``, and write +0.0 there. Local.

    ``aside`` (same local shape and dtype) then has +0.0 where a weight is kept; where it is pruned, its value, and -0.0
    in the place of a zero. So its bits say what is pruned, and without ``mask`` that is pruned again. Chunk by chunk.
    """
    bits = bits_of(local)
    negative_zero = torch.iinfo(bits.dtype).min
    for values, rest, *masked in _chunks(bits, bits_of(aside), *(() if mask is None else (mask,))):
        pruned = ~masked[0] if masked else rest != 0
        rest[...] = values * pruned
        _fill(rest, (rest == 0) & pruned, negative_zero)
        values *= ~pruned
    increment_version(local)


@torch.no_grad()
def bring_back(local: torch.Tensor, aside: torch.Tensor) -> torch.Tensor:
    """Write what was set aside into ``local``, where that is still zero; elsewhere ``aside`` forgets it. Local.

    Return how many weights were not zero any more, int64, on the device. Chunk by chunk.
    """
    bits = bits_of(local)
    num_written = torch.zeros((), dtype=torch.int64, device=local.device)
    for values, rest in _chunks(bits, bits_of(aside)):
        is_zero = values << 1 == 0  # without the sign
        num_written += ((rest != 0) & ~is_zero).sum()
        rest *= is_zero
        values *= ~is_zero
        values |= rest
    increment_version(local)
    return num_written


@torch.no_grad()
def make_zeros_positive(shards: Sequence[torch.Tensor]) -> None:
    """Write +0.0 over every -0.0. Local, as :func:`zero_all_where_pruned`."""
    zero_all_where_pruned([(local, local) for local in shards], signs=-1)


def _fill(values: Any, where: Any, number: int) -> None:
    """Write ``number`` into ``values`` ``where`` that is True. A device is not waited for."""
    if isinstance(values, torch.Tensor):
        values.masked_fill_(where, number)
    else:
        values[where] = number
