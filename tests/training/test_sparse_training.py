"""Sparse training over ranks is that of one process with the whole batch: the same masks, the same losses."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.optimization import Adafactor

import distprune as prune
from distprune.shards.layouts import local_of
from distprune.training.hold import hold_zeros
from distprune.training.regrowth import Regrow
from distprune.training.schedules import at_once, constant, cubic, stepwise
from distprune.training.sparse_training import SparseTraining
from tests.sampling import only_whole
from tests.training.optimizers import INCLUDE, OTHERS, TORCHS, UNABLE, check_moments, make_optimizer
from tests.worlds import ProcessPool
from tests.wrapped import Wrapped, batches, pairs_of, transformer, whole, wrap

NUM_STEPS = 6
NUM_ELEMENTS = sum(module.get_parameter(name).numel() for module, name in pairs_of(transformer()))
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"schedule": constant(0.5)},
    "cubic": {"schedule": cubic(0.8, stop=4, every=2)},
    "taylor": {"schedule": cubic(0.8, stop=4, every=2), "score": "taylor"},
    "movement": {"schedule": at_once(0.5, step=4), "score": "movement", "scope": "tensor"},
    "2:4": {"schedule": at_once(0.5, step=2), "pattern": "2:4", "exclude": "*.down.weight"},
    "rigl": {"schedule": constant(0.8), "regrow": Regrow(stop=6, every=2, by="gradient")},
    "set": {"schedule": constant(0.8), "regrow": Regrow(stop=6, every=2, by="random")},
}
# Torch clips the norm of parameters that are all laid out alike; FSDP1's own clipping sees dense gradients.
CLIPPED = ("plain", "ddp", "fsdp2", "hsdp")


def step(optimizer: torch.optim.Optimizer, wrapped: Wrapped, tokens: torch.Tensor, *, clips: bool) -> float:
    """Train one step, and return the loss of the whole batch."""
    loss = wrapped.step(tokens) / wrapped.num_data_ranks
    if clips:
        nn.utils.clip_grad_norm_(wrapped.model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if wrapped.num_data_ranks > 1:
        dist.all_reduce(loss)
        loss *= wrapped.num_data_ranks / dist.get_world_size()
    return float(loss)


def started(layout: str, kind: str) -> tuple[Wrapped, torch.optim.Optimizer, SparseTraining]:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    return wrapped, optimizer, SparseTraining(wrapped.model, optimizer, **{"include": INCLUDE, **KINDS[kind]})


def held(model: nn.Module) -> list[torch.Tensor]:
    """Return where weights are held, whole: the bits of +0.0."""
    return [(whole(module.get_parameter(name)).view(torch.int32) == 0) for module, name in pairs_of(model)]


def train_on_rank(_: int, layout: str, kind: str, clips: bool) -> tuple[list[float], list[int], list[torch.Tensor]]:
    wrapped, optimizer, training = started(layout, kind)
    losses = [step(optimizer, wrapped, tokens, clips=clips) for tokens in batches(NUM_STEPS)]
    assert check_moments(optimizer, wrapped.model) > 0  # also where weights have moved
    with FullyShardedDataParallel.summon_full_params(wrapped.model, writeback=False):  # nothing, elsewhere
        return losses, [update.num_zeros for update in training.updates], held(wrapped.model)


@functools.cache
def alone(pool: ProcessPool, kind: str, clips: bool) -> tuple[list[float], list[int], list[torch.Tensor]]:
    return pool.run(1, train_on_rank, "plain", kind, clips)[0]  # type: ignore[no-any-return]


# Some of these run by default: every layout, and every kind in one of them. What grows has no gradient yet, though
# FSDP1's are masked at the step alone.
LAYOUTS = {
    ("ddp", 2): ("cubic",),
    ("fsdp2", 1): (),
    ("fsdp2", 2): tuple(KINDS),
    ("fsdp2", 4): (),
    ("hsdp", 4): ("rigl",),
    ("fsdp1", 2): ("set",),
    ("tp", 2): ("rigl",),
    ("fsdp-tp", 4): ("cubic",),
}


@pytest.mark.parametrize(
    ("layout", "num_ranks", "kind"),
    [
        pytest.param(*of, kind, marks=() if kind in by_default else pytest.mark.whole)
        for of, by_default in LAYOUTS.items()
        for kind in KINDS
    ],
)
@pytest.mark.sampled(5)
def test_equals_one_process(pool: ProcessPool, layout: str, num_ranks: int, kind: str) -> None:
    clips = layout in CLIPPED
    expected = alone(pool, kind, clips)
    for losses, num_zeros, masks in pool.run(num_ranks, train_on_rank, layout, kind, clips):
        assert losses == pytest.approx(expected[0], abs=1e-6)
        assert num_zeros == expected[1]
        for mask, of_one in zip(masks, expected[2], strict=True):
            assert torch.equal(mask, of_one)
    schedule = KINDS[kind]["schedule"]
    if kind == "cubic":
        assert expected[1] == [round(schedule(step) * NUM_ELEMENTS) for step in range(2, 5, 2)]


def test_equals_reparametrized() -> None:
    """The losses are those of torch.nn.utils.prune on one process, clipping included."""
    losses = []
    for reparametrizes in (True, False):
        model = transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if reparametrizes:
            torch_prune.global_unstructured(pairs_of(model), torch_prune.L1Unstructured, amount=0.5)
        else:
            prune.prune_model(model, 0.5, include=INCLUDE)
            hold_zeros(model, optimizer, include=INCLUDE)
        losses.append([step(optimizer, Wrapped(model, 0, 1), tokens, clips=True) for tokens in batches(NUM_STEPS)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_an_optimizer_that_chooses_its_rate() -> None:
    model = nn.Linear(8, 8)
    optimizer = Adafactor(model.parameters())  # its learning rate is None
    training = prune.SparseTraining(model, optimizer, schedule=prune.constant(0.5))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert training.step == 1
    assert prune.sparsity(model) == 0.5


def test_a_step_that_is_set() -> None:
    """As a trainer does that goes on from a dense checkpoint: to move weights, all gradients are needed."""
    wrapped, optimizer, training = started("plain", "rigl")
    step(optimizer, wrapped, batches(1)[0], clips=False)
    assert sum(held.zeros.nbytes for held in training.hold._binding.held) == NUM_ELEMENTS  # a byte a weight
    for number, moves in ((2, True), (3, False), (4, True)):
        training.step = number
        wrapped.step(batches(1)[0])
        masked = []
        for module, name in pairs_of(wrapped.model):
            weight = module.get_parameter(name)
            assert weight.grad is not None
            masked.append(not weight.grad[weight.view(torch.int32) == 0].any())
        assert not any(masked) if moves else all(masked)
        wrapped.model.zero_grad()


@pytest.mark.parametrize("kind", ["taylor", "rigl"])
def test_gradients_of_a_closure(kind: str) -> None:
    """A step that computes its gradients within, as Lightning's steps do, is one that is given them."""
    results = []
    for in_closure in (False, True):
        wrapped, optimizer, _ = started("plain", kind)
        for tokens in batches(NUM_STEPS):

            def closure(wrapped: Wrapped = wrapped, tokens: torch.Tensor = tokens) -> float:
                wrapped.model.zero_grad()
                return float(wrapped.step(tokens))

            if in_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        moments = [optimizer.state[parameter]["exp_avg"] for parameter in wrapped.model.parameters()]
        results.append([*wrapped.model.parameters(), *moments])
    assert all(map(torch.equal, *results))


