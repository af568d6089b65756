"""What a plan says of a walk, beside what one takes, and of walks that nobody here can run."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from distprune.calibration import routed_tokens
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.data import spread
from distprune.calibration.moments import Moments
from distprune.calibration.order import learn_order
from distprune.calibration.statistics import InputStatistics
from distprune.collectives.agree import sum_together, swap_known
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.oneshot import block, channel_order, moved_rows, room
from distprune.oneshot.block_layers import copies_of
from distprune.oneshot.memory_plan import (
    BEFORE,
    BLOCK,
    DENSE,
    GATHER,
    MESSAGES,
    MOMENTS,
    ORDER,
    ROWS,
    STREAMS,
    SUMS,
    TOKENS,
    WAVES,
    WEIGHTS,
    MemoryPlan,
    fitted,
    plan_walk,
)
from distprune.oneshot.model_shape import shape_of
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.walk_costs import BlockShape, InputShape, ModelShape, WalkRequest
from distprune.patterns.n_by_m import NByM
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.device_path import as_on_a_device
from tests.oneshot.alike import sharded
from tests.oneshot.test_tensor_parallel import wrapped
from tests.worlds import ProcessPool, run_threads

NUM_EXPERTS, WIDTH, LENGTH = 8, 16, 16
SIZE = 8 * WIDTH**2  # bytes of X^T X


def mixture() -> Any:
    """A model in which every token goes to every expert: so many of each as the plan takes them to be."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return tiny_model("mixtral", num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_EXPERTS, **sizes)


def asked(num_ranks: int, method: str, *, at_once: int = NUM_EXPERTS) -> WalkRequest:
    is_admm = method == "admm"
    memory = at_once * SIZE * (2 if is_admm else 1)
    options: dict[str, Any] = {"by_row": True, "by_layer": is_admm, "has_targets": is_admm, "pairs": method != "wanda"}
    return WalkRequest(num_ranks, 4, LENGTH, method, expert_memory=memory, **options)


class Seen:
    """What one rank has in memory, at its most, and what it sends and is sent; by the plan's parts."""

    def __init__(self) -> None:
        self.memory, self.sent, self.arriving = Counter[str](), Counter[str](), Counter[str]()
        self.sums = MESSAGES  # what sums are for

    def has(self, name: str, num_bytes: int) -> None:
        self.memory[name] = max(self.memory[name], num_bytes)


