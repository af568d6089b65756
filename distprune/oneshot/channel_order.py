"""The channels of a block in the order in which N of every M inputs of the layers that read them keep most.

A block puts out the same in whatever order they are, but for the rounding of sums; which of them share a group of M
decides what N:M has to give up (Pool and Yu, Channel Permutations for N:M Sparsity, NeurIPS 2021). A weight counts as
its square times that of its inputs, as a share of its row's. Channels are dealt out to the groups by their sums. Then,
for each place in a group in turn, the channels there are taken out of all groups and go where they add most: an
assignment (as of Zhang et al., Plug-and-Play, ICLR 2024), here by exchanges of two. All that is summed are whole
numbers, so that the order is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from distprune.calibration import Moments
from distprune.collectives import Communicator, sum_together, together
from distprune.models import LinearLayer
from distprune.oneshot.channels import MovableChannels
from distprune.oneshot.rows import Rows, whole_rows
from distprune.patterns import NByM
from distprune.shards import KeptIndices, chunk_size, local_shard, on_host, own_settings, row_chunks, select, sent

_NUM_TURNS, _NUM_SWEEPS = 6, 3  # turns of a place; of all pairs of groups within a turn
_SHARE_BITS, _LARGEST_BITS = 26, 30  # of a row's sum as a whole number; of its largest weight before that
_CACHED = 1 << 18  # elements that are compared with one group at a time, on the host


def order_channels(
    comm: Communicator,
    block_name: str,
    block: nn.Module,
    channels: MovableChannels,
    moments: Moments,
    linears: Mapping[str, LinearLayer],
    owned: Mapping[str, bool],
    pattern: NByM,
) -> None:
    """Put ``channels`` of ``block`` in the order in which ``pattern`` keeps most of what reads them.

    ``moments``: of that one of ``linears``, ``"features"``; ``owned``: parameters that this rank counts, by their names
    in the model. Every rank must call it: the rounds of ``whole_rows``, ``channel_order`` and ``move_channels``; none
    where no token came.
    """
    (reader,) = moments.names
    path = linears[reader].parameter_path
    if moments.num_tokens:
        with whole_rows(comm, {reader: linears[reader]}, {path: owned[f"{block_name}.{path}"]}) as rows:
            order = channel_order(comm, rows[reader], moments.square_sums, channels, pattern.n, pattern.m)
        move_channels(comm, block, channels, order)


def channel_order(
    comm: Communicator, rows: Rows, square_sums: torch.Tensor, channels: MovableChannels, n: int, m: int
) -> torch.Tensor:
    """Return the order of ``channels`` in which ``n`` of every ``m`` keep most, (channels,) int64, on the CPU.

    ``rows``: this rank's of the layer that reads them; ``square_sums`` (in,): of its inputs, everywhere. Beside a
    float32 copy of its rows a rank needs memory for three int64 for each pair of groups of a head. Every rank must call
    it: 1 round of 8 bytes a channel, and 6, or ``m`` if that is more, of 8 bytes for each of those pairs; and 1 of 64
    bytes.
    """
    num_channels, num_heads = channels.num_channels, channels.num_heads
    num_groups = num_channels // num_heads // m  # of each head
    shares: list[torch.Tensor] = []

    def begin(words: torch.Tensor) -> None:
        if rows.owned and rows.weight.numel():
            with own_settings():
                shares.append(_shares(rows.weight.detach(), square_sums, channels.reader_index))
                words.copy_(shares[0].sum(dim=0, dtype=torch.int64))

    totals = sum_together(comm, (num_channels,), begin)
    groups, gains, num_turns = totals, totals, max(_NUM_TURNS, m)
    for turn in range(num_turns):
        # What fails in it is raised on all ranks.
        def fill(words: torch.Tensor, turn: int = turn, gains: torch.Tensor = gains) -> None:
            nonlocal groups
            groups = _exchanged(groups, gains, (turn - 1) % m) if turn else _dealt(totals.view(num_heads, -1), m)
            if shares:
                words.copy_(_gains(shares[0], groups, turn % m, n))

        gains = sum_together(comm, (num_heads, num_groups, num_groups), fill)
    with together(comm):
        return _exchanged(groups, gains, (num_turns - 1) % m).flatten()


def move_channels(comm: Communicator, block: nn.Module, channels: MovableChannels, order: torch.Tensor) -> None:
    """Put ``channels`` of ``block`` into ``order``, (channels,) int64: of which each place is taken now.

    In place; the parameters stay the same objects. Every rank must call it: for each parameter two rounds of 64 bytes
    and those of ``select``.
    """
    for cut in channels.cuts:
        with together(comm):
            parameter = block.get_parameter(cut.parameter).detach()
            shard = local_shard(cut.parameter, parameter)
            index = torch.arange(parameter.shape[cut.dim], dtype=torch.int64, device="cpu")
            index[cut.index.flatten()] = cut.index[order].flatten()
            local = shard.local.view(shard.geometry.local_shape)
        moved = select(comm, parameter, local, list(parameter.shape), KeptIndices(cut.dim, index))
        with together(comm):
            local.copy_(moved)


def _shares(weight: torch.Tensor, square_sums: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return what weights (rows, in) of the inputs ``index`` (channels, copies) count: all of a row about 2^26.

    (rows * copies, channels), int32.
    """
    found = torch.empty((len(weight), *index.t().shape), dtype=torch.int32, device=weight.device)
    of_inputs, read = square_sums.to(weight.device, torch.float64), sent(index.t(), weight.device)
    for some, out in row_chunks(weight, found):
        sizes = some.double().square_().mul_(of_inputs)
        largest = sizes.amax(dim=1, keepdim=True)
        whole = sizes.div_(torch.where(largest > 0, largest, 1)).mul_(2.0**_LARGEST_BITS).round_().long()
        total = whole.sum(dim=1, keepdim=True).clamp_(min=1)
        out.copy_((whole << _SHARE_BITS).div_(total, rounding_mode="floor")[:, read])
    return found.flatten(0, 1)


