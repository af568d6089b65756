"""Zeros that are held stay, through every optimizer and in every layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim.swa_utils import AveragedModel

import distprune as prune
from distprune.training.hold import hold_zeros
from tests.sampling import only_whole, pairs_first
from tests.training.optimizers import (
    INCLUDE,
    NUM_RANKS,
    OTHERS,
    TORCHS,
    UNABLE,
    check_moments,
    held_bits,
    make_optimizer,
    targets,
)
from tests.worlds import ProcessPool
from tests.wrapped import Transformer, Wrapped, batches, transformer, wrap

NUM_DENSE_STEPS, NUM_STEPS = 1, 4


class Pipelined:
    """A stage of the model a rank, of torch.distributed.pipelining."""

    def __init__(self, model: Transformer) -> None:
        rank, num = dist.get_rank(), dist.get_world_size()
        self.model = (
            nn.Sequential(model.embed, model.layers[0])
            if rank == 0
            else nn.Sequential(model.layers[1], model.norm, model.head)
        )
        stage = PipelineStage(self.model, rank, num, torch.device("cpu"))
        self._schedule = ScheduleGPipe(stage, 2, loss_fn=_loss)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            self._schedule.step(tokens[:, :-1])
            return torch.zeros(())
        self._schedule.step(target=tokens[:, 1:], losses=losses)
        return torch.stack(losses).mean()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def made(layout: str) -> Wrapped | Pipelined:
    if layout == "pipeline":
        return Pipelined(transformer())
    if layout == "fsdp1 flat":
        return Wrapped(FullyShardedDataParallel(transformer(), device_id=torch.device("cpu")), dist.get_rank(), 2)
    return wrap(layout, transformer())


def train(optimizer: torch.optim.Optimizer, wrapped: Wrapped | Pipelined, tokens: torch.Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        return float(wrapped.step(tokens))

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    else:
        closure()
        optimizer.step()


def hold_on_rank(_: int, layout: str, name: str) -> int:
    wrapped = made(layout)
    model = wrapped.model
    optimizer = make_optimizer(name, model)
    steps = iter(batches(NUM_DENSE_STEPS + NUM_STEPS))
    for _step in range(NUM_DENSE_STEPS):
        train(optimizer, wrapped, next(steps))
    prune.prune_model(model, 0.5, include=INCLUDE, scope="tensor")
    before, first = held_bits(model), [shard.local.clone() for shard in targets(model)]
    hold = hold_zeros(model, optimizer, include=INCLUDE)
    for tokens in steps:
        train(optimizer, wrapped, tokens)
        for now, then in zip(held_bits(model), before, strict=True):
            assert torch.equal(now, then)
    assert hold.counts().sparsity == 0.5
    for shard, then in zip(targets(model), first, strict=True):
        assert shard.local.numel() == 0 or not torch.equal(shard.local, then)
    return check_moments(optimizer, model)


# Per-element state of theirs is a sum of rows and columns, packed, or a history over all parameters.
WITHOUT_MOMENTS = ("Adafactor", "SGD8bit", "LBFGS", "SGD")


# By default some of these: every optimizer on a plain model, those that differ in kind on FSDP2, and SGD in others.
SAMPLED = {
    **dict.fromkeys(NUM_RANKS, ("SGD", "ZeRO")),
    "plain": (*TORCHS, *OTHERS),
    "fsdp2": ("SGD", "AdamW fused", "AdamW foreach", "Adafactor", "Muon", "LBFGS", "ScheduleFree"),
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=() if name in SAMPLED[layout] else pytest.mark.whole)
        for layout in NUM_RANKS
        for name in [*TORCHS, *OTHERS]
        if name not in UNABLE[layout]  # by torch itself
    ],
)
@pytest.mark.sampled(14)
def test_zeros_stay(pool: ProcessPool, layout: str, name: str) -> None:
    num_moments = pool.run(NUM_RANKS[layout], hold_on_rank, layout, name)
    assert any(num_moments) or name in WITHOUT_MOMENTS


def _scaled(wrapped: Wrapped, optimizer: torch.optim.Optimizer, steps: Iterator[torch.Tensor]) -> None:
    """Gradients overflow at every third step, which the scaler leaves out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for i, tokens in enumerate(steps):
        wrapped.step(tokens, scale=scaler.get_scale() if i % 3 else float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _accumulated(wrapped: Wrapped, optimizer: torch.optim.Optimizer, steps: Iterator[torch.Tensor]) -> None:
    for i, tokens in enumerate(steps):
        is_last = i % 3 == 2
        if isinstance(wrapped.model, FSDPModule):
            wrapped.model.set_requires_gradient_sync(is_last)
        wrapped.step(tokens)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def _compiled(wrapped: Wrapped, optimizer: torch.optim.Optimizer, steps: Iterator[torch.Tensor]) -> None:
    step = torch.compile(optimizer.step, backend="eager")
    for tokens in steps:
        wrapped.step(tokens)
        step()
        optimizer.zero_grad()


def _usual(wrapped: Wrapped, optimizer: torch.optim.Optimizer, steps: Iterator[torch.Tensor]) -> None:
    for tokens in steps:
        train(optimizer, wrapped, tokens)


STYLES = {
    "scaled": (_scaled, ["plain", "ddp"]),
    "accumulated": (_accumulated, ["plain", "ddp", "fsdp2"]),
    "compiled": (_compiled, ["plain", "fsdp2"]),
    "plain steps": (_usual, ["offload", "no-reshard", "columns", "checkpointing"]),
}


def style_on_rank(_: int, layout: str, style: str) -> None:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    before = held_bits(wrapped.model)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    STYLES[style][0](wrapped, optimizer, iter(batches(6)))
    assert all(map(torch.equal, held_bits(wrapped.model), before))
    check_moments(optimizer, wrapped.model)


@pytest.mark.parametrize(
    ("layout", "style"),
    [
        only_whole(layout, style) if (layout, style) == ("fsdp2", "compiled") else (layout, style)
        for style, (_, layouts) in STYLES.items()
        for layout in layouts
    ],
)
@pytest.mark.sampled(3)
def test_styles(pool: ProcessPool, layout: str, style: str) -> None:
    pool.run(1 if layout == "plain" else 2, style_on_rank, layout, style)


def in_backward_on_rank(_: int, layout: str, hold_first: bool, given: bool) -> None:
    wrapped = wrap(layout, transformer())
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    before = held_bits(wrapped.model)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in wrapped.model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    def hold() -> None:
        hold_zeros(wrapped.model, list(optimizers.values()) if given else None, include=INCLUDE)

    if hold_first:
        hold()
    for parameter in wrapped.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    if not hold_first:
        hold()
    for tokens in batches(5):
        wrapped.step(tokens)
    assert all(map(torch.equal, held_bits(wrapped.model), before))


@pytest.mark.parametrize(
    ("layout", "hold_first", "given"), pairs_first(["plain", "fsdp2"], [True, False], [True, False])
)
@pytest.mark.sampled(2)
def test_optimizer_in_backward(pool: ProcessPool, layout: str, hold_first: bool, given: bool) -> None:
    pool.run(1 if layout == "plain" else 2, in_backward_on_rank, layout, hold_first, given)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is meant
def test_pure_bfloat16_keeps_its_zeros(tmp_path: Path) -> None:
    """Live weights that touch zero stay alive, and the bits say which are held, also after a round trip."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    prune.prune_model(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hold = hold_zeros(model, optimizer)
    held, num_touched = model.weight.view(torch.int16) == 0, 0
    for step in range(200):
        x = torch.randn(16, 64, dtype=torch.bfloat16)
        model(x).sub(x.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_touched += int((model.weight == 0).sum()) - int(held.sum())
        before = model.weight.detach().view(torch.int16).clone()
        model.load_state_dict(safetensors.torch.load(safetensors.torch.save(model.state_dict())))
        if step % 20 == 19:
            save(model.state_dict(), checkpoint_id=tmp_path / str(step), no_dist=True)
            nn.init.zeros_(model.weight)
            load(model.state_dict(), checkpoint_id=tmp_path / str(step), no_dist=True)
        assert torch.equal(model.weight.view(torch.int16), before)
        assert torch.equal(model.weight.view(torch.int16) == 0, held)
    assert num_touched > 0  # else this shows nothing
    hold.finish()
    assert not model.weight.signbit()[model.weight == 0].any()


def pruned_late_on_rank(_: int, layout: str) -> None:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    hold = hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    for i, tokens in enumerate(batches(4)):
        wrapped.step(tokens)
        if i < 3:
            prune.prune_model(wrapped.model, 0.2 * (i + 1), include=INCLUDE)
        optimizer.step()
        optimizer.zero_grad()
    assert hold.counts().sparsity == pytest.approx(0.6, abs=1e-3)
    check_moments(optimizer, wrapped.model)


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1", "fsdp2", "tp"])
@pytest.mark.sampled(2)
def test_what_is_pruned_after_the_backward_pass(pool: ProcessPool, layout: str) -> None:
    pool.run(1 if layout == "plain" else 2, pruned_late_on_rank, layout)


def test_sparse_gradients() -> None:
    model = nn.Embedding(11, 8, sparse=True)
    prune.prune_model(model, 0.5, include="weight")
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    hold_zeros(model, optimizer, include="weight")
    held = model.weight == 0
    for tokens in batches(5):
        model(tokens).square().sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        assert torch.equal(model.weight == 0, held)
    assert not optimizer.state[model.weight]["exp_avg"][held].any()


def test_follows_replaced_parameters() -> None:
    """A model that is loaded, wrapped or moved after the hold was made is held all the same."""
    model = transformer()
    prune.prune_model(model, 0.5, include=INCLUDE)
    hold = hold_zeros(model, include=INCLUDE)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before, weight = held_bits(model), model.get_parameter("layers.0.up.weight")
    for tokens in batches(3):
        Wrapped(model, 0, 1).step(tokens)
        assert weight.grad is not None
        assert not weight.grad[weight == 0].any()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, held_bits(model), before))
    copied = copy.deepcopy(model)  # for an average of its weights
    with torch.no_grad():
        copied.get_parameter("layers.0.up.weight").add_(1)
    hold.apply_to(copied)
    assert all(map(torch.equal, held_bits(copied), before))
    hold.remove()
    Wrapped(model, 0, 1).step(tokens)
    optimizer.step()
    assert not all(map(torch.equal, held_bits(model), before))


def test_an_average_of_what_a_module_holds() -> None:
    model = transformer()
    prune.prune_model(model, 0.5, include=INCLUDE)
    hold, averaged = hold_zeros(model, include=model.get_submodule("layers.0")), AveragedModel(model)
    with torch.no_grad():
        averaged.module.get_parameter("layers.0.up.weight").add_(1)
    hold.apply_to(averaged)
    assert all(map(torch.equal, held_bits(averaged.module), held_bits(model)))


def _move_one(model: nn.Module, _: torch.optim.Optimizer) -> None:
    weight = model.get_parameter("layers.0.up.weight")
    weight.data = weight.data.clone()


def _cast_some(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.get_submodule("layers.0").double().float()


def _add_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layers = cast(nn.ModuleList, model.get_submodule("layers"))
    layers.append(copy.deepcopy(layers[0]))
    optimizer.add_param_group({"params": list(layers[-1].parameters())})


def _add_sparse(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_parameter("table", nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False))
    optimizer.add_param_group({"params": [model.table]})


CHANGES = {
    "one moved": _move_one,
    "some cast": _cast_some,
    "a layer more": _add_layer,
    "one sparse": _add_sparse,
}


def changed_on_rank(_: int, layout: str, change: str, given: bool) -> None:
    """Change a part of the model before the first step of an optimizer whose moments are not zero."""
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    first, *others = batches(3)
    train(optimizer, wrapped, first)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer if given else None, include=INCLUDE)
    CHANGES[change](wrapped.model, optimizer)
    before = held_bits(wrapped.model)
    for tokens in others:
        train(optimizer, wrapped, tokens)
        assert all(map(torch.equal, held_bits(wrapped.model), before))
    assert check_moments(optimizer, wrapped.model)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("layout", "change"), [*(("plain", change) for change in CHANGES), ("fsdp2", "some cast")])
def test_follows_a_part_that_changes(pool: ProcessPool, layout: str, change: str, given: bool) -> None:
    pool.run(1 if layout == "plain" else 2, changed_on_rank, layout, change, given)


def no_sync_on_rank(rank: int) -> str:
    wrapped = wrap("ddp", transformer())
    with cast(nn.parallel.DistributedDataParallel, wrapped.model).no_sync():
        wrapped.step(batches(1)[0])
    before = [parameter.detach().clone() for parameter in wrapped.model.parameters()]
    with pytest.raises(ValueError, match="should hold the same values") as raised:
        prune.prune_model(wrapped.model, 0.5, score="taylor", include=INCLUDE)
    assert all(map(torch.equal, wrapped.model.parameters(), before))
    with pytest.raises(ValueError, match="rank 1 of 2: .*is among those of SGD" if rank == 0 else "is among those of"):
        hold_zeros(wrapped.model, torch.optim.SGD((transformer() if rank else wrapped.model).parameters()))
    return str(raised.value)


def test_raises_on_every_rank(pool: ProcessPool) -> None:
    assert len(set(pool.run(2, no_sync_on_rank))) == 1
