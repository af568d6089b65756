"""Moments are those of all samples, bit by bit the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from typing_extensions import override

from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.data import spread
from distprune.calibration.moments import Moments, MomentsOf
from distprune.calibration.owner_ranks import OwnerRank
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.triangle import pack_triangle, unpack_triangle
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.selection.highest import keep_highest_per_group, keep_highest_per_row
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.oneshot_oracle import linears, listening, prune_model
from tests.sampling import pairs_first
from tests.solver_oracle import NM
from tests.worlds import ProcessPool, drawing, run_threads

TOKENS = samples(5)
KINDS: tuple[MomentsOf, ...] = ("features", "pairs")
SHARDED = ["llama", "gpt2", "falcon", "mixtral", "qwen2_moe"]


def reduced(statistics: InputStatistics, *arguments: Any, **options: Any) -> list[Moments]:
    return [moments for wave in statistics.reduce(*arguments, **options) for moments in wave]


def moments_of_blocks(model: nn.Module, comm: Communicator, of: MomentsOf) -> list[list[Moments]]:
    """The moments of every block of the unpruned model."""
    mine = spread(TOKENS, comm.rank, comm.size)
    walk = catch_inputs(model, mine.batches)
    found = []
    for index, (_, block) in enumerate(walk.blocks):
        statistics = InputStatistics(linear_layers(block), of, SampleGroup(comm.rank, comm.size))
        with statistics.listening(), walk.block(index) as run:
            for i in range(walk.num_batches):
                statistics.begin_sample(counts=i < mine.num_counted)
                run(i)
        found.append(reduced(statistics, comm))
        walk.advance(index, comm)
    return found


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
@pytest.mark.sampled(10)
def test_every_architecture(architecture: str, of: MomentsOf) -> None:
    model = tiny_model(architecture)
    found = moments_of_blocks(model, Alone(), of)
    blocks = decoder_blocks(model)
    plain = [linears(block) for _, block in blocks]
    for (_, block), of_block in zip(blocks, plain, strict=True):
        for tokens in TOKENS:
            with listening(block, of_block) as given, torch.no_grad():
                model(input_ids=tokens[None], use_cache=False)
            for name, x in given.inputs.items():
                of_block[name].add(x, with_hessian=True)
    for of_block, moments in zip(plain, found, strict=True):
        by_name = {name: m for m in moments for name in m.names}
        assert by_name.keys() == of_block.keys()
        for name, linear in of_block.items():
            assert by_name[name].num_tokens == linear.num_tokens
            if linear.square_sum is None or linear.hessian is None:
                assert not by_name[name].values.any()
                continue
            torch.testing.assert_close(by_name[name].square_sums, linear.square_sum.float(), rtol=1e-5, atol=1e-6)
            if of == "pairs":
                torch.testing.assert_close(by_name[name].values, linear.hessian.float(), rtol=1e-4, atol=1e-4)


SHARED = {
    "llama": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")],
    "phi": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1")],  # attention beside the MLP
    "falcon": [("self_attention.query_key_value", "mlp.dense_h_to_4h")],
    "opt": [("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj")],
    "gpt2": [],
}


@pytest.mark.parametrize("architecture", SHARED)
def test_shared_inputs_are_counted_once(architecture: str) -> None:
    for moments in moments_of_blocks(tiny_model(architecture), Alone(), "features"):
        assert [m.names for m in moments if len(m.names) > 1] == SHARED[architecture]


def on_rank(_: int, architecture: str, of: MomentsOf) -> list[list[Moments]]:
    model = tiny_model(architecture)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for __, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return moments_of_blocks(model, communicator(), of)


@pytest.mark.parametrize(("architecture", "world_size", "of"), pairs_first(SHARDED, [2, 3, 4], KINDS))
@pytest.mark.sampled(3)
def test_same_bits_on_any_number_of_ranks(pool: ProcessPool, world_size: int, architecture: str, of: MomentsOf) -> None:
    wanted = moments_of_blocks(tiny_model(architecture), Alone(), of)
    for rank, found in enumerate(pool.run(world_size, on_rank, architecture, of)):
        for of_block, wanted_of_block in zip(found, wanted, strict=True):
            by_name = {m.names: m for m in of_block}
            assert by_name.keys() == {m.names for m in wanted_of_block}
            for m in wanted_of_block:
                own = by_name[m.names]
                assert own.num_tokens == m.num_tokens
                is_here = own.owner.spread or own.owner.rank == rank
                assert torch.equal(own.values, m.values if is_here else m.values[:0])
                assert of != "features" or torch.equal(own.feature_sums, m.feature_sums)  # type: ignore[arg-type]


def wanda(model: nn.Module, comm: Communicator, pattern: float | NM) -> dict[str, torch.Tensor]:
    """Wanda on a model that is whole on every rank, from the parts of this package."""
    mine = spread(TOKENS, comm.rank, comm.size)
    walk = catch_inputs(model, mine.batches)
    masks: dict[str, torch.Tensor] = {}
    for index, (block_name, block) in enumerate(walk.blocks):
        linears = linear_layers(block)
        statistics = InputStatistics(linears, "features")
        with statistics.listening(), walk.block(index) as run:
            for i in range(walk.num_batches):
                statistics.begin_sample(counts=i < mine.num_counted)
                run(i)
        for moments in reduced(statistics, comm):
            norms = moments.square_sums.sqrt() if moments.num_tokens else torch.ones_like(moments.square_sums)
            for name in moments.names:
                linear = linears[name]
                weight = linear.parameter.detach()[... if linear.expert is None else linear.expert]
                weight = weight.t() if linear.transposed else weight
                scores = weight.abs() * norms
                if isinstance(pattern, NM):
                    keep = keep_highest_per_group(scores, pattern.n, pattern.m)
                else:
                    keep = keep_highest_per_row(scores, round(pattern * linear.num_in))
                weight.mul_(keep)
                masks[f"{block_name}.{name}"] = keep
        walk.advance(index, comm)
    return masks


def wanda_on_rank(_: int, architecture: str, pattern: float | NM) -> dict[str, torch.Tensor]:
    return wanda(tiny_model(architecture), communicator(), pattern)


@pytest.mark.parametrize("pattern", [0.5, NM(2, 4), NM(4, 8), NM(1, 4)], ids=str)
@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
@pytest.mark.sampled(8)
def test_wanda_from_these_parts_is_the_oracle(architecture: str, pattern: float | NM) -> None:
    wanted = prune_model(tiny_model(architecture), TOKENS, "wanda", pattern)
    found = wanda(tiny_model(architecture), Alone(), pattern)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom", "mixtral"])
def test_wanda_with_the_samples_over_ranks(pool: ProcessPool, architecture: str) -> None:
    wanted = wanda(tiny_model(architecture), Alone(), 0.5)
    for world_size in (2, 4):
        for found in pool.run(world_size, wanda_on_rank, architecture, 0.5):
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 64, 65, 130])
def test_one_triangle_travels(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64)
    whole = torch.triu(x.t() @ x)
    whole += whole.triu(1).t()
    assert pack_triangle(whole).shape == (size // 2 + 1, size)
    assert torch.equal(unpack_triangle(pack_triangle(whole)), whole.float())
    lopsided = whole + torch.tril(torch.ones(size, size, dtype=torch.float64), -1)
    assert torch.equal(unpack_triangle(pack_triangle(lopsided)), whole.float())  # the upper one


def pairs_of(x: torch.Tensor, sample_group: SampleGroup, comm: Communicator, owners: list[OwnerRank]) -> list[Moments]:
    with drawing(0):
        block = nn.Sequential(*(nn.Linear(x.shape[1], 2) for _ in owners))
    statistics = InputStatistics(linear_layers(block), "pairs", sample_group, comm)
    with statistics.listening(), torch.no_grad():
        for sample in torch.split(x, 2):
            statistics.begin_sample()
            for linear in block:
                linear(sample.clone())
    return reduced(statistics, comm, lambda *_: owners)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_in", [1, 127, 128, 129, 300])
def test_products_of_many_features(num_in: int, num_ranks: int) -> None:
    """Computed strip by strip, of ranks that share out the features, too. Whole numbers: every sum is exact."""
    owners = [OwnerRank(0, spread=True), OwnerRank(num_ranks - 1), OwnerRank(0)]
    x = torch.randint(-9, 10, (6, num_in), generator=torch.Generator().manual_seed(num_in)).float()

    def of_rank(rank: int) -> list[Moments]:
        return pairs_of(x, SampleGroup(rank=rank, size=num_ranks), communicator(), owners)

    for rank, found in enumerate(run_threads(num_ranks, of_rank)):
        for moments, owner in zip(found, owners, strict=True):
            is_here = owner.spread or owner.rank == rank
            assert torch.equal(moments.values, (x.t() @ x)[: None if is_here else 0])


def many_inputs(rank: int, owners: list[OwnerRank]) -> tuple[int, list[Moments]]:
    """Inputs of 4 features."""
    comm = communicator()
    x = torch.arange(8.0).view(2, 4) + rank
    before = comm.traffic.copy()
    found = pairs_of(x, SampleGroup(rank, 2), comm, owners)
    return (comm.traffic - before).num_rounds, found


@pytest.mark.parametrize(
    ("owners", "num_rounds"), [([OwnerRank(0), *[OwnerRank(1)] * 5], (6, 8)), ([OwnerRank(1, spread=True)] * 6, (5, 7))]
)
def test_large_sums_are_not_all_packed_at_once(
    owners: list[OwnerRank], num_rounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (few, _), (few_too, all_at_once) = run_threads(2, many_inputs, owners)
    monkeypatch.setattr("distprune.calibration.reduction.MESSAGE", 50)  # four inputs of 12 numbers
    (more, _), (more_too, found) = run_threads(2, many_inputs, owners)
    assert (few, more) == (few_too, more_too) == num_rounds
    for one, other in zip(found, all_at_once, strict=True):
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("of", KINDS)
def test_rounds_and_bytes(of: MomentsOf) -> None:
    comm, linear = Alone(), nn.Linear(10, 3, bias=False)
    block = nn.Sequential(linear, nn.Linear(3, 2))
    statistics = InputStatistics(linear_layers(block), of)
    with statistics.listening():
        statistics.begin_sample()
        block(torch.ones(2, 10))
    before = comm.traffic.copy()
    reduced(statistics, comm, lambda inputs, _: [OwnerRank(0, spread=True)] * len(inputs))
    used = comm.traffic - before
    assert used.num_rounds == 5
    numbers = 13 * 2 if of == "features" else 6 * 10 + 2 * 3
    flags = 8 * 3  # whether a rank has failed
    # Who shares, that all are ready, the sums, and whether all is finite.
    assert used.num_bytes == flags + 24 * 2 + 64 + 8 * numbers + 2 * 8


@pytest.mark.parametrize("num_tokens", [300, 0])
def test_squared_output(num_tokens: int) -> None:
    """Of inputs that are far from uncorrelated, since their means are not 0: without these it would be a 20th."""
    torch.manual_seed(0)
    linear = nn.Linear(40, 30, bias=False)
    torch.nn.init.uniform_(linear.weight)
    statistics = InputStatistics({"m": linear_layers(nn.Sequential(linear))["0"]}, "features")
    total = 0.0
    with statistics.listening(), torch.no_grad():
        for _ in range(3 if num_tokens else 0):
            statistics.begin_sample()
            x = torch.ones(num_tokens // 3, 40) + 0.1 * torch.randn(num_tokens // 3, 40)
            total += float(linear(x).square().sum())
    (moments,) = reduced(statistics, Alone())
    weight = linear.weight.detach()
    if num_tokens:
        assert moments.squared_output(weight) == pytest.approx(total, rel=0.01)
        assert float((weight.square() * moments.square_sums).sum()) < total / 20
    else:
        assert moments.squared_output(weight) == pytest.approx(float(weight.square().sum()))


class Twice(nn.Module):
    """Two layers whose inputs are the same tensor or not, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        with drawing(0):
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = "same"

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.as_tensor(self.a(x))
        if self.how == "written":
            x.add_(1)
        if self.how == "twice":
            y = self.a(y)
        return y + torch.as_tensor(self.b(x.clone() if self.how == "copy" else x))