def train_and_save(_: int, kind: str, folder: str) -> list[float]:
    wrapped, optimizer, training = started("fsdp2", kind)
    assert isinstance(training, Stateful)
    losses = []
    for i, tokens in enumerate(batches(NUM_STEPS)):
        if i == NUM_STEPS // 2:
            weights, of_optimizer = get_state_dict(wrapped.model, optimizer)
            save({"model": weights, "optimizer": of_optimizer, "training": training}, checkpoint_id=folder)
        losses.append(step(optimizer, wrapped, tokens, clips=True))
    return losses


def load_and_train(_: int, kind: str, folder: str) -> tuple[list[float], list[torch.Tensor]]:
    wrapped, optimizer, training = started("fsdp2", kind)
    weights, of_optimizer = get_state_dict(wrapped.model, optimizer)  # it steps the optimizer once, at rate 0
    assert training.step == 0
    load({"model": weights, "optimizer": of_optimizer, "training": training}, checkpoint_id=folder)
    set_state_dict(wrapped.model, optimizer, model_state_dict=weights, optim_state_dict=of_optimizer)
    assert training.step == NUM_STEPS // 2
    left = batches(NUM_STEPS)[NUM_STEPS // 2 :]
    losses = [step(optimizer, wrapped, tokens, clips=True) for tokens in left]
    return losses, held(wrapped.model)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("cubic", (2,)),
        ("rigl", (4,)),
        ("movement", (4,)),  # its sums are taken along
        *(only_whole(kind, (1, 2, 4)) for kind in ("fixed", "cubic", "rigl", "movement")),
    ],
)
@pytest.mark.sampled(1)
def test_resumes(pool: ProcessPool, tmp_path: Path, kind: str, sizes: tuple[int, ...]) -> None:
    losses = pool.run(2, train_and_save, kind, str(tmp_path / kind))[0][NUM_STEPS // 2 :]
    for num_ranks in sizes:
        for resumed, masks in pool.run(num_ranks, load_and_train, kind, str(tmp_path / kind)):
            assert resumed == (losses if num_ranks == 2 else pytest.approx(losses, abs=1e-6))
            assert all(map(torch.equal, masks, alone(pool, kind, True)[2]))


def other_sums_on_rank(_: int) -> None:
    wrapped, optimizer, training = started("fsdp2", "movement")
    step(optimizer, wrapped, batches(1)[0], clips=False)
    state = training.state_dict()
    training.load_state_dict(state)  # in place
    before = [local_of(total).clone() for total in state["movement"].values()]
    with pytest.raises(ValueError, match="may be another rank's part of it"):
        training.load_state_dict(copy.deepcopy(state))
    with pytest.raises(ValueError, match="sums of movement of other parameters"):
        training.load_state_dict({**state, "movement": {}})
    for broken in ({}, {"movement": {name: total * 2 for name, total in state["movement"].items()}}):
        with pytest.raises(KeyError, match="step"):
            training.load_state_dict(broken)
    assert all(bool(local_of(total).any()) for total in state["movement"].values())
    assert all(map(torch.equal, map(local_of, training.state_dict()["movement"].values()), before))
    with pytest.warns(UserWarning, match="no sums of movement: they begin anew"):
        training.load_state_dict({"step": 1})
    assert not any(bool(local_of(total).any()) for total in training.state_dict()["movement"].values())


def test_sums_of_movement_that_are_missing_or_of_others(pool: ProcessPool) -> None:
    pool.run(2, other_sums_on_rank)


def _several(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-2, fused=True)]


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("name", ["several", *(each for each in [*TORCHS, *OTHERS] if each not in UNABLE["plain"])])
@pytest.mark.sampled(12)
def test_no_step_where_gradients_choose(name: str, scales: bool) -> None:
    """Whatever the optimizer, and its moments: what does not move stays as it is, and gradients are left."""
    model, regrow = transformer(), Regrow(stop=10, every=2, by="gradient")
    wrapped = Wrapped(model, 0, 1)
    optimizers = _several(model) if name == "several" else [make_optimizer(name, model)]
    training = SparseTraining(model, optimizers, schedule=constant(0.5), regrow=regrow, include=INCLUDE)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for number, tokens in enumerate(batches(4)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if isinstance(optimizers[0], torch.optim.LBFGS):
            optimizers[0].step(lambda tokens=tokens: float(wrapped.step(tokens)))  # type: ignore[no-untyped-call]
        else:
            wrapped.step(tokens, scale=scaler.get_scale() if scales else 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer) if scales else optimizer.step()
        scaler.update() if scales and name != "LBFGS" else None
        stay = [
            torch.equal(now[both], then[both])
            for now, then in zip(model.parameters(), before, strict=True)
            for both in [(now != 0) & (then != 0)]
        ]
        assert all(stay) if number == 2 else not all(stay)
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert [update.num_moved > 0 for update in training.updates] == [False, True]


@pytest.mark.parametrize("score", ["movement", "taylor"])
def test_steps_that_a_scaler_skips(score: str) -> None:
    """A fused optimizer divides gradients and skips steps by itself: it comes to what others come to.

    Its steps that change no zeros count, too.
    """
    results: list[tuple[int, list[torch.Tensor], dict[str, torch.Tensor]]] = []
    for fused in (False, True):
        model = transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        schedule = at_once(0.5, step=4 if fused else 3)
        training = SparseTraining(model, optimizer, schedule=schedule, score=score, include=INCLUDE)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        for i, tokens in enumerate(batches(7)):  # it overflows at the first step, and where weights are pruned
            Wrapped(model, 0, 1).step(tokens, scale=float("inf") if i in (0, 4) else scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((training.step, held(model), training._movement))
    (steps, masks, sums), (of_fused, other_masks, other_sums) = results
    assert (steps, of_fused) == (5, 6)
    assert all(map(torch.equal, masks, other_masks))
    assert all(torch.allclose(total, other_sums[name], rtol=1e-4, atol=1e-6) for name, total in sums.items())


def overflows_on_rank(rank: int) -> tuple[int, list[int]]:
    """Train a stage of a pipeline whose last rank alone overflows: as nothing changes, and where weights are pruned."""
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    training = SparseTraining(model, optimizer, schedule=stepwise({1: 0.3, 3: 0.5}))
    scaler = torch.amp.GradScaler("cpu")
    for i in range(6):
        loss = model[f"stage{rank}"](torch.ones(8)).sum()
        (scaler.scale(loss) * (float("inf") if rank and i in (0, 3) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return training.step, [update.step for update in training.updates]


def test_a_step_that_one_rank_skips(pool: ProcessPool) -> None:
    assert pool.run(2, overflows_on_rank) == [(5, [1, 3])] * 2


def test_report(tmp_path: Path) -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = SparseTraining(model, optimizer, schedule=stepwise({1: 0.3, 4: 0.5}), regrow=Regrow(stop=7, every=5))
    assert str(training.report()) == "0 steps, 0 updates, 0.0 % of the weights are zero"
    losses = []
    for _ in range(6):
        loss = model(torch.ones(2, 10)).square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    report = training.report()
    num_moved = report.updates[-1].num_moved
    assert str(report).splitlines() == [
        "6 steps, 3 updates, 50.0 % of the weights are zero",
        "  step        1   30.0 %",
        "  step        4   50.0 %",
        f"  step        5   50.0 %, {num_moved} moved",
    ]
    pytest.importorskip("matplotlib")
    sparsity, loss = report.draw(tmp_path / "training.png", losses=losses).axes
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"training\.pdf is no name of a picture"):
        report.draw(tmp_path / "training.pdf")
    drawn = sparsity.lines[0].get_xydata().tolist()
    assert drawn == [[0, 0], [1, 0.3], [4, 0.5], [5, 0.5], [6, 0.5]]
    assert loss.lines[0].get_ydata().tolist() == losses


def natural_zeros_on_rank(_: int, layout: str) -> None:
    model = transformer()
    for i in range(2):
        nn.init.eye_(model.get_parameter(f"layers.{i}.up.weight"))
    wrapped = wrap(layout, model)
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.5)
    training = SparseTraining(wrapped.model, optimizer, schedule=at_once(0.3, step=2), include=INCLUDE)
    for i, tokens in enumerate(batches(4)):
        zeros = prune.sparsity(wrapped.model, include="*.up.weight")
        assert zeros > 0.9 if i == 0 else zeros < 0.1 if i < 3 else zeros > 0.1
        assert training.hold.counts().sparsity == (0.3 if i == 3 else 0)
        step(optimizer, wrapped, tokens, clips=False)
    assert training.hold.counts().sparsity == prune.sparsity(wrapped.model, include=INCLUDE)


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp-tp"])
@pytest.mark.sampled(3)
def test_before_its_schedule_starts_nothing_is_held(pool: ProcessPool, layout: str) -> None:
    pool.run({"plain": 1, "hsdp": 4, "fsdp-tp": 4}.get(layout, 2), natural_zeros_on_rank, layout)
