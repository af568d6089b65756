"""Straight-through training in every layout is the plain loop of one process, to the bit."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.func import functional_call
from typing_extensions import override

import distprune as prune
from distprune.collectives.communicator import ProcessGroup
from distprune.models.find_shards import find_shards
from distprune.patterns.as_pattern import as_pattern
from distprune.patterns.base import Pattern
from distprune.shards.local_shard import bits_of
from distprune.training.straight_through import StraightThrough
from tests.pattern_oracle import keep_in_pattern
from tests.sampling import only_whole
from tests.training.exact import NUM_STEPS, Exact, Layers, Weights, backward, check, inputs, sgd, step, weights
from tests.worlds import ProcessPool, drawing, run_threads
from tests.wrapped import PRUNED, Wrapped, wrap

INCLUDE = [f"*.{name}.weight" for name in PRUNED]
KINDS: dict[str, dict[str, Any]] = {
    "2:4": {"decay": 0.25},
    "plain": {"decay": 0.0},
    "every": {"decay": 0.25, "every": 3},
    "row": {"decay": 0.25, "pattern": prune.PerRow(0.6)},
    "unstructured": {"decay": 0.25, "pattern": prune.Unstructured(0.7)},
    "block": {"decay": 0.25, "pattern": prune.Block(2, 0.5, "tensor")},
}


def masks_of(pattern: Pattern, latent: Weights) -> Weights:
    everything = [torch.ones_like(weight, dtype=torch.bool) for weight in latent.values()]
    kept = keep_in_pattern(pattern, [*latent], [*latent.values()], everything, zeros="in")
    return dict(zip(latent, kept, strict=True))


@functools.cache
def plain_loop(kind: str, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> list[Weights]:
    """Return the pruned weights at first and after each step (arXiv 2102.04010, section 3)."""
    options = {"pattern": "2:4", "every": 1, **KINDS[kind]}
    pattern, model = as_pattern(options["pattern"]), Exact()
    latent = {n: p.detach().clone() for n, p in model.named_parameters() if n.split("layers.")[1][2:-7] in PRUNED}
    others = [p for name, p in model.named_parameters() if name not in latent]
    optimizer = make([*latent.values(), *others])
    masks = masks_of(pattern, latent)
    after = [{name: weight * masks[name] for name, weight in latent.items()}]
    for number, x in enumerate(inputs(), 1):
        pruned = {name: weight.requires_grad_() for name, weight in after[-1].items()}
        functional_call(model, pruned, x).backward()
        for name, weight in latent.items():
            weight.grad = pruned[name].grad + options["decay"] * (~masks[name] * weight)
        optimizer.step()
        optimizer.zero_grad()
        if number % options["every"] == 0:
            masks = masks_of(pattern, latent)
        after.append({name: weight * masks[name] for name, weight in latent.items()})
    return [{name: weight.detach() for name, weight in of_step.items()} for of_step in after]


def started(
    layout: str, kind: str, make: Callable[[Any], torch.optim.Optimizer] = sgd
) -> tuple[Wrapped, torch.optim.Optimizer, StraightThrough]:
    wrapped = wrap(layout, cast(Any, Exact()))
    optimizer = make(wrapped.model.parameters())
    return wrapped, optimizer, StraightThrough(wrapped.model, optimizer, include=INCLUDE, **KINDS[kind])


def train_on_rank(_: int, layout: str, kind: str) -> list[Weights]:
    wrapped, optimizer, training = started(layout, kind)
    found = [weights(wrapped.model)]
    for x in inputs():
        step(wrapped, optimizer, x)
        found.append(weights(wrapped.model))
        for shard in find_shards(wrapped.model, INCLUDE).shards:
            is_pruned = bits_of(training._aside[shard.name]) != 0
            assert shard.local.numel() == 0 or is_pruned.any()
            assert not bits_of(shard.local)[is_pruned].any()
    training.finish()
    return found


# Every layout by default, and every kind in one of them. Groups of four are cut in down and o of tp.
LAYOUTS = {
    ("plain", 1): (),
    ("ddp", 2): ("2:4",),
    ("fsdp1", 2): ("2:4",),
    ("fsdp2", 1): (),
    ("fsdp2", 2): tuple(KINDS),
    ("fsdp2", 4): ("2:4",),
    ("columns", 2): (),
    ("offload", 2): (),
    ("hsdp", 4): ("2:4",),
    ("tp", 2): ("2:4",),
    ("fsdp-tp", 4): (),
}


@pytest.mark.parametrize(
    ("layout", "num_ranks", "kind"),
    [
        (*of, kind) if kind in by_default else only_whole(*of, kind)
        for of, by_default in LAYOUTS.items()
        for kind in KINDS
    ],
)
def test_is_the_plain_loop(pool: ProcessPool, layout: str, num_ranks: int, kind: str) -> None:
    expected = plain_loop(kind)
    came_back = [
        any((now[name] != 0)[before[name] == 0].any() for name in now) for before, now in itertools.pairwise(expected)
    ]
    assert came_back[1:] == ([False, True, False] if kind == "every" else [True] * (NUM_STEPS - 1))
    for found in pool.run(num_ranks, train_on_rank, layout, kind):
        for got, wanted in zip(found, expected, strict=True):
            check(got, wanted)


_adamw = functools.partial(torch.optim.AdamW, lr=0.5, weight_decay=0.5)
_fused = functools.partial(torch.optim.AdamW, lr=0.5, fused=True)


class _Both:
    """Two optimizers, of which each steps some of the weights."""

    def __init__(self, parameters: Any) -> None:
        of_all = list(parameters)
        self.optimizers = [sgd(of_all[:5]), sgd(of_all[5:])]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "make", "way"),
    [
        ("2:4", _adamw, "usual"),
        ("2:4", _adamw, "closure"),
        ("unstructured", sgd, "scaled"),
        ("unstructured", _fused, "scaled"),
        ("unstructured", _Both, "usual"),
        ("2:4", _Both, "scaled"),
    ],
)
def test_optimizers_and_steps(kind: str, make: Any, way: str) -> None:
    wrapped, optimizer, training = started("plain", kind, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for x in inputs():
        if way == "closure":
            optimizer.step(functools.partial(backward, wrapped, x))
        elif way == "scaled":
            for scale in (float("inf"), scaler.get_scale()):  # the first overflows, and is left out
                optimizer.zero_grad()
                backward(wrapped, x, scale)
                for each in getattr(optimizer, "optimizers", [optimizer]):
                    scaler.step(each)
                scaler.update(8.0)
        else:
            backward(wrapped, x)
            optimizer.step()
        optimizer.zero_grad()
    assert training.step == (2 if way == "scaled" and make is _fused else 1) * NUM_STEPS  # it leaves them out itself
    check(weights(wrapped.model), plain_loop(kind, sgd if make is _Both else make)[-1])


def save_on_rank(_: int, folder: str) -> None:
    wrapped, optimizer, training = started("fsdp2", "2:4")
    for x in inputs()[:2]:
        step(wrapped, optimizer, x)
    model, of_optimizer = get_state_dict(wrapped.model, optimizer)
    save({"model": model, "optimizer": of_optimizer, "training": training}, checkpoint_id=folder)


def resume_on_rank(rank: int, folder: str) -> Weights:
    wrapped, optimizer, training = started("fsdp2", "2:4")
    model, of_optimizer = get_state_dict(wrapped.model, optimizer)  # it steps the optimizer once, at rate 0
    assert training.step == 0
    load({"model": model, "optimizer": of_optimizer, "training": training}, checkpoint_id=folder)
    set_state_dict(wrapped.model, optimizer, model_state_dict=model, optim_state_dict=of_optimizer)
    assert training.step == 2
    if rank == 0:
        with pytest.raises(ValueError, match="may be another rank's part of it"):
            training.load_state_dict(copy.deepcopy(training.state_dict()))
        with pytest.raises(KeyError, match="aside"):
            training.load_state_dict({"step": 3})
    for x in inputs()[2:]:
        step(wrapped, optimizer, x)
    return weights(wrapped.model)


@pytest.mark.parametrize("num_ranks", [4, *(only_whole(num) for num in (2, 3))])
def test_resumes(pool: ProcessPool, tmp_path: Path, num_ranks: int) -> None:
    pool.run(2, save_on_rank, str(tmp_path))
    for resumed in pool.run(num_ranks, resume_on_rank, str(tmp_path)):
        check(resumed, plain_loop("2:4")[-1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))])
def test_a_copy_goes_on_as_the_original(copied: Callable[[Any], Any]) -> None:
    wrapped, optimizer, training = started("plain", "2:4")
    first, *rest = inputs()
    step(wrapped, optimizer, first)
    model, its_optimizer, its_training = copied((wrapped.model, optimizer, training))
    for of_model, of_optimizer in ((model, its_optimizer), (wrapped.model, optimizer)):
        for x in rest:
            step(Wrapped(of_model, 0, 1), of_optimizer, x)
        check(weights(of_model), plain_loop("2:4")[-1])
    assert its_training.step == NUM_STEPS


class Failing(torch.optim.SGD):
    """Fails once, when some of the weights have moved."""

    fails = True

    @override
    def step(self, closure: Any = None) -> Any:
        if not self.fails:
            return super().step(closure)
        self.fails = False
        first = self.param_groups[0]["params"][0]
        first.data.add_(1)
        raise MemoryError


@pytest.mark.parametrize(
    "seen", [lambda model, _: model(inputs()[0]), lambda model, _: model.state_dict(), lambda _, it: it.finish(), None]
)
def test_a_step_that_fails(seen: Callable[[nn.Module, StraightThrough], object] | None) -> None:
    """The mask of before is there when the model is next looked at, and nothing of the latent weights is lost."""
    wrapped, optimizer, training = started("plain", "every", lambda parameters: Failing(parameters, lr=2**-8))
    model, before = wrapped.model, weights(wrapped.model)
    latent = {name: before[name] + aside for name, aside in training.state_dict()["aside"].items()}
    backward(wrapped, inputs()[0])
    with pytest.raises(MemoryError):
        optimizer.step()
    assert not all(map(torch.equal, before.values(), weights(model).values()))  # dense
    first = "layers.0.attention.q.weight"
    latent[first] += 1
    if seen is None:
        optimizer.zero_grad()
        optimizer.step()  # without gradients, nothing moves
    else:
        seen(model, training)
    for name, weight in weights(model).items():
        aside = training.state_dict()["aside"].get(name, latent[name] * (weight == 0))  # finish has dropped it
        assert torch.equal(weight + aside, latent[name])
        assert not weight[(before[name] == 0) & (aside.view(torch.int64) != 0)].any()
        assert int((weight == 0).sum()) >= weight.numel() // 2


def test_weights_that_become_nan() -> None:
    wrapped, optimizer, training = started("plain", "2:4")
    before = copy.deepcopy(training._aside)
    backward(wrapped, inputs()[0])
    weight = wrapped.model.get_parameter("layers.1.up.weight")
    assert weight.grad is not None
    weight.grad[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        optimizer.step()
    for name, after in weights(wrapped.model).items():
        assert not after[before[name].view(torch.int64) != 0].any()
        assert after.any()


def test_what_is_written_between_steps() -> None:
    """A dense checkpoint, say: it is what goes on, and after the step the pattern holds, though no mask is due."""
    wrapped, optimizer, _training = started("plain", "every")
    step(wrapped, optimizer, inputs()[0])
    with drawing(1), torch.no_grad():
        dense = Layers()
        for parameter in dense.parameters():
            parameter.add_(0.25)
    wrapped.model.get_submodule("layers.1").load_state_dict(dense.state_dict())
    with pytest.warns(UserWarning, match=r"\d+ pruned weights were written to since the last step"):
        optimizer.step()  # no gradients are there
    latent = {f"layers.1.{name}.weight": dense.get_parameter(f"{name}.weight").detach() for name in PRUNED}
    found = weights(wrapped.model)
    for name, mask in masks_of(prune.NByM(2, 4), latent).items():
        assert torch.equal(found[name], latent[name] * mask)


def rounds_on_rank(_: int, num_layers: int) -> list[int]:
    comm = ProcessGroup()
    with drawing(0):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = StraightThrough(model, optimizer, every=2, group=comm)
    assert sum(aside.nbytes for aside in training._aside.values()) == 256 * num_layers
    found = []
    for _ in range(4):
        before = comm.traffic.copy()
        model(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
        found.append((comm.traffic - before).num_rounds)
    return found


def test_rounds_do_not_grow_with_layers() -> None:
    for num_layers in (2, 30):
        assert run_threads(2, rounds_on_rank, num_layers) == [[1, 4, 1, 4]] * 2


class Lookahead(torch.optim.SGD):
    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups[0]["params"], lr=0.1)
        self.optimizer = inside


def _in_backward(model: nn.Module) -> None:
    optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}
    StraightThrough(model, optimizers.values(), include=INCLUDE)
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())  # type: ignore[no-untyped-call]
    model(inputs()[0]).backward()


def _cast(model: nn.Module) -> None:
    optimizer = sgd(model.parameters())
    StraightThrough(model, optimizer, include=INCLUDE)
    model.float()
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda model: StraightThrough(model, Lookahead(sgd(model.parameters())), include=INCLUDE),
            NotImplementedError,
            "Lookahead wraps an optimizer and writes weights of its own",
        ),
        (_in_backward, NotImplementedError, "steps within the backward pass"),
        (_cast, ValueError, "laid out otherwise, or are others, than when StraightThrough was made"),
    ],
)
def test_bad_input(call: Callable[[nn.Module], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(Exact())


def differ_on_rank(rank: int) -> None:
    """One rank alone, at the start and at a step: it is raised on both, and the model is as before."""
    model = Exact()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="rank 1 of 2: none of" if rank == 0 else "none of"):
        StraightThrough(model, sgd((Exact() if rank else model).parameters()), include=INCLUDE)
    assert all(map(torch.equal, model.parameters(), before))
    optimizer = sgd(model.parameters())
    StraightThrough(model, optimizer, include=INCLUDE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    weight, says = model.get_parameter("layers.0.up.weight"), "the gradient of 'layers.0.up.weight' is sparse, or not"
    weight.grad = torch.ones_like(weight).to_sparse() if rank else torch.ones_like(weight)
    with pytest.raises(ValueError, match=("rank 1 of 2: " if rank == 0 else "") + says):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_raises_on_every_rank() -> None:
    run_threads(2, differ_on_rank)
