"""Exact selection: ties, NaN, missed brackets, many survivors, and what it costs on the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from distprune.collectives.alone import Alone
from distprune.collectives.base import Communicator, Traffic
from distprune.collectives.communicator import communicator
from distprune.scores.base import LocalScores
from distprune.scores.magnitude import Magnitude
from distprune.selection import counts, quantiles, sampling, tally
from distprune.selection.competition import Competition
from distprune.selection.kth_value import select_lowest
from distprune.selection.order import common_order
from distprune.selection.scan import Entry
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership
from tests.device_path import as_on_a_device
from tests.sampling import only_whole
from tests.worlds import run_threads


@dataclass(frozen=True)
class Selected:
    masks: list[torch.Tensor]
    thresholds: list[float | int | None]


def select(
    comm: Communicator,
    parts: Sequence[torch.Tensor],
    numel: int,
    first: int,
    ks: Sequence[int],
    gone: torch.Tensor | None = None,
) -> Selected:
    """Select in one competition for each of ``parts``, of which this rank holds rows from ``first`` on."""
    order = common_order([("magnitude", parts[0].dtype)])
    competitions = [Competition(f"c{i}", order, numel, k) for i, k in enumerate(ks)]

    found: list[Entry] = []

    def entries() -> list[Entry]:
        for i, part in enumerate(parts):
            geometry = Geometry((numel,), (((first, first + part.numel()),) if part.numel() else (),))
            scores = LocalScores(LocalShard(f"c{i}", part, geometry, Ownership()), Magnitude(), {}, gone)
            found.append(Entry(f"c{i}", scores, geometry, True, i, 0))
        return found

    selection = select_lowest(comm, competitions, entries)
    masks = [torch.empty(e.geometry.local_numel, dtype=torch.bool, device=e.scores.device) for e in found]
    counts = [of.tolist() for of in selection.decide(found, masks)]
    for (num_pruned, num_gone, _), mask in zip(counts, masks, strict=True):
        assert num_pruned == int((~mask).sum())
        assert num_gone == (0 if gone is None else int((gone == 0).sum()))
    return Selected(masks, selection.thresholds)


def check(values: torch.Tensor, k: int) -> None:
    (mask,) = select(Alone(), [values], values.numel(), 0, [k]).masks
    order = torch.sort(values.abs(), stable=True)[1]
    wanted = torch.ones(values.shape, dtype=torch.bool)
    wanted[order[:k]] = False
    assert torch.equal(mask, wanted)


def test_stated_order_by_value() -> None:
    """Equal scores go from the lowest position up; -0.0 is 0.0; infinities are ordinary."""
    values = torch.tensor([2.0, -1.0, 0.0, torch.inf, 1.0, -0.0, -2.0, -torch.inf])
    pruned = []
    for k in range(1, 9):
        (mask,) = select(Alone(), [values], 8, 0, [k]).masks
        pruned.append((~mask).nonzero().flatten().tolist())
    assert [sorted(set(now) - set(before)) for before, now in zip([[], *pruned], pruned, strict=False)] == [
        [2], [5], [1], [4], [0], [6], [3], [7],
    ]  # fmt: skip


def test_thresholds_are_the_last_pruned_score() -> None:
    values = torch.tensor([3.0, -1.0, 2.0, 5.0])
    assert select(Alone(), [values, values], 4, 0, [2, 0]).thresholds == [2.0, None]
    assert select(Alone(), [values.bfloat16()], 4, 0, [4]).thresholds == [5.0]


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("k", [0, 1, 1000, 150_000, 299_999, 300_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "constant", "sorted", "tiny spread", "wide"])
@pytest.mark.sampled(18)
def test_hard_distributions(kind: str, k: int, samples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    if samples:
        monkeypatch.setattr(sampling, "_WORTH", 0)
    numel = 300_000
    values = {
        "normal": lambda: torch.randn(numel),
        "few values": lambda: torch.randint(0, 7, (numel,)).float(),
        "constant": lambda: torch.full((numel,), 0.1),
        "sorted": lambda: torch.arange(numel).float(),
        "tiny spread": lambda: 1 + torch.randint(0, 9, (numel,)).float() * 2**-23,
        "wide": lambda: torch.randn(numel).mul(40).exp(),
    }[kind]()
    check(values, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    check(torch.randn(200_000).to(dtype), 77_777)


def test_a_missed_bracket_costs_rounds_not_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    values = torch.randn(100_000)
    monkeypatch.setattr(sampling, "_WORTH", 0)
    monkeypatch.setattr(sampling, "_MARGIN", 0.0)  # the bracket is a point
    for low_or_high in (-1, 1):
        monkeypatch.setattr(sampling, "_fraction", lambda _, side=low_or_high: np.array([0.5 + 0.4 * side]))
        comm = Alone()
        (mask,) = select(comm, [values], 100_000, 0, [50_000]).masks
        assert int((~mask).sum()) == 50_000
        assert float(values[~mask].abs().max()) < float(values[mask].abs().min())
        assert comm.traffic.num_rounds > 4  # the key rounds again, over a wider range


@pytest.mark.parametrize("kind", ["normal", "sorted", "ties", "constant"])
@pytest.mark.parametrize("missed_at", [None, 1, 2])
def test_brackets_between_what_ranks_say(kind: str, missed_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are many competitions, ranks tell their own k-th: of uneven parts, also where that says little."""
    monkeypatch.setattr(quantiles, "_MANY", 1)
    if missed_at is not None:  # the bracket is a point, far below the k-th or far above it
        found_so = quantiles._bracket

        def point(*arguments: Any) -> Any:
            found = found_so(*arguments)
            return found[0], found[missed_at], found[missed_at]

        monkeypatch.setattr(quantiles, "_margin", lambda _: 30.0)
        monkeypatch.setattr(quantiles, "_bracket", point)
    torch.manual_seed(9)
    numel, cuts = 40_000, [0, 5, 5, 19_000, 40_000]
    whole = {
        "normal": torch.randn(numel),
        "sorted": torch.arange(numel).float(),
        "ties": torch.randn(numel).round(),
        "constant": torch.ones(numel),
    }[kind]
    for k in (0, 3, 12_345, 39_999, 40_000):
        ks = [k, 20_000, numel - k]

        def on_rank(rank: int, ks: list[int] = ks) -> list[torch.Tensor]:
            part = whole[cuts[rank] : cuts[rank + 1]]
            return select(communicator(), [part] * len(ks), numel, cuts[rank], ks).masks

        found = run_threads(4, on_rank)
        for own_k, masks in zip(ks, zip(*found, strict=True), strict=True):
            wanted = torch.ones(numel, dtype=torch.bool)
            wanted[torch.sort(whole.abs(), stable=True)[1][:own_k]] = False
            assert torch.equal(torch.cat(masks), wanted)


