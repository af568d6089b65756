"""What is held is read anew when the weights are written to."""

from __future__ import annotations

import copy
import gc
import itertools
import tempfile
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jacrev, vmap
from typing_extensions import override

import distprune as prune
from distprune.kernels.table import Table
from distprune.masks.in_place import zero_all_where_pruned
from distprune.shards.layouts import local_of
from distprune.shards.parameter_range import gradients_of
from distprune.training import held as held_zeros
from distprune.training.hold import hold_zeros
from tests.device_path import Waits, as_on_a_device, counted_waits
from tests.training.optimizers import INCLUDE, check_moments, held_bits, targets
from tests.worlds import ProcessPool
from tests.wrapped import Wrapped, batches, transformer, wrap


def _in_place(model: nn.Module, moved: list[torch.Tensor]) -> None:
    for shard, values in zip(targets(model), moved, strict=True):
        shard.local.copy_(values)


def _through_data(model: nn.Module, moved: list[torch.Tensor]) -> None:
    for shard, values in zip(targets(model), moved, strict=True):
        shard.local.data.copy_(values)


def _loaded(model: nn.Module, moved: list[torch.Tensor]) -> None:
    state = copy.deepcopy(model.state_dict())
    for shard, values in zip(targets(model), moved, strict=True):
        local_of(state[shard.name]).copy_(values)
    model.load_state_dict(state)


def _loaded_in_place(model: nn.Module, moved: list[torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a rank writes and reads its own
        state = {shard.name: values for shard, values in zip(targets(model), moved, strict=True)}
        save(state, checkpoint_id=folder, no_dist=True)
        load({name: local_of(model.state_dict()[name]) for name in state}, checkpoint_id=folder, no_dist=True)


def _in_moved_memory(model: nn.Module, moved: list[torch.Tensor]) -> None:
    for shard in targets(model):
        shard.local.share_memory_()  # type: ignore[no-untyped-call]
    _in_place(model, moved)


WRITES = {
    "in place": _in_place,
    "through data": _through_data,
    "loaded": _loaded,
    "loaded in place": _loaded_in_place,
    "in moved memory": _in_moved_memory,
}


@torch.no_grad()
def _move_zeros(model: nn.Module, way: str) -> list[torch.Tensor]:
    """Write other weights with as many zeros in other places, and return where they are."""
    WRITES[way](model, [shard.local.roll(1, 0) for shard in targets(model)])
    return held_bits(model)


def written_on_rank(rank: int, layout: str, way: str) -> None:
    """Move the zeros, before a backward pass and before a step."""
    if layout == "on a device":
        with as_on_a_device():
            written_on_rank(rank, "plain", way)
        return
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    held = held_bits(wrapped.model)
    for i, tokens in enumerate(batches(6)):
        if i == 2:
            held = _move_zeros(wrapped.model, way)
        wrapped.step(tokens)
        if layout != "fsdp1" and (i != 2 or way != "through data"):
            gradients = gradients_of(targets(wrapped.model), wrapped.model.parameters())
            assert [int((gradient != 0).sum()) for gradient in gradients if gradient is not None] == [
                int((~bits).sum()) for bits in held
            ]
        if i == 4:
            held = _move_zeros(wrapped.model, way)
        optimizer.step()
        assert all(map(torch.equal, held_bits(wrapped.model), held))
        check_moments(optimizer, wrapped.model)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *itertools.product(["plain", "fsdp2"], WRITES),
        *itertools.product(["on a device"], [way for way in WRITES if way != "through data"]),  # torch counts no such
        ("fsdp1", "in place"),  # its state dict is not of shards
        ("fsdp1", "through data"),
    ],
)
@pytest.mark.sampled(5)
def test_what_is_written_between_steps(pool: ProcessPool, layout: str, way: str) -> None:
    pool.run(2 if layout.startswith("fsdp") else 1, written_on_rank, layout, way)


Launches = list[tuple[int, Waits]]  # of kernels, and waits, by step