def listen(block: Twice, *hows: str) -> list[Moments]:
    statistics = InputStatistics(linear_layers(block), "features")
    with statistics.listening(), torch.no_grad():
        for how in hows:
            statistics.begin_sample()
            block.how = how
            block(torch.ones(1, 4))
    return reduced(statistics, Alone())


def test_what_is_the_same_input() -> None:
    assert [m.names for m in listen(Twice(), "same", "same")] == [("a", "b")]
    assert [m.names for m in listen(Twice(), "copy")] == [("a",), ("b",)]
    a, b = listen(Twice(), "written")  # the same tensor, with other values
    assert (a.square_sums == 1).all()
    assert (b.square_sums == 4).all()
    with pytest.raises(NotImplementedError, match="'b' has the input of 'a' in one sample and that of 'b' in another"):
        listen(Twice(), "same", "copy")
    with pytest.raises(NotImplementedError, match="'b' has the input of 'a' in some calls and not in others"):
        listen(Twice(), "twice")


def test_samples_that_do_not_count() -> None:
    block = Twice()
    statistics = InputStatistics(linear_layers(block), "features")
    with statistics.listening():
        block(torch.ones(1, 4))  # before any sample
        statistics.begin_sample()
        block(torch.ones(1, 4))
        statistics.begin_sample(counts=False)
        block(torch.ones(1, 4))
    block(torch.ones(1, 4))  # nobody listens
    (moments,) = reduced(statistics, Alone())
    assert moments.num_tokens == 1