@pytest.mark.parametrize("kind", ["ties", "normal"])
def test_survivors_that_do_not_fit_are_found_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch.manual_seed(4)
    monkeypatch.setattr(tally, "_KEPT_BYTES", 1000)
    values = torch.randn(300_000)
    check(values if kind == "normal" else values.round(), 123_456)


def test_many_threads_change_nothing() -> None:
    torch.manual_seed(5)
    values = torch.randn(3_000_000)
    masks = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            masks.append(select(Alone(), [values], values.numel(), 0, [1_234_567]).masks[0])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(*masks)
    assert int((~masks[0]).sum()) == 1_234_567


@pytest.mark.parametrize("num_gone", [0, 3, 60_000, 100_000])
@pytest.mark.parametrize("k", [0, 2, 3, 59_999, 60_000, 60_001, 100_000])
def test_what_is_gone_goes_first(num_gone: int, k: int) -> None:
    torch.manual_seed(6)
    values, gone = torch.randn(100_000), torch.ones(100_000)
    gone[torch.randperm(100_000)[:num_gone]] = 0
    (mask,) = select(Alone(), [values], 100_000, 0, [k], gone).masks
    lowest = values.abs().where(gone != 0, -1).sort(stable=True).indices
    wanted = torch.ones(100_000, dtype=torch.bool)
    wanted[lowest[: max(k, num_gone)]] = False
    assert torch.equal(mask, wanted)


