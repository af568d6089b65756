"""SparseGPT's sweep by a kernel comes to what the plain loop comes to, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distprune import Block, NByM, PerRow, Unstructured
from distprune.calibration.moments import Moments
from distprune.collectives.communicator import Alone
from distprune.oneshot.driver import prune_rows
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import LayerReport
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import Rows
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.patterns.base import Choice, Pattern, Ranked
from tests.architectures import samples, tiny_model
from tests.device_path import as_on_a_device, counted_waits
from tests.oneshot.alike import matrices, sharded
from tests.worlds import ProcessPool
from tests.wrapped import whole


@dataclass(frozen=True)
class Quarters(Pattern):
    """Of every 4 inputs of a row one goes, as in no pattern that kernels know."""

    width, is_by_row = 4, True

    @override
    def __str__(self) -> str:
        return "quarters"

    @override
    def choose(self, ranked: Ranked) -> Choice:
        raise NotImplementedError

    @override
    def keep(self, scores: torch.Tensor) -> torch.Tensor:
        return NByM(3, 4).keep(scores)


NUM_ROWS = {"one": 6, "none": 0, "other": 3}  # layers that share an input; a program has 4 rows
CASES: list[tuple[int, Pattern]] = [
    (12, NByM(2, 4)),
    (160, NByM(2, 4)),
    (135, NByM(3, 5)),  # blocks of 125 columns
    (132, NByM(4, 6)),
    (40, NByM(1, 8)),
    (200, NByM(60, 100)),
    (300, NByM(10, 150)),  # more than a launch has
    (130, PerRow(0.4)),
    (20, PerRow(0.0)),
    (24, Quarters()),
    (140, PerRow({"one": 0.3, "none": 0.5, "other": 0.7})),
    (140, Unstructured(0.5)),
    (140, Unstructured({"one": 0.3, "none": 0.5, "other": 10}, scope="tensor")),
    (72, Block(3, 0.4)),
]


def layers(num_in: int) -> tuple[dict[str, Rows], list[Moments]]:
    """Return layers with an input, some of it always 0, of weights some of which are 0."""
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randn(2 * num_in, num_in, generator=generator) @ torch.randn(num_in, num_in, generator=generator)
    x[:, [1, num_in // 2]] = 0
    x, rows = x.double(), {}
    for name, num in NUM_ROWS.items():
        weight = torch.randn(num, num_in, generator=generator)
        weight *= torch.rand(num, num_in, generator=generator) < 0.8
        rows[name] = Rows(weight, ((0, num),), num, owned=True, name=name)
    return rows, [Moments((*rows,), len(x), x.square().sum(0), x.mean(0), x.abs().mean(0), products=x.t() @ x)]


def prune(rows: dict[str, Rows], moments: list[Moments], pattern: Pattern) -> Mapping[str, LayerReport]:
    return prune_rows(Alone(), rows, moments, lambda _: nullcontext(), Aim(0.0), solver=SparseGPT(), pattern=pattern)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("num_in", "pattern"), CASES, ids=str)
@pytest.mark.sampled(9)
def test_equals_the_plain_loop(num_in: int, pattern: Pattern) -> None:
    of_both = []
    for devices, where in (((), nullcontext()), (("cpu",), as_on_a_device())):
        rows, moments = layers(num_in)
        with patch("distprune.kernels.available._DEVICES", devices), where:
            reports = prune(rows, moments, pattern)
        of_both.append((rows, reports))
    (plain, wanted), (found, reports) = of_both
    for name, layer in plain.items():
        assert torch.equal(found[name].weight == 0, layer.weight == 0)
        torch.testing.assert_close(found[name].weight, layer.weight, rtol=1e-4, atol=1e-5)
        assert reports[name].num_pruned == wanted[name].num_pruned
        assert (reports[name].relative_error or 0.0) == pytest.approx(wanted[name].relative_error or 0.0, rel=1e-4)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_of_equals_the_first_go(n: int) -> None:
    """Of white inputs nothing is made up for."""
    weight = torch.tensor([[1.0, -1, 1, 1, 0, 2, -2, 0], [3, 3, 4, -3, -5, 5, 5, -5], [2, 1, 0, 0, 0, 0, 0, 1]])
    wanted, ones = weight * NByM(n, 4).keep(weight.abs()), torch.ones(8, dtype=torch.float64)
    moments = Moments(("one",), 8, ones, ones, ones, products=torch.eye(8, dtype=torch.float64))
    rows = {"one": Rows(weight, ((0, 3),), 3, owned=True, name="one")}
    prune(rows, [moments], NByM(n, 4))
    assert torch.equal(weight, wanted)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [torch.inf, -torch.nan])
@pytest.mark.parametrize("pattern", [NByM(2, 4), PerRow(0.5), Unstructured(0.5)], ids=str)
@pytest.mark.sampled(3)
def test_weights_that_are_not_finite_are_named(pattern: Pattern, value: float) -> None:
    rows, moments = layers(12)
    rows["other"].weight[1, 8:] = value
    with as_on_a_device(), pytest.raises(ValueError, match=r"NaN.*'other'|'other' are NaN"):
        prune(rows, moments, pattern)


def pruned(model: nn.Module, pattern: Pattern) -> dict[str, torch.Tensor]:
    prune_blocks(model, samples(3), method="sparsegpt", pattern=pattern)
    return {name: whole(weight) for name, weight in matrices(model).items()}


def small_model() -> nn.Module:
    return tiny_model("llama", num_hidden_layers=1, hidden_size=8, intermediate_size=4, num_attention_heads=2)


def pruned_on_rank(_: int, pattern: Pattern) -> dict[str, torch.Tensor]:
    import_module("tests.kernels.interpreted")
    with patch("distprune.kernels.available._DEVICES", ("cpu",)):
        return pruned(sharded(small_model()), pattern)


@pytest.mark.parametrize("pattern", [NByM(2, 4), PerRow(0.5), Unstructured(0.5)], ids=str)
def test_ranks_that_hold_no_rows(pool: ProcessPool, pattern: Pattern) -> None:
    """Of 4 rows of ``up_proj`` the third rank has none."""
    pytest.importorskip("triton")
    wanted = pruned(small_model(), pattern)
    for found in pool.run(3, pruned_on_rank, pattern):
        for name, weight in wanted.items():
            assert torch.equal(found[name] == 0, weight == 0), name
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that are kernels on a device: all but views, and memory that is not filled."""

    num = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view and "empty" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def no_errors(*arguments: Any, **_: Any) -> None:
    """Take the place of the kernel: what it does is seen elsewhere."""
    arguments[6].zero_()


@pytest.mark.usefixtures("interpreted")
def test_columns_take_two_launches_a_block_and_no_wait() -> None:
    nums = []
    for num_in in (128, 512):
        with as_on_a_device(), patch("distprune.kernels.sweep.launch", side_effect=no_errors) as launched:
            with counted_waits() as waits, Launches() as launches:  # type: ignore[no-untyped-call]
                prune(*layers(num_in), NByM(2, 4))
        nums.append((launched.call_count, launches.num - launched.call_count, waits.num_fetches, waits.calls))
    (kernels, others, *first), (more_kernels, more_others, *second) = nums
    assert (kernels, more_kernels, more_others - others) == (1, 4, 3)
    assert first == second


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("pattern", [NByM(2, 4), PerRow(0.5)], ids=str)
def test_launches_of_a_block(pattern: Pattern) -> None:
    """With 5 blocks of columns."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)
    kernel = patch("distprune.kernels.sweep.launch", side_effect=no_errors)
    with kernel as launched, Launches() as launches:  # type: ignore[no-untyped-call]
        prune_blocks(model, samples(112, 64), method="sparsegpt", pattern=pattern)
    assert launched.call_count == 2 * 5
    assert launches.num + launched.call_count <= 2 * 900
