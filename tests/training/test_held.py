"""What is held is read anew when the weights are written to, and gradients are masked once."""

from __future__ import annotations

import copy
import gc
import itertools
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jacrev, vmap
from typing_extensions import override

import distprune as prune
from distprune.kernels.table import Table
from distprune.masks.in_place import zero_all_where_pruned, zero_where_pruned
from distprune.shards.device import Arriving
from distprune.shards.layouts import local_of
from distprune.shards.parameter_range import gradients_of
from distprune.training.hold import hold_zeros
from tests.device_path import Waits, as_on_a_device, counted_waits
from tests.training.optimizers import INCLUDE, check_moments, held_bits, targets
from tests.worlds import ProcessPool
from tests.wrapped import batches, transformer, wrap


def counted_on_rank(_: int, layout: str) -> None:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    num_targets = len(targets(wrapped.model))
    written = next(p for name, p in wrapped.model.named_parameters() if name.endswith("attention.o.weight"))
    for is_written, tokens in zip((True, False, False, True), batches(4), strict=True):
        with patch("distprune.training.held.zero_where_pruned", wraps=zero_where_pruned) as masking:
            wrapped.step(tokens)
        assert masking.call_count == num_targets
        if is_written:
            local_of(cast(torch.Tensor, written.grad)).add_(1.0)
        with patch("distprune.training.held.zero_all_where_pruned", wraps=zero_all_where_pruned) as masking:
            optimizer.step()
        assert any(call.args[0] for call in masking.call_args_list) == is_written
        optimizer.zero_grad()
        check_moments(optimizer, wrapped.model)


@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
def test_a_gradient_is_masked_once_unless_somebody_writes_to_it(pool: ProcessPool, layout: str) -> None:
    pool.run(1 if layout == "plain" else 2, counted_on_rank, layout)


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
    """Move the zeros, before a backward pass and before a step; the latter is not seen on a device through ``data``."""
    if layout == "on a device":
        with as_on_a_device():
            written_on_rank(rank, "plain", "through data, early" if way == "through data" else way)
        return
    way, _, is_early = way.partition(", ")
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    held = held_bits(wrapped.model)
    for i, tokens in enumerate(batches(6)):
        if i == 2 or (i == 4 and is_early):
            held = _move_zeros(wrapped.model, way)
        wrapped.step(tokens)
        if layout != "fsdp1":
            gradients = gradients_of(targets(wrapped.model), wrapped.model.parameters())
            assert [int((gradient != 0).sum()) for gradient in gradients if gradient is not None] == [
                int((~bits).sum()) for bits in held
            ]
        if i == 4 and not is_early:
            held = _move_zeros(wrapped.model, way)
        optimizer.step()
        assert all(map(torch.equal, held_bits(wrapped.model), held))
        check_moments(optimizer, wrapped.model)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *itertools.product(["plain", "on a device", "fsdp2"], WRITES),
        ("fsdp1", "in place"),  # its state dict is not of shards
        ("fsdp1", "through data"),
    ],
)
@pytest.mark.sampled(5)
def test_what_is_written_between_steps(pool: ProcessPool, layout: str, way: str) -> None:
    pool.run(2 if layout.startswith("fsdp") else 1, written_on_rank, layout, way)


def _steps(num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer, int, Waits]:
    """Train some steps, and count launches of kernels and waits in the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=True)
    prune.prune_model(model, 0.5)
    hold_zeros(model, optimizer)
    x = torch.randn(6, 48)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    with torch.no_grad():  # what is held moves, and so do its moments
        for weight in model.parameters():
            weight.copy_(weight.roll(1, 0))
    with counted_waits() as waits, patch.object(Table, "run", autospec=True, side_effect=Table.run) as launched:
        step()
    return model, optimizer, launched.call_count, waits


@pytest.mark.parametrize("how", ["kernels", "plain"])
def test_a_step_on_a_device(how: str, request: pytest.FixtureRequest) -> None:
    """It comes to the host's, waits for nothing, and takes a few launches for all matrices together."""
    if how == "kernels":
        request.getfixturevalue("interpreted")
    num_launches = []
    for num_layers in (3, 9):
        here, optimizer, *_ = _steps(num_layers)
        far_behind = patch.object(Arriving, "values", lambda self, waits: self._values if waits else None)
        with as_on_a_device(1 << 16), far_behind:
            there, optimizer_there, launches, waits = _steps(num_layers)
        for weight, other in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.equal(weight.view(torch.int32), other.view(torch.int32))
            state, of_other = optimizer.state[weight], optimizer_there.state[other]
            assert torch.equal(state["momentum_buffer"], of_other["momentum_buffer"])
        assert waits.calls.keys() <= {"tensor"}  # a table of the moments, which the host does not wait for
        assert not waits.num_fetches
        num_launches.append(launches)
    assert num_launches == ([4, 4] if how == "kernels" else [0, 0])


