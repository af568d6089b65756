"""Channel permutation for N:M: the order of a block's channels in which the pattern keeps most of what reads them.

A block puts out the same in any order of an MLP's channels, and of the values within each key and value head, where
the query heads that share it read them alike, but for the rounding of sums; which of them share a group of M decides
what N:M has to give up (Pool and Yu, Channel Permutations for N:M Sparsity, NeurIPS 2021). A weight counts as
its square times that of its inputs, as a share of its row's. Channels are dealt out to the groups by their sums. Then,
for each place in a group in turn, the channels there are taken out of all groups and go where they add most: a linear
assignment (Zhang et al., Plug-and-Play, ICLR 2024), among some hundreds of groups at a time, other ones in each turn.

All ranks decide by the same sums, so they have the same order: equal to rounding on any number of ranks.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from distprune.calibration.statistics import InputStatistics
from distprune.calibration.walk import Walk
from distprune.checkpoint.optional_packages import import_extra
from distprune.collectives.agree import max_together, sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.guarded import guarding
from distprune.models.linear_layers import LinearLayer
from distprune.models.units import Cut, UnitKind, Units, find_units, head_dim
from distprune.oneshot.block_layers import naming, num_places
from distprune.oneshot.rows import Rows, whole_rows
from distprune.patterns.n_by_m import NByM
from distprune.shards.device import fetched, own_settings, sent
from distprune.shards.layouts import local_shard
from distprune.shards.select import KeptIndices, select

_NUM_TURNS = 6  # more gain a thousandth of what six do
_MOST_GROUPS = 256  # among which channels change places; with 512 of 1,376 it takes twice as long for 3 % of the gain
_TINY = torch.finfo(torch.float32).tiny
_OF_VALUES = re.compile(r"(^|\.)(qkv_proj|v[^.]*)\.(weight|bias)$")  # parameters
_KINDS: tuple[UnitKind, ...] = ("kv_groups", "mlp")  # of units whose channels may change places


@dataclass(frozen=True)
class MovableChannels:
    """Channels that change places within ``num_heads`` parts of equally many consecutive ones.

    ``cuts``: what of each parameter goes with each channel; ``reader_index`` (channels, copies): which of the inputs of
    the linear layer ``reader``.
    """

    num_heads: int
    cuts: tuple[Cut, ...]
    reader: str
    reader_index: torch.Tensor  # int64

    @property
    def num_channels(self) -> int:
        return len(self.reader_index)


def permute_block(
    comm: Communicator,
    walk: Walk,
    index: int,
    linears: Mapping[str, LinearLayer],
    owned: Mapping[str, bool],
    pattern: NByM,
) -> None:
    """Put the channels of block ``index``, which is dense, in the order in which ``pattern`` keeps most of ``linears``.

    By what these are given now; ``owned``: parameters that this rank counts, by their names in the model. A block that
    puts out something else then keeps its order, with a warning: it reads channels otherwise than by their names.

    Every rank must call it: rounds of :meth:`InputStatistics.reduce`, and for each layer that reads some those of
    ``whole_rows``, ``channel_order`` and ``move_channels``, none where no token came; two runs of the first batch, and
    three rounds of 64 bytes or less.
    """
    name, block = walk.blocks[index]
    with together(comm):
        movable = find_channels(walk.model, block, linears, pattern.m)
    if not movable:
        return
    statistics = InputStatistics(comm, walk, {reader: linears[reader] for reader in movable}, "squares")
    statistics.run(index)
    with naming(name):
        (moments,) = statistics.reduce()
    before, orders = _first_output(comm, walk, index), dict[str, torch.Tensor]()
    with guarding(comm) as ranks:
        for m in moments:
            (reader,) = m.names
            if m.num_tokens:
                with whole_rows(ranks, {reader: linears[reader]}, owned, f"{name}.") as rows:
                    orders[reader] = channel_order(
                        ranks, rows[reader], m.squares, movable[reader], pattern.n, pattern.m
                    )
                move_channels(ranks, block, movable[reader], orders[reader])
    after = _first_output(comm, walk, index)
    if max_together(comm, (1,), lambda words: words.fill_(_is_another(before, after, walk.hidden[0])))[0]:
        with guarding(comm) as ranks:
            for reader, order in orders.items():
                move_channels(ranks, block, movable[reader], order.argsort())
        what = f"channels of a {type(block).__name__}"
        warnings.warn(f"{what} keep their order: another changes its output", stacklevel=2)


def _first_output(comm: Communicator, walk: Walk, index: int) -> torch.Tensor:
    """Return what block ``index`` puts out for the first batch. Every rank must call it: one round of 64 bytes."""
    with together(comm), walk.block(index) as run:
        return run(0)


def _is_another(before: torch.Tensor, after: torch.Tensor, given: torch.Tensor) -> bool:
    """Return whether a quarter of ``after`` differs from ``before`` by more than rounding does. Local.

    That is of what the block adds to each token, and of what it puts out, whose features may be of any size.
    """
    eps = torch.finfo(before.dtype).eps
    change, before, given = after.float() - before.float(), before.float(), given.to(before.device, torch.float32)
    added = before - given if given.shape == before.shape else before
    rounding = max(8 * eps, 2**-10) * added.square().mean(-1, keepdim=True).sqrt() + 2 * eps * before.abs()
    return bool((change.abs() > rounding).float().mean() > 0.25)


def find_channels(model: nn.Module, block: nn.Module, readers: Collection[str], m: int) -> dict[str, MovableChannels]:
    """Return the channels of ``block`` that can change places, by which of the ``readers`` reads them. Local.

    None of experts; none with a parameter that ``model`` has in another place, too; none where buffers or parameters
    are not known, such as masks and adapters; none of which a part is not a multiple of ``m``, or a single group; no
    values that other blocks may read, too.
    """
    places, of_block = num_places(model), list[Units]()
    parameters = dict(block.named_parameters(remove_duplicate=False))
    for kind in _KINDS:
        with suppress(NotImplementedError):  # they are not each other's like
            of_block += find_units(block, kind)
    by_reader = {}
    for units in of_block:
        channels = None if units.cuts[0].expert is not None else _movable(block, units)
        if channels is None or channels.reader not in readers:
            continue
        length = channels.num_channels // channels.num_heads
        are_groups = length % m == 0 and length > m
        if are_groups and all(places[id(parameters.get(cut.parameter))] == 1 for cut in channels.cuts):
            by_reader[channels.reader] = channels
    return by_reader


def _movable(block: nn.Module, units: Units) -> MovableChannels | None:
    """Return the channels of an MLP; of KV groups their values: of each the last rows of the layer that makes them."""
    module, reader, read = block.get_submodule(units.name), units.reader, units.reader_index
    known = {cut.parameter for cut in units.cuts} | {f"{reader}.bias"}  # which the reader adds behind them
    others = {name: of for name, of in module.named_parameters(units.name) if name not in known}
    if reader is None or read is None:
        return None
    if units.kind == "mlp":
        is_known = (
            not any(units.num_units in of.shape for of in others.values()) and next(module.buffers(), None) is None
        )
        return MovableChannels(1, units.cuts, reader, read) if is_known else None
    are_others_of_queries = all(name.removeprefix(f"{units.name}.")[0] in "qk" for name in others)
    is_shared = hasattr(module, "is_kv_shared_layer")  # of Gemma 3n and others, whose later blocks read them, too
    size, num_heads = head_dim(module), units.num_units
    read = read.view(num_heads, -1, size).transpose(1, 2).reshape(num_heads * size, -1)
    made = [cut for cut in units.cuts[:-1] if _OF_VALUES.search(cut.parameter)]
    cuts = [dataclasses.replace(cut, index=cut.index[:, -size:].reshape(-1, 1)) for cut in made]
    cuts.append(dataclasses.replace(units.cuts[-1], index=read))
    holders = [block.get_submodule(cut.parameter.rpartition(".")[0]) for cut in cuts]
    has_buffers = any(next(of.buffers(), None) is not None for of in holders)
    if is_shared or has_buffers or not are_others_of_queries:
        return None
    return MovableChannels(num_heads, tuple(cuts), reader, read)


def channel_order(
    comm: Communicator, rows: Rows, square_sums: torch.Tensor, channels: MovableChannels, n: int, m: int
) -> torch.Tensor:
    """Return the order of ``channels`` in which ``n`` of every ``m`` keep most, (channels,) int64, on the CPU.

    ``rows``: this rank's of the layer that reads them; ``square_sums`` (in,): of its inputs, everywhere. Every rank
    must call it, guarded: a round of 8 bytes a channel, and one for each of 6 or ``m`` turns, of 8 bytes for each pair
    of groups that meet in it. A rank needs memory for three float32 copies of its rows.
    """
    num_heads = channels.num_heads
    shares: list[torch.Tensor] = []

    def begin(words: torch.Tensor) -> None:
        if rows.owned and rows.weight.numel():
            shares.append(_shares(rows.weight.detach(), square_sums, channels.reader_index))
            words.copy_(fetched([shares[0].sum(dim=1, dtype=torch.float64)])[0])

    sums = sum_together(comm, (channels.num_channels,), begin, torch.float64)
    groups = _dealt(sums.view(num_heads, -1), m)
    for turn in range(max(_NUM_TURNS, m)):
        groups = _exchanged(comm, shares, groups, turn, n)
    return groups.flatten()


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


@own_settings()
def _shares(weight: torch.Tensor, square_sums: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return which share of its row each weight (rows, in) of the inputs ``index`` (channels, copies) is.

    (channels, copies * rows), float32.
    """
    sizes = weight.float()
    sizes = (sizes / sizes.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)).square_()
    sizes *= square_sums.to(weight.device, torch.float32)
    sizes /= sizes.sum(dim=1, keepdim=True).clamp_(min=_TINY)
    return sizes.nan_to_num_().t()[sent(index, weight.device)].flatten(1)  # the solver tells of weights that are NaN