def _steps(num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer, Launches]:
    """Train three steps, before the last of which the zeros are moved; count in the second and the third."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=True)
    prune.prune_model(model, 0.5)
    hold_zeros(model, optimizer)
    x = torch.randn(6, 48)
    counts: Launches = []
    for i in range(3):
        if i == 2:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.roll(1, 0))
        optimizer.zero_grad()
        with counted_waits() as waits, patch.object(Table, "run", autospec=True, side_effect=Table.run) as launched:
            model(x).square().mean().backward()
            optimizer.step()
        counts.append((launched.call_count, waits))
    return model, optimizer, counts[1:]


@pytest.mark.parametrize("how", ["kernels", "plain"])
def test_a_step_on_a_device(how: str, request: pytest.FixtureRequest) -> None:
    """It comes to the host's, in a few launches for all matrices; it waits once where weights were written to."""
    if how == "kernels":
        request.getfixturevalue("interpreted")
    launches = []
    for num_layers in (3, 9):
        here, optimizer, _ = _steps(num_layers)
        with as_on_a_device(1 << 16):
            there, optimizer_there, counts = _steps(num_layers)
        for weight, other in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.equal(weight.view(torch.int32), other.view(torch.int32))
            state, of_other = optimizer.state[weight], optimizer_there.state[other]
            assert torch.equal(state["momentum_buffer"], of_other["momentum_buffer"])
        assert [waits.num_fetches for _, waits in counts] == [0, 1]
        launches.append([num for num, _ in counts])
    assert launches == ([[1, 5]] * 2 if how == "kernels" else [[0, 0]] * 2)


def _noisy(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads no annotations that are text
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer().add_(1))
    return done


def _added(model: nn.Module, _: prune.Hold) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(1)


def _replaced(model: nn.Module, _: prune.Hold) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _dense_twice(model: nn.Module, hold: prune.Hold) -> None:
    with hold.dense_gradients():
        model(batches(1)[0]).square().sum().backward()


# By what is done to gradients that are masked: to which they are masked again before the step.
TO_GRADIENTS: dict[str, Callable[[nn.Module, prune.Hold], object]] = {
    "nothing": lambda model, _: [p.grad.square().sum() for p in model.parameters() if p.grad is not None],
    "clipped": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "added to": _added,
    "replaced": _replaced,
    "dense twice": _dense_twice,
    "pruned": lambda model, _: prune.prune_model(model, prune.sparsity(model, include=INCLUDE) + 0.1, include=INCLUDE),
}


def changed_on_rank(_: int, layout: str, way: str) -> int:
    """Change gradients after the backward pass, on a device; return how many times as many a step masks them."""
    with as_on_a_device():
        if layout == "noisy ddp":  # what arrives is written into its buckets, of which gradients are views
            parallel = nn.parallel.DistributedDataParallel(transformer(), gradient_as_bucket_view=True)
            parallel.register_comm_hook(None, _noisy)
            wrapped = Wrapped(parallel, dist.get_rank(), dist.get_world_size())
        else:
            wrapped = wrap(layout, transformer())
        optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2, foreach=layout != "tp")
        prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
        hold = hold_zeros(wrapped.model, optimizer, include=INCLUDE)
        num_masked = 0
        for tokens in batches(3):
            wrapped.step(tokens)
            TO_GRADIENTS[way](wrapped.model, hold)
            with patch.object(held_zeros, "zero_all_where_pruned", side_effect=zero_all_where_pruned) as masked:
                optimizer.step()
            num_masked = len(masked.call_args_list[0].args[0])
            assert check_moments(optimizer, wrapped.model)
            optimizer.zero_grad(set_to_none=layout != "noisy ddp")
    return num_masked


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *itertools.product(["plain"], TO_GRADIENTS),
        *itertools.product(["noisy ddp", "ddp", "fsdp2", "hsdp", "tp"], ["nothing"]),
    ],
)
def test_gradients_are_masked_again_where_they_were_written(pool: ProcessPool, layout: str, way: str) -> None:
    num_masked = pool.run({"plain": 1, "hsdp": 4}.get(layout, 2), changed_on_rank, layout, way)
    assert all(num == 0 for num in num_masked) == (way == "nothing" and "ddp" not in layout)


def swapped_on_rank(_: int, first: int) -> None:
    wrapped = wrap("tp", transformer())
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1, foreach=False)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    for num, tokens in enumerate(batches(3)):
        if num == first:
            wrapped.model.to("cpu")  # torch swaps what is in a DTensor, though nothing moves
        wrapped.step(tokens)
        shards = targets(wrapped.model)
        for shard, gradient in zip(shards, gradients_of(shards, wrapped.model.parameters()), strict=True):
            assert gradient is not None
            assert not gradient[shard.local.view(torch.int32) == 0].any()
        optimizer.step()


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_are_masked_after_a_move(pool: ProcessPool, first: int) -> None:
    pool.run(2, swapped_on_rank, first)


def let_go_on_rank(_: int, given: bool) -> bool:
    model: nn.Module = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    prune.prune_model(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer if given else None)
    gc.collect()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert prune.sparsity(model) == 0.5
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return gone() is None


