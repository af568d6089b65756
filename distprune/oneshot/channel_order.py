"""The channels of a block in the order in which N of every M inputs of the layers that read them keep most.

A block puts out the same in whatever order they are, but for the rounding of sums; which of them share a group of M
decides what N:M has to give up (Pool and Yu, Channel Permutations for N:M Sparsity, NeurIPS 2021). A weight counts as
its square times that of its inputs, as a share of its row's. Channels are dealt out to the groups by their sums. Then,
for each place in a group in turn, the channels there are taken out of all groups and go where they add most: an
assignment (as of Zhang et al., Plug-and-Play, ICLR 2024), here by exchanges of two, and of many groups among some
hundreds at a time, other ones in each turn. All that is summed are whole numbers, so that the order is the same on any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from distprune.calibration.moments import Moments
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer
from distprune.oneshot.channels import MovableChannels
from distprune.oneshot.rows import Rows, whole_rows
from distprune.patterns.n_by_m import NByM
from distprune.shards.device import chunk_size, on_host, own_settings, row_chunks, sent
from distprune.shards.layouts import local_shard
from distprune.shards.select import KeptIndices, select

_NUM_TURNS, _NUM_SWEEPS = 6, 3  # turns of a place; of all pairs of groups within a turn
_MOST_GROUPS = 512  # among which channels change places in one turn
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
    float32 copy of its rows a rank needs memory for two int64 for each of ``num_pairs``. Every rank must call it: 1
    round of 8 bytes a channel, ``num_turns`` of 8 bytes for each of those pairs; and 1 of 64 bytes.
    """
    num_heads, num_groups = channels.num_heads, channels.num_channels // channels.num_heads // m
    shares: list[torch.Tensor] = []

    def begin(words: torch.Tensor) -> None:
        if rows.owned and rows.weight.numel():
            with own_settings():
                shares.append(_shares(rows.weight.detach(), square_sums, channels.reader_index))
                words.copy_(shares[0].sum(dim=0, dtype=torch.int64))

    totals = sum_together(comm, (channels.num_channels,), begin)
    groups, gains = totals, totals
    for turn in range(num_turns(m)):
        # What fails in it is raised on all ranks.
        def fill(words: torch.Tensor, turn: int = turn, gains: torch.Tensor = gains) -> None:
            nonlocal groups
            groups = _exchanged(groups, gains, num_heads, turn - 1) if turn else _dealt(totals.view(num_heads, -1), m)
            if shares:
                words.copy_(_gains(shares[0], groups, num_heads, turn, n))

        gains = sum_together(comm, (num_heads * num_pairs(num_groups),), fill)
    with together(comm):
        return _exchanged(groups, gains, num_heads, num_turns(m) - 1).flatten()


def num_turns(m: int) -> int:
    """Return how often channels at one place in groups of ``m`` go where they add most."""
    return max(_NUM_TURNS, m)


def num_pairs(num_groups: int) -> int:
    """Return of how many channels and groups of a head a turn asks what one adds to the other."""
    num_parts = _num_parts(num_groups)
    size, num_larger = divmod(num_groups, num_parts)
    return num_larger * (size + 1) ** 2 + (num_parts - num_larger) * size**2


def _num_parts(num_groups: int) -> int:
    return -(-num_groups // _MOST_GROUPS)


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


def _parts(num_heads: int, num_groups: int, turn: int) -> list[torch.Tensor]:
    """Return which groups, of those of all heads, change channels with each other: by turns neighbours and not."""
    num_parts = _num_parts(num_groups)
    groups = torch.arange(num_groups, device="cpu")
    if turn % 2:
        groups = torch.cat([groups[first::num_parts] for first in range(num_parts)])
    return [head * num_groups + part for head in range(num_heads) for part in groups.tensor_split(num_parts)]


def _dealt(totals: torch.Tensor, m: int) -> torch.Tensor:
    """Return groups of channels, (groups of all heads, m), by ``totals`` (heads, channels of each).

    Within each head: the largest one to each group, the next in turn, to and fro.
    """
    num_heads, length = totals.shape
    ranked = totals.argsort(dim=1, descending=True, stable=True)
    ranked += torch.arange(0, totals.numel(), length, device=totals.device)[:, None]
    places = ranked.view(num_heads, m, -1)
    places[:, 1::2] = places[:, 1::2].flip(2)
    return places.transpose(1, 2).reshape(-1, m)


def _exchanged(groups: torch.Tensor, gains: torch.Tensor, num_heads: int, turn: int) -> torch.Tensor:
    """Return ``groups`` once the channels whose turn it is have gone where they gain most; see ``_gains``."""
    found, place = groups.clone(), turn % groups.shape[1]
    parts = _parts(num_heads, len(groups) // num_heads, turn)
    for part, pairs in zip(parts, _pairs_of(gains, parts), strict=True):
        found[part[torch.from_numpy(_assigned(pairs.numpy()))], place] = groups[part, place]
    return found


def _gains(shares: torch.Tensor, groups: torch.Tensor, num_heads: int, turn: int, n: int) -> torch.Tensor:
    """Return what each channel whose turn it is adds to what the rest of each group of its part keeps.

    int64, flat: of each part (channels, groups); where a channel is among the ``n`` largest of a row, what it is above
    the one it displaces. ``groups`` (groups of all heads, m).
    """
    device, place, num_groups = shares.device, turn % groups.shape[1], len(groups) // num_heads
    parts = _parts(num_heads, num_groups, turn)
    gains = torch.zeros(num_heads * num_pairs(num_groups), dtype=torch.int64, device=device)
    num_elements = _CACHED if on_host(device) else chunk_size(device)
    of_parts = torch.split(sent(groups[torch.cat(parts)], device), [len(part) for part in parts])  # one copy for all
    for here, pairs in zip(of_parts, _pairs_of(gains, parts), strict=True):
        others = torch.cat([here[:, :place], here[:, place + 1 :]], dim=1)
        for some in torch.split(shares, max(1, num_elements // here.numel())):
            least = some[:, others].sort(dim=2, descending=True).values[:, :, n - 1]  # (rows, groups)
            own = some[:, here[:, place]]  # (rows, channels)
            for group in range(len(here)):
                pairs[:, group] += (own - least[:, group : group + 1]).clamp_(min=0).sum(dim=0, dtype=torch.int64)
    return gains


def _pairs_of(gains: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the part of flat ``gains`` that each of ``parts`` has, (channels, groups): views."""
    flat = torch.split(gains, [len(part) ** 2 for part in parts])
    return [pairs.view(len(part), -1) for part, pairs in zip(parts, flat, strict=True)]


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