def with_nan(rank: int) -> None:
    with drawing(0):
        block = nn.Sequential(nn.Linear(4, 4))
    statistics = InputStatistics(linear_layers(block), "pairs")
    with statistics.listening():
        statistics.begin_sample()
        block(torch.full((1, 4), torch.inf if rank == 1 else 1.0))
    reduced(statistics, communicator())


def test_errors_are_heard_on_all_ranks() -> None:
    for error in run_threads(2, with_nan, catch=True):
        assert isinstance(error, ValueError)
        assert "NaN or Inf in the inputs of '0'" in str(error)


def test_a_part_of_the_features() -> None:
    """As tensor parallelism hands its row-wise layers, on a rank that shares its samples with nobody."""
    block = nn.Sequential(nn.Linear(4, 4))
    statistics = InputStatistics(linear_layers(block), "features")
    block[0].weight = nn.Parameter(torch.ones(4, 2))
    with statistics.listening():
        statistics.begin_sample()
        block(torch.ones(3, 2))
    with pytest.raises(NotImplementedError, match=r"'0' is given Tensor \(3, 2\) where 4 features were expected"):
        reduced(statistics, Alone())


def test_an_expert_without_tokens() -> None:
    model: Any = tiny_model("mixtral")
    block = model.model.layers[0]
    with torch.no_grad():
        block.mlp.gate.weight.zero_()  # all logits tie, so that the first two experts win everywhere
    moments = {name: m for m in moments_of_blocks(model, Alone(), "pairs")[0] for name in m.names}
    counts = [moments[f"mlp.experts.gate_up_proj.{e}"].num_tokens for e in range(4)]
    assert sorted(counts) == [0, 0, TOKENS.numel(), TOKENS.numel()]
    for e in range(4):
        assert bool(moments[f"mlp.experts.down_proj.{e}"].values.any()) == bool(counts[e])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_expert_inputs_are_what_the_eager_experts_multiply(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("mixtral")
    model.set_experts_implementation(implementation)
    found = moments_of_blocks(model, Alone(), "features")[0]
    model.set_experts_implementation("eager")
    experts = model.model.layers[0].mlp.experts
    seen: dict[str, torch.Tensor] = {}

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        for name in ("gate_up_proj", "down_proj"):
            if weight._base is getattr(experts, name):
                key = f"mlp.experts.{name}.{weight.storage_offset() // weight.numel()}"
                seen[key] = seen.get(key, torch.zeros(())) + x.double().square().sum(0)
        return plain_linear(x, weight, bias)

    plain_linear = F.linear
    monkeypatch.setattr(F, "linear", linear)
    with torch.no_grad():
        for tokens in TOKENS:
            model(input_ids=tokens[None], use_cache=False)
    by_name = {name: m for m in found for name in m.names if ".experts." in name}
    assert {name for name, m in by_name.items() if m.num_tokens} == seen.keys()
    for name, square_sum in seen.items():
        torch.testing.assert_close(by_name[name].square_sums, square_sum.float(), rtol=1e-5, atol=1e-6)