@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_nobody_needs_is_let_go(pool: ProcessPool, given: bool) -> None:
    """Through hooks of parameters, where Python finds no cycles, it would stay, and gloo's threads with it."""
    assert pool.run(2, let_go_on_rank, given) == [True, True]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_part_of_a_model_is_held(loaded: bool) -> None:
    """What trains on without the object that was given keeps its zeros, and those of both signs that it loads."""
    layer = nn.Linear(8, 8, bias=False)
    prune.prune_model(layer, 0.5)
    hold_zeros(nn.ModuleDict({"inner": nn.Sequential(layer)}))
    gc.collect()
    if loaded:
        layer.load_state_dict({"weight": layer.weight.detach().roll(1, 0).mul(-1)})
    held = layer.weight == 0
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(torch.ones(8)).sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight == 0, held)


def unfrozen_on_rank(_: int, layout: str) -> None:
    """What is trained later than the rest has masked gradients as soon as they are there."""
    wrapped = wrap(layout, transformer())
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    weight = wrapped.model.get_parameter("layers.0.up.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=0.1)  # keeps the hold
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    for tokens in batches(2):
        wrapped.step(tokens)
        weight.requires_grad_(True)
    shards = targets(wrapped.model)
    for shard, gradient in zip(shards, gradients_of(shards, wrapped.model.parameters()), strict=True):
        assert gradient is not None
        assert not gradient[shard.local == 0].any()


@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
def test_what_is_unfrozen_later(pool: ProcessPool, layout: str) -> None:
    pool.run({"plain": 1}.get(layout, 2), unfrozen_on_rank, layout)


X, Y = (torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda weights, x, y: (functional_call(model, weights, (x,)) - y).square().mean()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda model, weights: {"out": functional_call(model, weights, (X,))},
        lambda model, weights: grad(loss_of(model))(weights, X, Y),
        lambda model, weights: vmap(grad(loss_of(model)), in_dims=(None, 0, 0))(weights, X, Y),  # by sample
        lambda model, weights: jacrev(loss_of(model))(weights, X, Y),
        lambda model, _: {"x": grad(lambda x: model(x).sum())(X)},
    ],
    ids=["functional_call", "grad", "per sample", "jacrev", "of inputs"],
)
def test_what_torch_func_transforms_is_left_alone(transformed: Callable[..., dict[str, Any]]) -> None:
    """It comes to what it does without a hold, and the weights are held as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    prune.prune_model(model, 0.5)
    weights = {name: 2 * weight.detach() for name, weight in model.named_parameters()}
    expected = transformed(copy.deepcopy(model), weights)
    zeros = {name: weight == 0 for name, weight in weights.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer)
    for _ in range(2):
        found = transformed(model, weights)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        loss_of(model)(dict(model.named_parameters()), X, Y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert all(
            torch.equal(weight == 0, zeros[name]) for name, weight in model.named_parameters() if weight.ndim > 1
        )
        expected = transformed(copy.deepcopy(model), weights)


class Packed(torch.Tensor):
    """A moment in eight bits, a subclass of tensor that packs and unpacks in ``copy_``, as torchao's."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.codes, made.scale = torch.zeros_like(values, dtype=torch.int8), torch.ones(())
        return made

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert func is torch.ops.aten.copy_.default
        to, of = args[:2]
        if isinstance(to, Packed):
            to.scale = of.abs().max() / 127
            to.codes.copy_((of / to.scale).round())
            return to
        return to.copy_(of.codes * of.scale)


def test_what_is_a_moment() -> None:
    """Matrices of Shampoo have the shape of a square weight, and are none; packed and complex moments are."""
    torch.manual_seed(0)
    model = nn.Linear(12, 12, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    packed = Packed(torch.zeros(12, 12)).copy_(torch.full((12, 12), 2.0))
    optimizer.state[model.weight] = {name: torch.ones(12, 12) for name in ("exp_avg", "pre_cond_0", "inv_pre_cond_1")}
    optimizer.state[model.weight] |= {"packed": packed, "complex": torch.ones(12, 12, dtype=torch.complex64)}
    prune.prune_model(model, 0.5)
    hold_zeros(model, optimizer)
    model(torch.randn(4, 12)).sum().backward()
    optimizer.step()
    kept = model.weight != 0
    state = optimizer.state[model.weight]
    assert torch.equal(state["exp_avg"] + 1j * state["complex"], kept * (1 + 1j))
    assert torch.equal(state["pre_cond_0"] + state["inv_pre_cond_1"], torch.full((12, 12), 2.0))
    assert torch.equal(torch.zeros(12, 12).copy_(packed), 2.0 * kept)