def seen_of(patch: pytest.MonkeyPatch) -> Callable[[Communicator | None], Seen]:
    """Note what ranks, which are threads, have in memory and tell each other, and return what gives a rank's."""
    by_rank: dict[int, Seen] = {}

    def own(comm: Communicator | None = None) -> Seen:
        return by_rank.setdefault((comm or communicator()).rank, Seen())

    run, reduced = block._BlockPruner._run, block._BlockPruner._reduced
    permute, reduce_ = block._BlockPruner._permute, Communicator.reduce_

    def running(self: Any, *arguments: Any) -> InputStatistics:
        found, walk = run(self, *arguments), self.walk
        calls = [part for call in walk.calls for part in call[0].kwargs["position_embeddings"]]
        own(self.comm).has(STREAMS, sum(of.nbytes for of in (*walk.hidden, *walk.dense, *calls)))
        kept = [] if found.targets is None else found.targets.samples
        own(self.comm).has(DENSE, sum(of.num_bytes for of in kept))
        sums = [part for of in found._sums.values() for part in of.parts.values()]
        own(self.comm).has(SUMS, sum(part.nbytes for part in sums))
        tokens = [part for of in found._tokens.values() for each in of for part in each.tensors]
        own(self.comm).has(TOKENS, sum(part.nbytes for part in tokens))
        return found

    def reducing(self: Any, statistics: InputStatistics, *arguments: Any) -> Iterator[list[Moments]]:
        routed = {name for name, linear in statistics.linears.items() if linear.is_routed}
        for moments in reduced(self, statistics, *arguments):
            of_experts = [m for m in moments if not routed.isdisjoint(m.names)]
            tensors = [of for m in moments for of in (m.values, m.feature_sums, m.shift, *m.residuals.values())]
            num_bytes = sum(of.nbytes for of in tensors if of is not None)
            own(self.comm).has(MOMENTS, num_bytes)
            if of_experts and statistics.of == "pairs":
                own(self.comm).has(WAVES, 2 * num_bytes)  # float64 before
            yield moments

    def summing(self: Communicator, values: torch.Tensor, op: Any = "sum", rank: int | None = None) -> None:
        seen = own(self)
        if op == "sum" and sys._getframe(1).f_code.co_name != "reduce_together":  # its messages are small
            seen.sent[seen.sums] += values.nbytes
            seen.arriving[seen.sums] += values.nbytes if rank in (None, self.rank) else 0
        reduce_(self, values, op, rank)

    def permuting(self: Any, *arguments: Any) -> None:
        own(self.comm).sums = ORDER
        permute(self, *arguments)
        own(self.comm).sums = MESSAGES

    def summing_words(comm: Communicator, shape: Sequence[int], *arguments: Any) -> torch.Tensor:
        own(comm).sent[ORDER] += 8 * math.prod(shape)
        own(comm).arriving[ORDER] += 8 * math.prod(shape)
        return sum_together(comm, shape, *arguments)

    def swapping(name: str, swap: Any) -> Any:
        def swapped(comm: Communicator, make: Any, sizes: Any, *arguments: Any) -> Any:
            own(comm).sent[name] += sum(sizes[0]) - sizes[0][comm.rank]
            own(comm).arriving[name] += sum(sizes[1]) - sizes[1][comm.rank]
            return swap(comm, make, sizes, *arguments)

        return swapped

    patch.setattr(block._BlockPruner, "_run", running)
    patch.setattr(block._BlockPruner, "_reduced", reducing)
    patch.setattr(block._BlockPruner, "_permute", permuting)
    patch.setattr(Communicator, "reduce_", summing)
    patch.setattr(routed_tokens, "swap_known", swapping(TOKENS, swap_known))
    patch.setattr(moved_rows, "swap_known", swapping(ROWS, swap_known))
    patch.setattr(channel_order, "sum_together", summing_words)
    patch.setattr(import_module("distprune.shards.select"), "swap_known", swapping(ORDER, swap_known))
    return own


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("method", "at_once"), [("admm", 8), ("admm", 1), ("sparsegpt", 3), ("wanda", 8), ("permuted admm", 8)]
)
@pytest.mark.sampled(5)
def test_a_plan_is_what_a_walk_takes(
    num_ranks: int, method: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the rank that has the most, and all that is sent, to the byte, but for what ranks agree on."""
    *permuted, method = method.split()
    make, permute = (partial(tiny_model, "llama", num_hidden_layers=1), "channels") if permuted else (mixture, "none")
    question = replace(asked(num_ranks, method, at_once=at_once), permutes=NByM(2, 4) if permuted else None)
    plan = plan_walk(shape_of(make()), question).parts
    seen = seen_of(monkeypatch)

    def on_rank(_: int) -> tuple[Seen, int]:
        model = sharded(make())
        memory = question.expert_memory
        how: dict[str, Any] = {"method": method, "pattern": "2:4", "refit": "none", "permute": permute}
        report = prune_blocks(model, samples(4, LENGTH), **how, expert_memory=memory, batch_tokens=1)
        return seen(None), report.blocks[0].num_bytes

    found = run_threads(num_ranks, on_rank)
    for name in (STREAMS, DENSE, SUMS, TOKENS, MOMENTS, WAVES):
        most = max(of.memory[name] for of, _ in found)
        assert most == (plan[name].device if name in plan else 0), name
    for name in (MESSAGES, TOKENS, ROWS, ORDER):
        if name in plan:
            near = 0.15 if name == ORDER else 0.0  # how many channels go to other ranks depends on the weights
            assert max(of.sent[name] for of, _ in found) == pytest.approx(plan[name].sent, rel=near, abs=0), name
            assert max(of.arriving[name] for of, _ in found) == pytest.approx(plan[name].arriving, rel=near, abs=0), (
                name
            )
    large = sum(plan[name].sent for name in (MESSAGES, TOKENS, ROWS, ORDER) if name in plan)
    assert all(large <= num_bytes < large + 30_000 for _, num_bytes in found), (large, found[0][1])


def on_rank_of(_: int, layout: str) -> tuple[Counter[str], MemoryPlan]:
    """Return what this rank has in memory, and the plan by which ``prune_blocks`` looks for room."""
    model: Any = wrapped(layout, "llama") if "tp" in layout else sharded(tiny_model("llama"), (2, 1))
    plans: list[MemoryPlan] = []

    def planning(*arguments: Any) -> MemoryPlan:
        plans.append(plan_walk(*arguments))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch, as_on_a_device():
        seen = seen_of(patch)

        def copying(of_block: Any) -> dict[str, torch.Tensor]:
            found = copies_of(of_block)
            seen(None).has(BEFORE, sum(of.nbytes for of in found.values()))
            return found

        patch.setattr(block, "copies_of", copying)
        patch.setattr(room, "plan_walk", planning)
        prune_blocks(model, samples(4, LENGTH), method="admm", pattern="2:4")
    return seen(None).memory, plans[0]


@pytest.mark.parametrize(("num_ranks", "layout"), [(2, "tp"), (4, "fsdp-tp"), (2, "replicas")])
def test_room_is_looked_for_by_what_ranks_share(num_ranks: int, layout: str, pool: ProcessPool) -> None:
    """Ranks of a tensor-parallel group run the same samples and sum their own features; replicas are not shared out."""
    found = pool.run(num_ranks, on_rank_of, layout)
    for name in (STREAMS, DENSE, SUMS, BEFORE):
        exact = 0.02 if name == BEFORE else 0.0  # norms are whole on each rank
        most = max(of[name] for of, _ in found)
        assert [plan.parts[name].device for _, plan in found] == [pytest.approx(most, rel=exact, abs=0)] * num_ranks, (
            name
        )
    gathers = layout == "fsdp-tp"
    assert all((plan.parts[BLOCK].device > 0) == gathers for _, plan in found)


@pytest.mark.parametrize("free", [1 << 10, 1 << 40, None])
def test_a_walk_without_room_on_a_device_is_refused(free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, by the one that has too little; on the host, or where nobody knows, it is not."""

    monkeypatch.setattr(room, "available_bytes", lambda _: free if communicator().rank else 1 << 40)

    def on_rank(_: int) -> None:
        prune_blocks(
            sharded(tiny_model("llama", num_hidden_layers=1)), samples(4, LENGTH), method="admm", pattern="2:4"
        )

    with as_on_a_device():
        found = run_threads(2, on_rank, catch=True)
    if free == 1 << 10:
        assert all(isinstance(error, ValueError) and "free on the device" in str(error) for error in found)
        found = run_threads(2, on_rank)
    assert not any(isinstance(of, Exception) for of in found)


@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
def test_layers_add_to_hidden_states_as_the_rule_has_it(architecture: str) -> None:
    model = tiny_model(architecture)
    _, of_block = decoder_blocks(model)[0]
    linears = linear_layers(of_block)
    order = learn_order(Alone(), catch_inputs(model, spread(samples(1), 0, 1).batches), 0, linears)
    shape = shape_of(model).blocks[0]
    adding = sorted((linears[name].num_in, linears[name].num_out) for name in order.adding)
    assert sorted((of.num_in, of.num_out) for of in shape.inputs if of.adds) == adding
    assert sum(of.num * of.num_layers for of in shape.inputs) == len(linears)
    weights = sum(linear.num_in * linear.num_out for linear in linears.values())
    assert sum(of.num * of.num_in * of.num_out for of in shape.inputs) == weights


def large_mixture() -> ModelShape:
    """256 experts in each of 60 blocks, in bfloat16."""
    inputs = (
        InputShape(7168, 7168 + 2048, 3),
        InputShape(7168, 7168, adds=True),
        InputShape(7168, 4096, num_experts=256, share=8 / 256),
        InputShape(2048, 7168, num_experts=256, share=8 / 256),
    )
    size = 2 * sum(of.num_in * of.num_out * of.num for of in inputs)
    return ModelShape((BlockShape(inputs, size),) * 60, 60 * size, 7168, 2, 256)


def of_large(num_ranks: int, **changes: Any) -> MemoryPlan:
    options: dict[str, Any] = {"pairs": True, "by_row": True, "by_layer": True, "has_targets": True} | changes
    return plan_walk(large_mixture(), WalkRequest(num_ranks, 128, 2048, "admm", **options))


def test_a_mixture_fits_the_budget_and_what_arrives_falls() -> None:
    plans = {num_ranks: of_large(num_ranks) for num_ranks in (8, 64, 256)}
    sums = 256 * 16 * (7168**2 + 2048**2)  # of all experts, with the shift
    arriving = []
    for num_ranks, plan in plans.items():
        parts = plan.parts
        assert parts[WAVES].device <= 4 << 30 < sums / 8
        assert 2 * parts[MOMENTS].device <= 4 << 30
        assert parts[SUMS].device < 1 << 30
        tokens = 2 * 262_144 * 8 * (2 * (7168 + 2048) + 1)  # dense ones, too, and which these are
        assert 0 < parts[TOKENS].arriving <= 60 * tokens / num_ranks
        arriving.append(sum(cost.arriving for name, cost in parts.items() if name != BLOCK))
        always = sum(parts[name].device for name in (WEIGHTS, STREAMS, DENSE))
        assert plan.most.device >= always + parts[BLOCK].device + parts[GATHER].device
        assert plan.most.device >= always + parts[TOKENS].device + parts[WAVES].device
    assert arriving[0] > 3 * arriving[1] > 3 * arriving[2]
    assert of_large(8, by_layer=False).parts[WAVES].device <= 4 << 30
    assert of_large(64, expert_memory=1).parts[WAVES].device == 16 * 7168**2  # one expert
    offloaded = of_large(8, offload=True).parts
    assert offloaded[TOKENS].host == plans[8].parts[TOKENS].device > 0 == offloaded[TOKENS].device


def test_waves_get_smaller_until_the_walk_fits() -> None:
    question = WalkRequest(8, 128, 2048, "admm", pairs=True, by_row=True, by_layer=True, has_targets=True)
    model = replace(large_mixture(), num_bytes=0)
    blocks = tuple(replace(of, num_bytes=0) for of in model.blocks)
    model = replace(model, blocks=blocks)  # where waves are what is largest
    most = plan_walk(model, question)
    whole = most.most.device
    assert {WAVES, TOKENS, STREAMS, DENSE} <= most.device_parts.keys()

    def fits(limit: float) -> Callable[[MemoryPlan], bool]:
        return lambda plan: plan.most.device <= limit

    same, plan = fitted(model, question, fits(whole))
    assert same == question
    less, plan = fitted(model, question, fits(whole - (1 << 30)))
    assert question.expert_memory > less.expert_memory >= 1 << 30
    assert plan == plan_walk(model, less)
    assert plan.most.device <= whole - (1 << 30)
    least, plan = fitted(model, question, fits(0))
    assert least.expert_memory == 1
    assert plan.parts[WAVES].device == 16 * 7168**2


def test_one_rank_sends_nothing() -> None:
    parts: Mapping[str, Any] = of_large(1).parts
    assert not any(cost.sent or cost.arriving for cost in parts.values())
    assert parts[BLOCK].device == 0