@pytest.mark.parametrize("samples", [False, True])
def test_nothing_new_goes_where_enough_is_gone(samples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values, gone = torch.randn(1 << 18), torch.arange(1 << 18) % 2
    if samples:
        monkeypatch.setattr(sampling, "_WORTH", 0)
    comm = Alone()
    selected = select(comm, [values], 1 << 18, 0, [1 << 17], gone)
    assert selected.thresholds == [None]
    assert comm.traffic.num_rounds == (2 if samples else 1)  # one to sample, one to count


@pytest.mark.parametrize("num_small", [0, 3, 700])
@pytest.mark.parametrize("samples", [False, True])
def test_small_and_large_entries_of_many_competitions(
    num_small: int, samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small entries are read together, and competitions that are decided leave the message."""
    torch.manual_seed(8)
    if samples:
        monkeypatch.setattr(sampling, "_WORTH", 0)
        monkeypatch.setattr(tally, "_KEPT_BYTES", 20_000)
    numel = 20_000 if num_small < 100 else 97
    parts = [torch.randn(numel).mul(4).round() if i % 3 else torch.randn(numel) for i in range(num_small + 2)]
    ks = [(i * 977) % (numel + 1) for i in range(len(parts))]
    for part, k, mask in zip(parts, ks, select(Alone(), parts, numel, 0, ks).masks, strict=True):
        wanted = torch.ones(numel, dtype=torch.bool)
        wanted[torch.sort(part.abs(), stable=True)[1][:k]] = False
        assert torch.equal(mask, wanted)


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_nan_raises_on_every_rank_and_names_the_tensor(nan: float) -> None:
    def on_rank(rank: int) -> None:
        part = torch.ones(10)
        if rank == 1:
            part[3:5] = nan
        select(communicator(), [torch.ones(10), part], 20, 10 * rank, [3, 3])

    for error in run_threads(2, on_rank, catch=True):
        assert isinstance(error, ValueError)
        assert "'c1' (2)" in str(error)
        assert "'c0'" not in str(error)


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="5 elements are to be pruned, there are 4"):
        select(Alone(), [torch.ones(4)], 4, 0, [5])


def test_elements_owned_twice() -> None:
    def on_rank(_: int) -> None:
        select(communicator(), [torch.ones(4)], 4, 0, [1])

    for error in run_threads(2, on_rank, catch=True):
        assert isinstance(error, ValueError)
        assert "owned by exactly one rank" in str(error)


def traffic_of(
    num_elements: int, num_tensors: int, dtype: torch.dtype, world_size: int, *, ties: bool = True
) -> Traffic:
    """Return the traffic of pruning half of every tensor; with ``ties``, of which each k-th has some of its own."""
    numel = num_elements // num_tensors

    def on_rank(rank: int) -> Traffic:
        local = numel // world_size
        tied, distinct = torch.arange(1, local + 1) // 4 * world_size, torch.arange(rank, numel, world_size)[:local]
        values = tied if ties else distinct
        whole = values.to(dtype).div_(numel).add_(1).repeat(num_tensors)
        comm = communicator()
        select(comm, torch.split(whole, local), local * world_size, rank * local, [numel // 2 + 1] * num_tensors)
        return comm.traffic

    traffics: list[Traffic] = run_threads(world_size, on_rank)
    assert traffics == [traffics[0]] * world_size
    return traffics[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tensors", [1, 500])
@pytest.mark.parametrize("growth", [4, only_whole(64)])
@pytest.mark.sampled(1)
def test_rounds_and_bytes_do_not_grow_with_elements(
    growth: int, num_tensors: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two rounds to sample, three over keys and two over positions; fewer counts share a word."""
    monkeypatch.setattr(sampling, "_WORTH", 0)
    small, large = (traffic_of(size << 20, num_tensors, dtype, 2) for size in (1, growth))
    if num_tensors == 1:
        assert max(small.num_rounds, large.num_rounds) <= 7
        assert max(small.num_bytes, large.num_bytes) <= 5 * (64 << 10) + 2 * (128 << 10)
    else:
        assert max(small.num_rounds, large.num_rounds) <= 10
        assert max(small.num_bytes, large.num_bytes) <= large.num_rounds * (128 << 10) + 16 * large.num_rounds


def test_positions_take_no_round_where_no_tie_is_broken() -> None:
    for num_tensors in (1, 5):
        assert traffic_of(1 << 16, num_tensors, torch.float32, 2, ties=False).num_rounds == 3


def test_rounds_and_bytes_do_not_grow_with_ranks() -> None:
    few, many = (traffic_of(1 << 16, 1, torch.float32, world_size) for world_size in (2, 7))
    assert few.num_rounds == many.num_rounds
    assert abs(few.num_bytes - many.num_bytes) < few.num_bytes // 8  # 65,534 elements, not 65,536


def test_64_bit_scores_stay_within_ten_rounds() -> None:
    for num_tensors in (1, 4):
        assert traffic_of(1 << 16, num_tensors, torch.float64, 2).num_rounds <= 8


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("num", [3000, only_whole(10_000)])
def test_many_competitions_take_more_rounds_of_bounded_bytes(num: int, ties: bool) -> None:
    used = traffic_of(num << 7, num, torch.float32, 2, ties=ties)
    assert used.num_rounds <= 12
    assert used.num_bytes <= used.num_rounds * (24 * num + 16)


@pytest.mark.parametrize("where", [contextlib.nullcontext, as_on_a_device], ids=["host", "device"])
def test_coarse_counts_ask_for_the_lowest_and_the_highest(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what lies close together, also where one competition has nothing on this rank."""
    monkeypatch.setattr(counts, "_MOST_BINS", 3)
    values = torch.arange(8192) % 2 * 2**-20 + 1

    def on_rank(rank: int) -> tuple[list[torch.Tensor], int]:
        comm, parts = communicator(), [values[:0] if rank else values, values[4096 * rank :][:4096]]
        return select(comm, parts, 8192, 4096 * rank, [5000, 4096]).masks, comm.traffic.num_rounds

    with where():
        found = run_threads(2, on_rank)
    for i, k in enumerate((5000, 4096)):
        wanted = (torch.arange(8192) % 2 > 0) & (torch.arange(8192) >= 2 * (k - 4096))
        assert torch.equal(torch.cat([masks[i] for masks, _ in found]), wanted)
    assert all(num_rounds <= 20 for _, num_rounds in found)


def test_nothing_to_do() -> None:
    selection = select_lowest(Alone(), [], list)
    assert selection.thresholds == []