def _dealt(sums: torch.Tensor, m: int) -> torch.Tensor:
    """Return groups of channels, (heads, groups, m), by their ``sums`` (heads, channels of each).

    Within each head: the largest one to each group, the next in turn, to and fro.
    """
    num_heads, length = sums.shape
    ranked = sums.argsort(dim=1, descending=True, stable=True)
    ranked += torch.arange(0, sums.numel(), length, device="cpu")[:, None]
    places = ranked.view(num_heads, m, -1)
    places[:, 1::2] = places[:, 1::2].flip(2)
    return places.transpose(1, 2)


def _exchanged(comm: Communicator, shares: list[torch.Tensor], groups: torch.Tensor, turn: int, n: int) -> torch.Tensor:
    """Return ``groups`` once the channels at one place of each have gone where they add most.

    ``shares``: of this rank's rows, if it has some. Every rank must call it: 1 round.
    """
    place, meeting = turn % groups.shape[-1], _meeting(groups.shape[1], turn)
    parts = groups[:, meeting].flatten(0, 1)  # (parts of all heads, groups, m)

    def fill(words: torch.Tensor) -> None:
        for some in shares:
            words.copy_(fetched([_gains(some, parts, place, n)])[0])

    assign = import_extra("scipy.optimize", "hf").linear_sum_assignment
    gains = sum_together(comm, (len(parts), meeting.shape[1], meeting.shape[1]), fill, torch.float64)
    # The best of each channel, then of each group, costs nothing: most are matched at once, in half of the time.
    costs = gains.amax(2, keepdim=True) - gains
    costs -= costs.amin(1, keepdim=True)
    for part, of_part in zip(parts, costs.numpy(), strict=True):
        channels, goes_to = assign(of_part)
        part[goes_to, place] = part[channels, place]
    moved = groups.clone()
    moved[:, meeting] = parts.view(len(groups), *meeting.shape, -1)
    return moved


