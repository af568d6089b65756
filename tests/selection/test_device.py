"""The code for devices, on CPU tensors: the masks are the host's, and the host waits as often for 1 chunk as for 64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.collectives.communicator import Alone
from distprune.masks.in_place import bring_back, make_zeros_positive, set_aside, write_signed_zeros
from distprune.selection.highest import keep_highest_per_group, keep_highest_per_row
from distprune.shards import device
from tests.device_path import Waits, as_on_a_device, counted_memory, counted_waits
from tests.selection.test_radix import Selected, select

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values_of(kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(numel, generator=generator)
    if kind == "ties":
        values = values.round()
    elif kind == "infinite":
        values = values.where(values.abs() < 1, values.sign() * torch.inf)
    elif kind == "same":
        values = torch.full((numel,), -0.5)
    elif kind == "wide":
        values = values.mul(20).exp()
    return values.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "infinite", "same", "wide"])
@pytest.mark.sampled(10)
def test_selection_equals_the_hosts(kind: str, dtype: torch.dtype) -> None:
    numel = 3000
    values, gone = values_of(kind, numel, dtype), torch.arange(numel) % 7
    for ks, of in (([1000, 0, 3000], None), ([1000, 300, 2999], gone)):  # fewer than are gone in one
        parts = [values, values.flip(0), values.roll(11)]
        here: Selected = select(Alone(), parts, numel, 0, ks, of)
        with as_on_a_device():
            there: Selected = select(Alone(), parts, numel, 0, ks, of)
        assert here.thresholds == there.thresholds
        assert all(torch.equal(one, other) for one, other in zip(here.masks, there.masks, strict=True))


def test_nan_is_counted() -> None:
    values = torch.randn(2000)
    values[[3, 1999]] = torch.nan
    with as_on_a_device(), pytest.raises(ValueError, match=r"'c0' \(2\)"):
        select(Alone(), [values], 2000, 0, [5])
    modules = [linear(), linear(), linear()]
    with torch.no_grad():
        modules[1].weight[[3, 100], 7] = torch.nan
        modules[1].weight[5] = 0.0
    with as_on_a_device(), pytest.raises(ValueError, match=r"'1.weight' \(2\)"):
        CALLS["2:4"](nn.ModuleList(modules), Alone())


@pytest.mark.parametrize(
    ("dtype", "kernels_on"), [*((each, ()) for each in (*FLOATS, torch.int32)), (torch.int32, ("cpu",))], ids=str
)
def test_groups_and_rows_equal_the_hosts(dtype: torch.dtype, kernels_on: tuple[str, ...]) -> None:
    if kernels_on:
        pytest.importorskip("tests.kernels.interpreted")
    num_rows = 2 if kernels_on else 40  # Triton's interpreter takes its time
    numbers = torch.arange(num_rows) * 2
    groups = [(n, m) for m in (*range(1, 7), 8, 10, 12, 15, 16, 24) for n in {1, m // 2}]  # by pairs, by a sort
    groups = [(1, 3), (2, 4), (20, 40)] if kernels_on else groups

    def kept(scores: torch.Tensor) -> list[torch.Tensor]:
        found = [keep_highest_per_group(scores, n, m) for n, m in groups]
        return found + [keep_highest_per_row(scores, number) for number in (0, 50, 240, numbers, numbers * 0 + 3)]

    for kind in ("normal", "ties", "infinite"):
        scores = values_of(kind, num_rows * 240, torch.float32).nan_to_num(0, 9, -9).mul(3).to(dtype).view(-1, 240)
        here = kept(scores)
        with as_on_a_device(1 << 12), patch("distprune.kernels.available._DEVICES", kernels_on):
            there = kept(scores)
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    nan = torch.ones(60, 96)
    nan[[2, 59]] = torch.nan
    with as_on_a_device(), pytest.raises(ValueError, match="192 scores are NaN"):
        keep_highest_per_group(nan, 2, 4)


Call = Callable[[nn.Module, Alone], object]


def on_the_weight(function: Callable[..., object], *arguments: object, **named: object) -> Call:
    """Call ``function`` on a weight of which some is pruned before."""

    def call(module: nn.Module, comm: Alone) -> object:
        shape = module.get_parameter("weight").shape
        prune.custom_from_mask(module, "weight", (torch.arange(shape.numel()).view(shape) % 5 > 0).float(), group=comm)
        return function(module, "weight", *arguments, **named, group=comm)

    return call


def in_place(**arguments: object) -> Call:
    return lambda module, comm: prune.prune_model(module, group=comm, **arguments)  # type: ignore[arg-type]


CALLS: dict[str, Call] = {
    "unstructured": in_place(sparsity=0.5),
    "by value": in_place(sparsity=0.5, score=torch.square),
    "random": in_place(sparsity=0.5, score="random", seed=3),
    "row": in_place(sparsity=0.5, pattern="row"),
    "2:4": in_place(pattern="2:4"),
    "block": in_place(sparsity=0.5, pattern="block:4"),
    "random block": in_place(sparsity=0.5, pattern="block:4", score="random", seed=3),
    "channels 0": in_place(sparsity=0.5, pattern="channels:0"),
    "channels 1": in_place(sparsity=0.5, pattern="channels:1"),
    "l1_unstructured": on_the_weight(prune.l1_unstructured, 0.5),
    "random_unstructured": on_the_weight(prune.random_unstructured, 0.5, seed=3),
    "ln_structured": on_the_weight(prune.ln_structured, 0.5, 2, 0),
    "ln_structured 2.5": on_the_weight(prune.ln_structured, 0.5, 2.5, 1),
    "ln_structured inf": on_the_weight(prune.ln_structured, 0.5, float("inf"), 1),
    "random_structured": on_the_weight(prune.random_structured, 0.5, 1, seed=3),
    "row of what is left": on_the_weight(prune.l1_pattern, prune.PerRow(0.5)),
    "2:4 of what is left": on_the_weight(prune.l1_pattern, "2:4"),
    "block of what is left": on_the_weight(prune.l1_pattern, prune.Block(4, 0.5)),
    "sparsity": lambda module, comm: prune.sparsity(module, group=comm),
}


COMPETING = ("unstructured", "by value", "random", "l1_unstructured", "random_unstructured")
BLOCKS = ("block", "random block", "block of what is left")  # they compete on the host, which is the device here


def linear(kind: str = "normal") -> nn.Linear:
    module = nn.Linear(64, 128, bias=False)
    module.weight = nn.Parameter(values_of(kind, 64 * 128, torch.float32).view(128, 64))
    return module


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are equal; where an infinite weight is masked, the product is NaN."""
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def waits_of(call: Call, module: nn.Module, chunk: int) -> tuple[Waits, int]:
    """Return the waits and the rounds of a call."""
    with as_on_a_device(chunk), counted_waits() as waits:
        call(module, comm := Alone())
    return waits, comm.traffic.num_rounds


