"""What patterns choose by kernels is what they choose on the host, in Triton's interpreter."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from typing_extensions import override

import distprune as prune
from distprune.collectives.communicator import communicator
from distprune.kernels.table import Table
from tests.device_path import counted_memory, counted_waits
from tests.worlds import ProcessPool

RUN = Table.run
SHAPES = [(6, 32), (8, 64), (3, 32)]


def model(dtype: torch.dtype, kind: str) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(i, o, bias=False, dtype=dtype) for o, i in SHAPES))
    with torch.no_grad():
        for weight in layers.parameters():
            values = torch.randn(weight.shape)
            weight.copy_((values * 2).round() / 2 if kind == "ties" else values)
            weight.grad = torch.randn(weight.shape).to(dtype)
    return layers


def zeros(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", ["magnitude", "random", torch.square], ids=["magnitude", "random", "function"])
@pytest.mark.parametrize("pattern", ["2:4", "3:8", "row"])
@pytest.mark.sampled(7)
def test_rows_and_groups(pattern: str, score: Any, dtype: torch.dtype, kind: str) -> None:
    how: dict[str, Any] = {"pattern": pattern, "include": "*", "score": score}
    how |= {"sparsity": 0.3} if pattern == "row" else {}
    here, there = model(dtype, kind), model(dtype, kind)
    with patch("distprune.kernels.available._DEVICES", ()):
        report = prune.prune_model(here, **how)
    with patch.object(Table, "run", autospec=True, side_effect=Table.run) as launched:
        other = prune.prune_model(there, **how)
    # NaNs are looked for, and zeros are written: of all groups, or of all rows of a length.
    if score is not torch.square:  # whose keys are computed
        assert launched.call_count == (2 if pattern != "row" else 4)
    assert all(map(torch.equal, zeros(here), zeros(there)))
    assert report.parameters == other.parameters


KINDS = [
    (score, how, dtype, kind)
    for score in ("magnitude", "gradient", "taylor", "random", "function", "value", "no number of zero")
    for how in ({}, {"scope": "tensor"})
    for dtype in (torch.float32, torch.bfloat16, None)
    for kind in ("normal", "ties")
]


class Signed(prune.Score):
    """Ordered by value, and negative."""

    @override
    def values(self, elements: Any) -> torch.Tensor:
        weight: torch.Tensor = elements.weight
        return weight.float() - 0.5


SCORES: dict[str, Any] = {"function": torch.square, "value": Signed()}
SCORES["no number of zero"] = lambda weights: weights / weights.abs() * weights


def check_elements(score: str, how: dict[str, Any], dtype: torch.dtype | None, kind: str, share: float) -> None:
    call = {"sparsity": share, "score": SCORES.get(score, score), "include": "*", "scope": how.get("scope")}
    here, there, masked = (model(dtype or torch.float32, kind) for _ in range(3))
    if dtype is None:  # of several dtypes
        for module in (here, there, masked):
            module[1].to(torch.bfloat16)  # type: ignore[index]
    with patch("distprune.kernels.available._DEVICES", ()):
        report = prune.prune_model(here, **call)
    versions = [parameter._version for parameter in there.parameters()]
    other = prune.prune_model(there, **call)
    assert all(p._version > version for p, version in zip(there.parameters(), versions, strict=True))
    masks = prune.compute_masks(masked, **call)
    assert all(map(torch.equal, zeros(here), zeros(there)))
    assert report.parameters == other.parameters
    for (name, weight), zero in zip(masked.named_parameters(), zeros(here), strict=True):
        assert torch.equal(masks[name], zero != 0) or kind == "ties"
        assert torch.equal(weight * masks[name], zero)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("score", "how", "dtype", "kind"), KINDS, ids=str)
@pytest.mark.sampled(7)
def test_elements(score: str, how: dict[str, Any], dtype: torch.dtype | None, kind: str) -> None:
    for share in (0.0, 0.4):
        check_elements(score, how, dtype, kind, share)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "row"])
@pytest.mark.parametrize("by", ["random", "gradient"])
@pytest.mark.sampled(3)
def test_zeros_that_move(by: Any, pattern: str) -> None:
    found, num_launches = [], 0
    for devices in ((), ("cpu",)):
        module = model(torch.float32, "ties")
        how: dict[str, Any] = {"pattern": pattern} | ({} if pattern == "2:4" else {"sparsity": 0.5})
        prune.prune_model(module, include="*", **how)
        hold = prune.hold_zeros(module, torch.optim.SGD(module.parameters(), lr=0.1), include="*")
        with patch("distprune.kernels.available._DEVICES", devices), patch.object(Table, "run", autospec=True) as run:
            run.side_effect = RUN
            counts = hold.regrow(0.3, pattern, by=by, seed=3)
        num_launches += run.call_count
        found.append([*zeros(module), torch.tensor([counts.num_held, counts.num_moved])])
    assert all(map(torch.equal, *found))
    assert num_launches > 0 or pattern == "row"  # each row drops a share of what it has kept


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", [{"sparsity": 0.5}, {"pattern": "2:4"}, {"sparsity": 0.5, "pattern": "row"}], ids=str)
def test_zeros_in_place_take_no_memory(how: dict[str, Any]) -> None:
    """Only the host keeps the numbers of rows; there is no mask."""
    peaks = []
    for num in (64, 4096):
        layer = nn.Linear(64, num, bias=False)
        with patch("distprune.kernels.table.launch"), patch("distprune.kernels.lowest.launch"):
            with counted_memory() as memory:
                prune.prune_model(layer, include="*", **how)
        peaks.append(memory.peak)
    assert peaks[1] - peaks[0] < 40_000  # of 258,048 weights more


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", [{}, {"scope": "tensor"}, {"pattern": "2:4", "sparsity": None}], ids=str)
def test_launches_and_waits_of_a_call(how: dict[str, Any]) -> None:
    """They are those of any number of tensors; what kernels do is seen elsewhere."""
    layers = nn.Sequential(*(nn.Linear(16, 2, bias=False) for _ in range(154)))
    with patch("distprune.kernels.table.launch") as launched, counted_waits() as waits:
        with patch("distprune.kernels.lowest.launch", launched):
            prune.prune_model(layers, **{"sparsity": 0.5, "include": "*", **how})
    assert 0 < launched.call_count <= 20
    assert waits.num_fetches <= 3  # one to choose; the others, of no tensors, do not wait


@pytest.mark.usefixtures("interpreted")
def test_scores_of_a_function_are_read_together() -> None:
    """Those of small tensors are computed into one memory, of which one launch makes keys."""
    nums = []
    for num in (2, 154):
        layers = nn.Sequential(*(nn.Linear(16, 2, bias=False) for _ in range(num)))
        with patch("distprune.kernels.table.launch") as launched:
            prune.prune_model(layers, 0.5, score=torch.square, include="*")
        nums.append(launched.call_count)
    assert 0 < nums[1] <= nums[0] + 1  # a pass more where positions have more bits


def pruned_on_rank(_: int, score: str, shares: dict[str, Any]) -> list[torch.Tensor]:
    """Prune what FSDP2 shards unevenly, a matrix by columns, and a copy on each rank, by kernels."""
    import_module("tests.kernels.interpreted")
    with patch("distprune.kernels.available._DEVICES", ("cpu",)), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        module, mesh = model(torch.float32, "ties"), init_device_mesh("cpu", (2,))
        placements = ([Shard(0)], [Shard(1)], [Replicate()])
        for layer, placement in zip(module, placements, strict=True):  # type: ignore[call-overload]
            weight = distribute_tensor(layer.weight.data, mesh, placement)
            layer.weight = nn.Parameter(weight)
        comm = communicator(None)
        report = prune.prune_model(module, score=SCORES.get(score, score), include="*", group=comm, **shares)
        assert report.num_rounds <= 14
        assert report.num_bytes < 4 << 20
        whole = [parameter.full_tensor().detach() for parameter in module.parameters()]  # type: ignore[attr-defined]
        return [*whole, torch.tensor([parameter.num_zeros for parameter in report.parameters])]


@pytest.mark.parametrize("score", ["magnitude", "random", "value"])
@pytest.mark.parametrize(
    "shares", [{"sparsity": 0.4}, {"sparsity": 0.7, "scope": "tensor"}, {"pattern": "2:4"}], ids=str
)
@pytest.mark.sampled(3)
def test_two_ranks(pool: ProcessPool, score: str, shares: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    alone = model(torch.float32, "ties")
    report = prune.prune_model(alone, score=SCORES.get(score, score), include="*", **shares)
    wanted = [*zeros(alone), torch.tensor([parameter.num_zeros for parameter in report.parameters])]
    for of_rank in pool.run(2, pruned_on_rank, score, shares):
        assert all(map(torch.equal, of_rank, wanted))


def nan_on_rank(rank: int, how: dict[str, Any]) -> list[torch.Tensor]:
    """Prune rows of which one rank has a NaN."""
    import_module("tests.kernels.interpreted")
    with patch("distprune.kernels.available._DEVICES", ("cpu",)):
        rows = torch.ones(4, 8)
        rows[2, 3] = torch.nan if rank else 1.0
        geometry = prune.Geometry.rows((8, 8), 4 * rank, 4 * rank + 4)
        with pytest.raises(ValueError, match=r"NaN in 'w' \(1\)"):
            prune.prune_shards([prune.LocalShard("w", rows, geometry, prune.Ownership())], **how)
        return [rows]


@pytest.mark.parametrize("how", [{"sparsity": 0.5}, {"pattern": "2:4"}, {"sparsity": 0.5, "pattern": "row"}], ids=str)
def test_nothing_changes_on_any_rank_if_one_has_a_nan(pool: ProcessPool, how: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    (first,), (second,) = pool.run(2, nan_on_rank, how)
    assert (first == 1).all()
    assert second.nan_to_num(1.0).eq(1).all()


def scattered_on_rank(rank: int) -> list[float]:
    """Prune rows of which one rank has columns, one after the other, in memory."""
    import_module("tests.kernels.interpreted")
    with patch("distprune.kernels.available._DEVICES", ("cpu",)):
        rows = torch.arange(48.0).view(8, 6).fmod(11.0)[4 * rank : 4 * rank + 4].clone()
        rows = rows.t().contiguous().t() if rank else rows
        geometry = prune.Geometry.rows((8, 6), 4 * rank, 4 * rank + 4)
        prune.prune_shards([prune.LocalShard("w", rows, geometry, prune.Ownership())], 0.4)
        return rows.flatten().tolist()


def test_ranks_whose_memory_differs(pool: ProcessPool) -> None:
    pytest.importorskip("triton")
    whole = torch.arange(48.0).view(8, 6).fmod(11.0)
    prune.prune_shards([prune.LocalShard("w", whole, prune.Geometry.whole((8, 6)), prune.Ownership())], 0.4)
    first, second = pool.run(2, scattered_on_rank)
    assert [*first, *second] == whole.flatten().tolist()