def _meeting(num_groups: int, turn: int) -> torch.Tensor:
    """Return which groups of a head exchange channels, (parts, groups): by turns neighbours and not.

    Where they are not a multiple of the parts some stand aside, others in each turn.
    """
    num_parts = -(-num_groups // _MOST_GROUPS)
    size = num_groups // num_parts
    groups = torch.arange(num_groups, device="cpu").roll(turn)[: num_parts * size]
    return groups.view(size, num_parts).t() if turn % 2 else groups.view(num_parts, size)


@own_settings()
def _gains(shares: torch.Tensor, parts: torch.Tensor, place: int, n: int) -> torch.Tensor:
    """Return what each channel at ``place`` adds to the rest of each group of its part, (parts, channels, groups).

    In a row that is max(0, s - t): s is its share, t the smallest that the group would keep without it. As
    2 max(0, s - t) = |s - t| + s - t, and all channels go to one group each, the sums of |s - t| say as much.
    """
    places = sent(parts.movedim(-1, 0).roll(-place, 0), shares.device)
    return torch.cdist(shares[places[0]], _nth_highest(shares[places[1:]], n), p=1)


def _nth_highest(values: torch.Tensor, n: int) -> torch.Tensor:
    """Return the ``n``-th highest of ``values`` along dim 0; they are sorted in place, by exchanges of neighbours."""
    for i in range(len(values)):
        before, behind = values[i % 2 : -1 : 2], values[1 + i % 2 :: 2]
        highest = torch.maximum(before, behind)
        torch.minimum(before, behind, out=behind)
        before.copy_(highest)
    return values[n - 1]