@pytest.mark.parametrize("kind", ["normal", "ties", "infinite"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sampled(8)
def test_the_same_mask_and_waits_for_64_chunks(name: str, kind: str) -> None:
    """Where elements compete, keys are copied to the host: one wait a chunk in each round. Else waits are as many."""
    here, one_chunk, many_chunks = (linear(kind) for _ in range(3))
    CALLS[name](here, Alone())
    (one, num_rounds), (many, _) = waits_of(CALLS[name], one_chunk, 64 * 128), waits_of(CALLS[name], many_chunks, 128)
    assert alike(here.weight, one_chunk.weight)
    assert alike(here.weight, many_chunks.weight)
    assert one.num_fetches <= num_rounds + 2
    assert many.num_fetches <= one.num_fetches + (63 * num_rounds if name in COMPETING + BLOCKS else 0)


@pytest.mark.parametrize("score", ["magnitude", "random"])
@pytest.mark.parametrize("pattern", ["block:2", "2:4", "row", "block:1", "block:16", "channels:0", "channels:1"])
@pytest.mark.sampled(3)
def test_memory_beyond_the_mask_at_real_sizes(pattern: str, score: str) -> None:
    module = nn.Linear(1 << 10, 9 << (10 if pattern == "block:2" else 8), bias=False)  # more than a chunk
    share, seed = {} if pattern == "2:4" else {"sparsity": 0.5}, {"seed": 3} if score == "random" else {}
    with counted_memory() as memory, as_on_a_device(device._DEVICE_CHUNK):
        prune.prune_model(module, pattern=pattern, score=score, group=Alone(), **share, **seed)  # type: ignore[arg-type]
    assert module.weight.numel() < memory.peak < (64 << 20) + module.weight.numel()


@pytest.mark.parametrize("kind", ["wide", "infinite"])
def test_keys_that_take_all_of_64_bits(kind: str) -> None:
    check_same_zeros(kind, [3000, 400], 512, score=lambda weights: weights)


@pytest.mark.parametrize("arguments", [{}, {"score": "random", "seed": 3}], ids=["magnitude", "random"])
@pytest.mark.sampled(1)
def test_memory_of_chunks_of_their_real_size(arguments: dict[str, Any]) -> None:
    numel = (1 << 21) + 8
    with counted_memory() as memory:
        check_same_zeros("normal", [numel], 1 << 21, **arguments)
    assert memory.peak - 18 * numel <= 64 << 20  # weights, twice, and masks


def check_same_zeros(kind: str, numels: list[int], chunk: int, **arguments: Any) -> None:
    """Check that the code for devices prunes what the host does, of float64 weights."""
    here, there = nn.Module(), nn.Module()
    for i, numel in enumerate(numels):
        values = values_of(kind, numel, torch.float64).view(-1, 8)
        here.register_parameter(f"p{i}", nn.Parameter(values.clone()))
        there.register_parameter(f"p{i}", nn.Parameter(values))
    call = in_place(sparsity=0.5, include="*", **arguments)
    with as_on_a_device(chunk):
        call(there, Alone())
    call(here, Alone())
    assert all(torch.equal(one, other) for one, other in zip(here.parameters(), there.parameters(), strict=True))


def test_what_waits_is_seen() -> None:
    values, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    for wait in (
        lambda: values[mask],
        lambda: values.clone().__setitem__(mask, 0.0),
        lambda: mask.nonzero(),
        lambda: values.sum().item(),
        lambda: bool(mask.any()),
        lambda: values.tolist(),
        lambda: values.numpy(),
        lambda: values.cpu(),
        lambda: torch.unique(values),
        lambda: torch.masked_select(values, mask),
        lambda: torch.equal(values, values),
        lambda: torch.tensor([1, 2]),
    ):
        with counted_waits() as waits:
            wait()
        assert waits.calls, wait.__code__.co_names


def test_what_is_set_aside_and_signed_is_the_hosts() -> None:
    def changed() -> list[torch.Tensor]:
        values = values_of("ties", 2000, torch.float32).view(50, 40)  # with zeros of both signs
        aside, mask, signed = torch.zeros_like(values), (torch.arange(2000) % 3 == 0).view(50, 40), values.clone()
        write_signed_zeros(signed, mask, where=True)
        positive = values.clone()
        make_zeros_positive([positive])
        set_aside(values, aside, mask)
        pruned = values.clone()
        pruned[::5] += 1
        of_pruned = aside.clone()
        num_written = bring_back(pruned, of_pruned)
        set_aside(pruned, of_pruned)
        return [each.view(torch.int32) for each in (values, aside, signed, positive, pruned, of_pruned)] + [num_written]

    here = changed()
    with as_on_a_device(), counted_waits() as waits:
        there = changed()
    assert not waits.calls
    assert all(map(torch.equal, here, there))


def test_masks_of_several_parameters_are_compared_in_one_wait_a_round() -> None:
    masks = prune.compute_masks(nn.Sequential(linear(), linear()), 0.5)
    with as_on_a_device(), counted_waits() as waits:
        masks.overlap(~masks)
    assert waits.num_fetches <= 4
