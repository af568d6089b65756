"""Moments are those of all samples, on any number of ranks, and which layers share an input is the same on all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.moments import Moments, Needs
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.shared_inputs import shared_inputs
from distprune.calibration.statistics import InputStatistics, product
from distprune.calibration.walk import Batch, Call, Walk, spread
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from distprune.models.linear_layers import LinearLayer, linear_layers
from tests.architectures import samples, tiny_model
from tests.device_path import as_on_a_device
from tests.oneshot_oracle import listening
from tests.worlds import all_raise, drawing, run_threads

TOKENS = samples(5)
KINDS: tuple[Needs, ...] = ("squares", "products")


def walk_of(block: nn.Module, inputs: Sequence[torch.Tensor], sample_group: SampleGroup | None = None) -> Walk:
    """A walk whose only block is given ``inputs``, a sample each."""
    batches = [Batch(range(i, i + 1), {}, [Call((), {})]) for i in range(len(inputs))]
    group = sample_group or SampleGroup()
    return Walk(block, [("", block)], list(inputs), batches=batches, sample_group=group)


def walk_of_model(model: nn.Module, comm: Communicator) -> Walk:
    """A walk of this rank's samples through ``model``."""
    walk = catch_inputs(model, spread(TOKENS, SampleGroup(comm.rank, comm.size)))
    return dataclasses.replace(walk, sample_group=SampleGroup(comm.rank, comm.size))


def moments_of(walk: Walk, needs: Needs, comm: Communicator, index: int = 0) -> list[Moments]:
    """The moments of what the layers of a block are given."""
    statistics = InputStatistics(comm, walk, linear_layers(walk.blocks[index][1]), needs)
    statistics.run(index)
    return [moments for wave in statistics.reduce() for moments in wave]


def moments_of_blocks(model: nn.Module, comm: Communicator, needs: Needs) -> list[list[Moments]]:
    """The moments of every block of the unpruned model."""
    walk, found = walk_of_model(model, comm), []
    for index in range(len(walk.blocks)):
        found.append(moments_of(walk, needs, comm, index))
        walk.advance(index, comm)
    return found


SHARED = {
    "llama": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")],
    "phi": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1")],  # attention beside the MLP
    "falcon": [("self_attention.query_key_value", "mlp.dense_h_to_4h")],
    "opt": [("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj")],
    "gpt2": [],
}


@pytest.mark.parametrize("architecture", SHARED)
def test_shared_inputs_are_counted_once(architecture: str) -> None:
    for moments in moments_of_blocks(tiny_model(architecture), Alone(), "squares"):
        assert [m.names for m in moments if len(m.names) > 1] == SHARED[architecture]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_in", [1, 127, 300])
def test_products_of_many_features(num_in: int, num_ranks: int) -> None:
    """Of ranks that share out the features, too. Whole numbers: every sum is exact."""
    x = torch.randint(-9, 10, (6, num_in), generator=torch.Generator().manual_seed(num_in)).float()

    def of_rank(rank: int) -> list[Moments]:
        with drawing(0):
            block = Beside(*(nn.Linear(num_in, 2) for _ in range(3)))
        group = SampleGroup(rank=rank, size=num_ranks)
        return moments_of(walk_of(block, torch.split(x, 2), sample_group=group), "products", communicator())

    for rank, found in enumerate(run_threads(num_ranks, of_rank)):
        assert {moments.owner for moments in found} == set(range(num_ranks))
        for moments in found:
            assert torch.equal(moments.squares, x.double().square().sum(0))
            if moments.owner == rank:
                assert torch.equal(moments.products, (x.t() @ x).double())
            else:
                assert moments.products is None


def test_about_the_mean() -> None:
    """Sums in float64 of products in float32 leave enough of what is about a mean of 30."""
    x = torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(0)) + 30
    (moments,) = moments_of(walk_of(nn.Sequential(nn.Linear(16, 3)), list(x)), "products", Alone())
    flat = x.flatten(0, 1).double()
    assert moments.products is not None
    about = moments.products - moments.num_tokens * torch.outer(moments.mean, moments.mean)
    wanted = (flat - flat.mean(0)).t() @ (flat - flat.mean(0))
    assert float((about - wanted).norm() / wanted.norm()) < 1e-3
    torch.testing.assert_close(moments.mean_sizes, flat.abs().mean(0))


@pytest.mark.parametrize("needs", KINDS)
def test_rounds_and_bytes(needs: Needs) -> None:
    comm, block = Alone(), nn.Sequential(nn.Linear(10, 3, bias=False), nn.Linear(3, 2))
    moments_of(walk_of(block, [torch.ones(2, 10)]), needs, comm)
    used, num_sums = comm.traffic, 1 if needs == "squares" else 3
    assert used.num_rounds == 1 + 2 * num_sums + 1
    numbers = 13 * 3 + (0 if needs == "squares" else 10**2 + 3**2)
    # Who shares, with whether a rank has failed; the sums, and before each, and in the end, that all are ready.
    assert used.num_bytes == 8 + 24 * 2 + 64 * (num_sums + 1) + 8 * numbers


