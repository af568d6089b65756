"""Exact selection: ties, NaN, many left, uneven parts, and what it costs on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from distprune.collectives.base import Communicator, Traffic
from distprune.collectives.communicator import Alone, communicator
from distprune.scores.as_score import Magnitude
from distprune.scores.base import LocalScores
from distprune.selection import host
from distprune.selection.host import Source
from distprune.selection.order import common_order
from distprune.selection.radix import Competition, select_lowest
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership
from tests.sampling import only_whole
from tests.worlds import all_raise, run_threads


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

    found: list[Source] = []

    def sources() -> list[Source]:
        for i, part in enumerate(parts):
            geometry = Geometry((numel,), (((first, first + part.numel()),) if part.numel() else (),))
            scores = LocalScores(LocalShard(f"c{i}", part, geometry, Ownership()), Magnitude(), {}, gone)
            found.append(Source(f"c{i}", part.device, scores.keys, geometry, True, i, 0))
        return found

    selection = select_lowest(comm, competitions, sources)
    masks = [torch.empty(e.geometry.local_numel, dtype=torch.bool, device=e.device) for e in found]
    counts = [selection.decide(source, mask).tolist() for source, mask in zip(found, masks, strict=True)]
    for (num_pruned, num_gone, _), mask in zip(counts, masks, strict=True):
        assert num_pruned == int((~mask).sum())
        assert num_gone == (0 if gone is None else int((gone == 0).sum()))
    return Selected(masks, selection.thresholds)


def all_but_lowest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the plain answer."""
    keep = torch.ones(scores.shape, dtype=torch.bool)
    keep[torch.sort(scores, stable=True)[1][:k]] = False
    return keep


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


@pytest.mark.parametrize("num_gone", [0, 3, 60_000, 100_000])
@pytest.mark.parametrize("k", [0, 2, 3, 59_999, 60_000, 60_001, 100_000])
def test_what_is_gone_goes_first(num_gone: int, k: int) -> None:
    torch.manual_seed(6)
    values, gone = torch.randn(100_000), torch.ones(100_000)
    gone[torch.randperm(100_000)[:num_gone]] = 0
    (mask,) = select(Alone(), [values], 100_000, 0, [k], gone).masks
    assert torch.equal(mask, all_but_lowest(values.abs().where(gone != 0, -1), max(k, num_gone)))


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_nan_raises_on_every_rank_and_names_the_tensor(nan: float) -> None:
    def on_rank(rank: int) -> None:
        part = torch.ones(10)
        if rank == 1:
            part[3:5] = nan
        select(communicator(), [torch.ones(10), part], 20, 10 * rank, [3, 3])

    for error in all_raise(2, on_rank, kind=ValueError, match=r"'c1' \(2\)"):
        assert "'c0'" not in str(error)


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="5 elements are to be pruned, there are 4"):
        select(Alone(), [torch.ones(4)], 4, 0, [5])


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


KINDS = {
    "normal": lambda numel: torch.randn(numel),
    "ties": lambda numel: torch.randn(numel).mul(2).round(),
    "constant": lambda numel: torch.full((numel,), 0.1),
    "sorted": lambda numel: torch.arange(numel).float(),
    "tiny spread": lambda numel: 1 + torch.randint(0, 9, (numel,)).float() * 2**-23,
    "wide": lambda numel: torch.randn(numel).mul(40).exp(),
    "infinite": lambda numel: torch.randn(numel).mul(100).exp(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(10)
def test_hard_distributions(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    values = KINDS[kind](300_000).to(dtype)
    for k in (0, 1, 1000, 150_000, 299_999, 300_000):
        (mask,) = select(Alone(), [values], values.numel(), 0, [k]).masks
        assert torch.equal(mask, all_but_lowest(values.abs(), k))


@pytest.mark.parametrize("kept_bytes", [24 << 20, 3000])
@pytest.mark.parametrize("kind", ["normal", "sorted", "ties", "constant"])
def test_uneven_parts(kind: str, kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several competitions, where all that is left is set aside, and where it is found again."""
    monkeypatch.setattr(host, "_KEPT_BYTES", kept_bytes)
    torch.manual_seed(9)
    numel, cuts = 40_000, [0, 5, 5, 19_000, 40_000]
    whole = KINDS[kind](numel)
    ks = [0, 3, 12_345, 20_000, 39_999, 40_000]

    def on_rank(rank: int) -> list[torch.Tensor]:
        part = whole[cuts[rank] : cuts[rank + 1]]
        return select(communicator(), [part] * len(ks), numel, cuts[rank], ks).masks

    found = run_threads(4, on_rank)
    for k, masks in zip(ks, zip(*found, strict=True), strict=True):
        assert torch.equal(torch.cat(masks), all_but_lowest(whole.abs(), k))


@pytest.mark.parametrize("num_small", [0, 3, 700])
def test_small_and_large_sources_of_many_competitions(num_small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are read together."""
    torch.manual_seed(8)
    monkeypatch.setattr(host, "_KEPT_BYTES", 200_000)
    numel = 20_000 if num_small < 100 else 97
    parts = [torch.randn(numel).mul(4).round() if i % 3 else torch.randn(numel) for i in range(num_small + 2)]
    ks = [(i * 977) % (numel + 1) for i in range(len(parts))]
    for part, k, mask in zip(parts, ks, select(Alone(), parts, numel, 0, ks).masks, strict=True):
        assert torch.equal(mask, all_but_lowest(part.abs(), k))


def test_nothing_new_goes_where_enough_is_gone() -> None:
    values, gone = torch.randn(1 << 18), torch.arange(1 << 18) % 2
    comm = Alone()
    assert select(comm, [values], 1 << 18, 0, [1 << 17], gone).thresholds == [None]
    assert comm.traffic.num_rounds == 2  # over keys


@pytest.mark.parametrize(
    ("dtype", "num_rounds"), [(torch.bfloat16, 1), (torch.float32, 2), (torch.float64, 4)], ids=str
)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [1 << 16, only_whole(4 << 20)])
@pytest.mark.sampled(3)
def test_rounds_of_one_competition(size: int, ties: bool, dtype: torch.dtype, num_rounds: int) -> None:
    """They follow from the dtype, and, where ties are broken, from the bits of a position: 16 a round."""
    used = traffic_of(size, 1, dtype, 2, ties=ties)
    are_broken = ties or dtype is torch.bfloat16
    assert used.num_rounds == num_rounds + (-(-(size - 1).bit_length() // 16) if are_broken else 0)
    assert used.num_bytes <= used.num_rounds * ((1 << 19) + 8)


@pytest.mark.parametrize("num_ranks", [2, 7])
@pytest.mark.parametrize(("num", "most"), [(5, 4), (500, 8), (3000, 10), only_whole(10_000, 15)])
@pytest.mark.sampled(4)
def test_many_competitions_take_more_rounds_of_bounded_bytes(num: int, most: int, num_ranks: int) -> None:
    used = traffic_of(num * 7 << 4, num, torch.float32, num_ranks)
    assert used.num_rounds <= most
    assert used.num_bytes <= used.num_rounds * ((1 << 20) + 8)


def test_nothing_to_do() -> None:
    selection = select_lowest(Alone(), [], list)
    assert selection.thresholds == []