def _dealt(totals: torch.Tensor, m: int) -> torch.Tensor:
    """Return groups of channels, (heads, groups, m), by ``totals`` (heads, channels of each).

    Within each head: the largest one to each group, the next in turn, to and fro.
    """
    num_heads, length = totals.shape
    ranked = totals.argsort(dim=1, descending=True, stable=True)
    ranked += torch.arange(0, totals.numel(), length, device=totals.device)[:, None]
    places = ranked.view(num_heads, m, -1)
    places[:, 1::2] = places[:, 1::2].flip(2)
    return places.transpose(1, 2).contiguous()


def _exchanged(groups: torch.Tensor, gains: torch.Tensor, place: int) -> torch.Tensor:
    """Return ``groups`` once the channels at ``place`` have gone where they gain most."""
    found = groups.clone()
    for of_head, before, of_pairs in zip(found, groups, gains, strict=True):
        of_head[torch.from_numpy(_assigned(of_pairs.numpy())), place] = before[:, place]
    return found


def _gains(shares: torch.Tensor, groups: torch.Tensor, place: int, n: int) -> torch.Tensor:
    """Return what each channel at ``place`` of ``groups`` (heads, groups, m) adds to what the rest of each group keeps.

    (heads, channels, groups), int64: where it is among the ``n`` largest of a row, what it is above the one it
    displaces.
    """
    num_heads, num_groups, m = groups.shape
    here = sent(groups, shares.device)
    gains = torch.zeros((num_heads, num_groups, num_groups), dtype=torch.int64, device=shares.device)
    num_elements = _CACHED if on_host(shares.device) else chunk_size(shares.device)
    for some in torch.split(shares, max(1, num_elements // (num_groups * m))):
        for of_head, of_pairs in zip(here, gains, strict=True):
            others = torch.cat([of_head[:, :place], of_head[:, place + 1 :]], dim=1)
            least = some[:, others].sort(dim=2, descending=True).values[:, :, n - 1]  # (rows, groups)
            own = some[:, of_head[:, place]]  # (rows, channels)
            for group in range(num_groups):
                of_pairs[:, group] += (own - least[:, group : group + 1]).clamp_(min=0).sum(dim=0, dtype=torch.int64)
    return gains


def _assigned(gains: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return to which group each channel goes, one to each, so that no exchange of two gains more."""
    num = len(gains)
    goes_to = np.arange(num)
    num_players = num + num % 2  # every pair once a sweep, as in a tournament
    ring = np.tile(np.arange(1, num_players), 2)
    for _ in range(_NUM_SWEEPS):
        before = goes_to.copy()
        for shift in range(num_players - 1):
            seated = np.concatenate([[0], ring[shift : shift + num_players - 1]])
            one, other = seated[: num_players // 2], seated[num_players // 2 :][::-1]
            meet = (one < num) & (other < num)
            one, other = one[meet], other[meet]
            now = gains[one, goes_to[one]] + gains[other, goes_to[other]]
            better = gains[one, goes_to[other]] + gains[other, goes_to[one]] > now
            one, other = one[better], other[better]
            goes_to[one], goes_to[other] = goes_to[other], goes_to[one]
        if (goes_to == before).all():
            break
    return goes_to