def test_features_of_16_bits_on_a_device() -> None:
    model = tiny_model("llama").bfloat16()
    wanted = moments_of_blocks(model, Alone(), "squares")
    with as_on_a_device():
        found = moments_of_blocks(model, Alone(), "squares")
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        for name in ("squares", "mean", "mean_sizes"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("of_change", [False, True])
def test_products_on_a_gpu(dtype: torch.dtype, of_change: bool) -> None:
    x, y, z = (torch.randn(3000, num, device="cuda").to(dtype) for num in (96, 80, 80))
    other = y.float() - z if of_change else y
    wanted = x.double().t() @ other.double()
    torch.testing.assert_close(product(x, other).double(), wanted, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("num_tokens", [300, 0])
def test_squared_output(num_tokens: int) -> None:
    """Of inputs that are far from uncorrelated, since their means are not 0: without these it would be a 20th."""
    torch.manual_seed(0)
    linear = nn.Linear(40, 30, bias=False)
    weight = torch.nn.init.uniform_(linear.weight).detach()
    x = torch.ones(num_tokens, 40) + 0.1 * torch.randn(num_tokens, 40)
    total = float((x @ weight.t()).square().sum())
    (moments,) = moments_of(walk_of(nn.Sequential(linear), [x] if num_tokens else []), "squares", Alone())
    if num_tokens:
        assert moments.squared_output(weight) == pytest.approx(total, rel=0.01)
        assert float((weight.square() * moments.squares).sum()) < total / 20
    else:
        assert moments.squared_output(weight) == pytest.approx(float(weight.square().sum()))


class Beside(nn.Module):
    """Layers that are given the same, in copies or not."""

    def __init__(self, *layers: nn.Module, copies: bool = True) -> None:
        super().__init__()
        self.layers, self.copies = nn.ModuleList(layers), copies

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x.clone() if self.copies else x) for layer in self.layers]).sum(dim=0)


class Twice(nn.Module):
    """Two layers whose inputs are the same tensor or not, as it is told by sample."""

    def __init__(self, *hows: str) -> None:
        super().__init__()
        with drawing(0):
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hows = iter(hows)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, how = torch.as_tensor(self.a(x)), next(self.hows)
        if how == "written":
            x.add_(1)
        if how == "twice":
            y = self.a(y)
        return y + torch.as_tensor(self.b(x.clone() if how == "copy" else x))


def listen(*hows: str) -> list[Moments]:
    inputs = [torch.ones(1, 4) for _ in hows]
    return moments_of(walk_of(Twice(*hows), inputs), "squares", Alone())


def test_what_is_the_same_input() -> None:
    assert [m.names for m in listen("same", "same")] == [("a", "b")]
    assert [m.names for m in listen("copy")] == [("a",), ("b",)]
    a, b = listen("written")  # the same tensor, with other values
    assert (a.squares == 1).all()
    assert (b.squares == 4).all()
    with pytest.raises(NotImplementedError, match="'b' has the input of 'a' in one sample and that of 'b' in another"):
        listen("same", "copy")
    with pytest.raises(NotImplementedError, match="'b' has the input of 'a' in some calls and not in others"):
        listen("twice")


def test_an_expert_without_tokens() -> None:
    model: Any = tiny_model("mixtral")
    block = model.model.layers[0]
    with torch.no_grad():
        block.mlp.gate.weight.zero_()  # all logits tie, so that the first two experts win everywhere
    moments = {name: m for m in moments_of_blocks(model, Alone(), "products")[0] for name in m.names}
    counts = [moments[f"mlp.experts.gate_up_proj.{e}"].num_tokens for e in range(4)]
    assert sorted(counts) == [0, 0, TOKENS.numel(), TOKENS.numel()]
    for e in range(4):
        products = moments[f"mlp.experts.down_proj.{e}"].products
        assert torch.equal(products, torch.eye(len(products)).double()) != bool(counts[e])  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_inputs_of_experts_whatever_multiplies_them(implementation: str) -> None:
    model: Any = tiny_model("mixtral")
    model.set_experts_implementation(implementation)
    found = {name: m for m in moments_of_blocks(model, Alone(), "squares")[0] for name in m.names if m.num_tokens}
    wanted = dict.fromkeys(found, torch.zeros(()))
    for tokens in TOKENS:
        with torch.no_grad(), listening(model.model.layers[0], found) as given:
            model(input_ids=tokens[None], use_cache=False)
        for name, x in given.inputs.items():
            wanted[name] = wanted[name] + x.double().square().sum(0)
    for name, moments in found.items():
        torch.testing.assert_close(moments.squares.float(), wanted[name].float(), rtol=1e-5, atol=1e-6)


LINEARS = {name: LinearLayer(name, nn.Linear(2, 2), "weight", 2, 2) for name in ("q", "k", "up.0", "gate.0")}


def heard_on_rank(rank: int, *heard: dict[str, str]) -> dict[tuple[str, ...], int]:
    """``heard`` by rank: of each layer the first that has its input; rank r counts 2 + r tokens of each layer."""
    inputs = shared_inputs(communicator(), LINEARS, (), lambda: (heard[rank], dict.fromkeys(heard[rank], 2 + rank)))
    return {shared.names: shared.num_tokens for shared in inputs}


def test_of_experts_a_rank_may_hear_nothing() -> None:
    heard = [{"q": "q", "up.0": "up.0", "gate.0": "up.0"}, {"q": "q"}, {}]
    assert run_threads(3, heard_on_rank, *heard) == [{("q",): 5, ("k",): 0, ("up.0", "gate.0"): 2}] * 3


def test_some_of_those_that_share() -> None:
    heard = [{"q": "q"}, {"q": "q", "k": "q"}, {"k": "k"}]
    match = "'k' has the input of other layers on one rank than on another"
    all_raise(3, heard_on_rank, *heard, kind=NotImplementedError, match=match)


def test_a_part_of_the_features() -> None:
    """As tensor parallelism hands its row-wise layers, on a rank that shares its samples with nobody."""
    block = nn.Sequential(nn.Linear(4, 4))
    statistics = InputStatistics(Alone(), walk_of(block, [torch.ones(3, 2)]), linear_layers(block), "squares")
    block[0].weight = nn.Parameter(torch.ones(4, 2))
    statistics.run(0)
    with pytest.raises(NotImplementedError, match=r"'0' is given Tensor \(3, 2\) where 4 features were expected"):
        list(statistics.reduce())