def let_go_on_rank(_: int) -> bool:
    model: nn.Module = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    prune.prune_model(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return gone() is None


def test_a_model_that_nobody_needs_is_let_go(pool: ProcessPool) -> None:
    """Through hooks of parameters, where Python finds no cycles, it would stay, and gloo's threads with it."""
    assert pool.run(2, let_go_on_rank) == [True, True]


def by_hand_on_rank(_: int, is_sharded: bool) -> None:
    model = nn.Linear(300, 300)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer)

    def steps_hold() -> None:
        bits = local_of(model.weight).detach().view(torch.int32)  # a kept weight that becomes zero is -0.0
        held = bits == 0
        for _ in range(2):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            assert torch.equal(bits == 0, held)

    with torch.no_grad():
        for smallest in (0.01, 0.2):  # each shows in the sample
            local_of(model.weight).data.masked_fill_(local_of(model.weight).abs() < smallest, 0)
            with torch.enable_grad():
                steps_hold()
        changed = model.weight.clone()
        local_of(changed)[0, 1:3] = 0  # a sample does not look at these
        model.weight.copy_(changed)
    steps_hold()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_zeros_written_by_hand(pool: ProcessPool, is_sharded: bool) -> None:
    """torch counts no write to ``data``, and of a large weight only a sample is looked at before a step."""
    pool.run(1 + is_sharded, by_hand_on_rank, is_sharded)


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
    """Matrices of Shampoo have the shape of a square weight, and are none; packed moments are."""
    torch.manual_seed(0)
    model = nn.Linear(12, 12, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    packed = Packed(torch.zeros(12, 12)).copy_(torch.full((12, 12), 2.0))
    optimizer.state[model.weight] = {name: torch.ones(12, 12) for name in ("exp_avg", "pre_cond_0", "inv_pre_cond_1")}
    optimizer.state[model.weight]["packed"] = packed
    prune.prune_model(model, 0.5)
    hold_zeros(model, optimizer)
    model(torch.randn(4, 12)).sum().backward()
    optimizer.step()
    kept = model.weight != 0
    state = optimizer.state[model.weight]
    assert torch.equal(state["exp_avg"], kept.float())
    assert torch.equal(state["pre_cond_0"] + state["inv_pre_cond_1"], torch.full((12, 12), 2.0))
    assert torch.equal(torch.zeros(12, 12).copy_(packed), 2.0 * kept)


@pytest.mark.filterwarnings("default")  # of torch.compile, which torchao calls
@pytest.mark.parametrize("bits", ["8", "4", "Fp8"])
def test_moments_of_torchao(bits: str) -> None:
    name = f"AdamW{bits}{'' if bits == 'Fp8' else 'bit'}"
    make = getattr(pytest.importorskip("torchao.optim", reason="needs torchao; the row above packs as it does"), name)
    torch.manual_seed(0)
    model = nn.Linear(128, 128)  # smaller ones are not packed
    optimizer = make(model.parameters(), lr=1e-2)

    def train() -> None:
        for _ in range(2):
            model(torch.randn(8, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    prune.prune_model(model, 0.5)
    hold_zeros(model, optimizer)
    held = model.weight == 0
    train()
    assert torch.equal(model.weight == 0, held)
    state = optimizer.state[model.weight]
    assert not state["exp_avg"].dequantize().view(128, 128)[held].any()
    if bits != "4":  # its squares have no zero
        assert not state["exp_avg_sq"].dequantize().view(128, 128)[held].any()
