"""What only FSDP2 does to a pruned model: gathers, offloads, reloads, moves, accumulates, compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import distprune as prune
from tests.worlds import ProcessPool, drawing
from tests.wrapped import PRUNED, Wrapped, batches, pairs_of, transformer, whole, wrap

Parameters = dict[str, torch.Tensor]
SIZE = 256  # rows and columns: a shard on 4 ranks is larger than anything of fixed size


def prune_all(model: nn.Module, amount: float = 0.5) -> None:
    prune.prune_each(pairs_of(model), prune.L1Unstructured, amount=amount)


def trained(wrapped: Wrapped, num_steps: int = 3, first: int = 0) -> Parameters:
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1, weight_decay=0.1)
    for tokens in batches(first + num_steps)[first:]:
        wrapped.step(tokens)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(tensor) for name, tensor in wrapped.model.state_dict().items()}


def assert_close(got: Parameters, wanted: Parameters, atol: float = 1e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.allclose(got[name].float(), values.float(), rtol=0, atol=atol), name


def alone(num_steps: int = 3, first: int = 0) -> Parameters:
    model = transformer()
    prune_all(model)
    return trained(Wrapped(model, 0, 1), num_steps, first)


def accumulated_on_rank(_: int) -> Parameters:
    """Two batches before one step, the first of them without reducing gradients."""
    wrapped = wrap("fsdp2", transformer())
    prune_all(wrapped.model)
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1)
    model = cast(FSDPModule, wrapped.model)
    first, second = batches(2)
    model.set_requires_gradient_sync(False)
    wrapped.step(first)
    model.set_requires_gradient_sync(True)
    wrapped.step(second)
    wrapped.step(first)  # and into gradients that are there already
    optimizer.step()
    for module, _name in pairs_of(wrapped.model):
        grad = module.get_parameter("weight_orig").grad
        assert grad is not None
        assert not whole(grad)[whole(module.get_buffer("weight_mask")) == 0].any()
    return {name: whole(tensor) for name, tensor in wrapped.model.state_dict().items()}


def test_gradient_accumulation_without_sync(pool: ProcessPool) -> None:
    wrapped = Wrapped(transformer(), 0, 1)
    prune_all(wrapped.model)
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1)
    for i in (0, 1, 0):
        wrapped.step(batches(2)[i])
    optimizer.step()
    for got in pool.run(2, accumulated_on_rank):
        assert_close(got, wrapped.model.state_dict())


def mixed_on_rank(rank: int) -> tuple[Parameters, list[str]]:
    model = transformer()
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    prune_all(model)
    seen: list[str] = []
    module = pairs_of(model)[0][0]
    module.register_forward_pre_hook(lambda m, _: seen.append(f"{m.weight.dtype} {int((m.weight == 0).sum())}"))
    got = trained(Wrapped(model, rank, 2))
    assert got["layers.0.up.weight_orig"].dtype is torch.float32
    return got, seen


def test_mixed_precision(pool: ProcessPool) -> None:
    for got, seen in pool.run(2, mixed_on_rank):
        assert seen == ["torch.bfloat16 72"] * 3
        assert_close(got, alone(), atol=0.05)


def in_backward_on_rank(_: int, layout: str) -> Parameters:
    """Step within the backward pass by hooks that were there before the masks; return what the optimizer has seen."""
    wrapped = wrap(layout, transformer())
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in wrapped.model.named_parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.01)

        def step(parameter: torch.Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert parameter.grad is not None
            seen[name] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    prune_all(wrapped.model)
    for tokens in batches(3):
        wrapped.step(tokens)
    return {name: whole(tensor) for name, tensor in wrapped.model.state_dict().items()} | {
        f"{name} gradient": whole(gradient) for name, gradient in seen.items()
    }


@pytest.mark.parametrize("layout", ["fsdp2", "offload", "tp"])
@pytest.mark.sampled(1)
def test_an_optimizer_within_backward_that_was_there_first(pool: ProcessPool, layout: str) -> None:
    expected = in_backward_on_rank(0, "plain")
    for module, name in [(f"layers.{i}.{name}", "weight") for i in range(2) for name in PRUNED]:
        assert not expected[f"{module}.{name} gradient"][expected[f"{module}.{name}_mask"] == 0].any()
    for got in pool.run(2, in_backward_on_rank, layout):
        assert_close(got, expected, atol=1e-5)
        for name in [name for name in got if name.endswith(" gradient")]:
            mask = got.get(name.replace(" gradient", "_mask"))
            assert mask is None or not got[name][mask == 0].any(), name


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every tensor an operation returns; those that FSDP2 itself gathers are announced to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, torch.dtype, int]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self.seen.append((str(func), tensor.dtype, tensor.numel()))
        return out


def largest_on_rank(rank: int, is_pruned: bool) -> tuple[set[tuple[str, int]], int]:
    """Return the large tensors of a step by operation, and the largest of any bool tensor."""
    with drawing(0):
        model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False))
    mesh = init_device_mesh("cpu", (4,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Largest() as watch:
        if is_pruned:
            prune.l1_unstructured(model[0], "weight", 0.5)
            prune.ln_structured(model[0], "weight", 0.2, 2, 1)
            prune.l1_unstructured(model[1], "weight", 0.5)
        selection = len(watch.seen)
        model(torch.full((2, SIZE), float(rank))).sum().backward()
    bools = max((numel for _, dtype, numel in watch.seen if dtype is torch.bool), default=0)
    if is_pruned:  # samples and counts, of fixed size, are smaller than a shard here
        assert max(numel for _, dtype, numel in watch.seen[:selection] if dtype.is_floating_point) <= SIZE * SIZE // 4
    return {(name, numel) for name, _, numel in watch.seen[selection:] if numel >= SIZE * SIZE}, bools


def test_no_rank_holds_a_whole_mask_or_another_unsharded_copy(pool: ProcessPool) -> None:
    dense, _ = pool.run(4, largest_on_rank, False)[0]
    assert dense, "the watch sees FSDP2's own gathered weights"
    for large, largest_bool in pool.run(4, largest_on_rank, True):
        # Views of the gathered weight are free; nothing else is as large as a weight but FSDP2's own tensors.
        assert {name for name, _ in large} <= {name for name, _ in dense} | {"aten.view.default", "aten.detach.default"}
        assert max(numel for _, numel in large) == max(numel for _, numel in dense)
        assert 0 < largest_bool <= SIZE * SIZE // 4


def compiled_on_rank(_: int, layout: str, what: str) -> list[Parameters]:
    results = []
    for compiles in (False, True):
        torch._dynamo.reset()
        wrapped = wrap(layout, transformer())
        prune_all(wrapped.model)
        parts = [wrapped.model] if what == "whole" else wrapped.model.get_submodule("layers").children()
        for part in parts if compiles else ():
            part.compile(backend="aot_eager")
        results.append(trained(wrapped))
    return results


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at what a block is called with
@pytest.mark.parametrize("what", ["whole", "blocks"])
@pytest.mark.parametrize(("layout", "world_size"), [("plain", 1), ("fsdp2", 2)])
@pytest.mark.whole
def test_compiled_is_eager(pool: ProcessPool, layout: str, world_size: int, what: str) -> None:
    for eager, compiled in pool.run(world_size, compiled_on_rank, layout, what):
        assert_close(compiled, eager)


def saved_on_rank(_: int, path: str) -> None:
    wrapped = wrap("fsdp2", transformer())
    prune_all(wrapped.model)
    trained(wrapped)
    save(get_model_state_dict(wrapped.model), checkpoint_id=path)


def loaded_on_rank(_: int, path: str, layout: str) -> Parameters:
    """Load into a model with other weights and another mask, and go on training."""
    wrapped = wrap(layout, transformer(seed=5))
    prune_all(wrapped.model, 0.2)
    state = get_model_state_dict(wrapped.model)
    load(state, checkpoint_id=path)
    set_model_state_dict(wrapped.model, state)
    for module, _name in pairs_of(wrapped.model) if layout == "fsdp2" else ():
        assert isinstance(module.weight_mask, DTensor)
        assert module.weight_mask.dtype is torch.bool
    return trained(wrapped, first=3)


@pytest.mark.whole
def test_checkpoint_of_four_ranks_on_two_and_one_and_plain(pool: ProcessPool, tmp_path: Path) -> None:
    path, wanted = str(tmp_path / "checkpoint"), alone(num_steps=6)
    pool.run(4, saved_on_rank, path)
    for world_size, layout in ((2, "fsdp2"), (1, "fsdp2"), (1, "plain")):
        for got in pool.run(world_size, loaded_on_rank, path, layout):
            assert_close(got, wanted)


def pruned_first_on_rank(_: int, by: str, brings_over: str) -> Parameters:
    """Prune, then shard; bring the masks over by the documented call, or by pruning again."""
    model = transformer()
    methods: Any = torch_prune if by == "torch" else prune
    for module, name in pairs_of(model):
        methods.l1_unstructured(module, name, 0.5)
    wrapped = wrap("fsdp2", model)
    # Until then every rank multiplies by the whole mask, as PyTorch does.
    before = trained(wrapped, 1)
    assert before["layers.0.up.weight_mask"].dtype is torch.float32
    if brings_over == "call":
        prune.shard_masks(model)
        prune.shard_masks(model)  # nothing is left to do
    for module, name in pairs_of(model):
        if brings_over == "pruning again":
            prune.l1_unstructured(module, name, 0)
        mask = module.get_buffer("weight_mask")
        assert isinstance(mask, DTensor)
        assert mask.dtype is torch.bool
        assert mask.to_local().numel() < mask.numel()
        assert isinstance(module.weight, DTensor)
    after = trained(wrapped, 2, 1)
    for module, name in pairs_of(model):
        prune.ln_structured(module, name, 3, 1, 0)
        hook = next(hook for hook in module._forward_pre_hooks.values() if isinstance(hook, prune.PruningContainer))
        assert len(hook) == 2 + (brings_over == "pruning again")
    return after


@pytest.mark.parametrize("by", ["torch", "distprune"])
@pytest.mark.parametrize("brings_over", ["call", "pruning again"])
@pytest.mark.sampled(1)
def test_pruned_first_and_sharded_after(pool: ProcessPool, by: str, brings_over: str) -> None:
    for got in pool.run(2, pruned_first_on_rank, by, brings_over):
        assert_close(got, alone())


def from_meta_on_rank(_: int, prunes_on_meta: bool) -> Parameters:
    source = transformer()
    prune_all(source)
    with torch.device("meta"):
        model = transformer()
    if prunes_on_meta:
        for module, name in pairs_of(model):
            prune.identity(module, name)
    wrapped = wrap("fsdp2", model)
    if prunes_on_meta:
        prune.shard_masks(model)
    model.to_empty(device="cpu")
    if not prunes_on_meta:
        source = transformer()
    state = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    for name, target in model.state_dict().items():
        if isinstance(target, DTensor):
            spread = distribute_tensor(state[name], target.device_mesh, target.placements, src_data_rank=None)
            state[name] = spread.to(target.dtype)
    model.load_state_dict(state, assign=not prunes_on_meta)
    if not prunes_on_meta:
        prune_all(model)
    return trained(wrapped)


@pytest.mark.parametrize("prunes_on_meta", [False, True])
@pytest.mark.sampled(1)
def test_built_on_the_meta_device(pool: ProcessPool, prunes_on_meta: bool) -> None:
    for got in pool.run(2, from_meta_on_rank, prunes_on_meta):
        assert_close(got, alone())


def moved_on_rank(_: int) -> Parameters:
    """Change the dtype, reload with assignment, freeze and thaw: the mask stays before the gather."""
    wrapped = wrap("fsdp2", transformer())
    prune_all(wrapped.model)
    wrapped.model.to(torch.float64)
    double = trained(wrapped)
    state = {name: tensor.clone() for name, tensor in wrapped.model.state_dict().items()}
    wrapped.model.load_state_dict(state, assign=True)
    module = pairs_of(wrapped.model)[0][0]
    module.get_parameter("weight_orig").requires_grad_(False)
    frozen = whole(module.get_parameter("weight_orig"))
    trained(wrapped, 1, 3)
    assert torch.equal(whole(module.get_parameter("weight_orig")), frozen)
    module.get_parameter("weight_orig").requires_grad_(True)
    prune.l1_unstructured(module, "weight", 0)
    trained(wrapped, 1, 4)
    grads = []
    wrapped.step(batches(1)[0])
    for module, _name in pairs_of(wrapped.model):
        grad = module.get_parameter("weight_orig").grad
        assert grad is not None
        grads.append(bool(whole(grad)[whole(module.get_buffer("weight_mask")) == 0].any()))
    assert not any(grads)
    return double


def test_moved_and_reloaded(pool: ProcessPool) -> None:
    model = transformer().to(torch.float64)
    prune_all(model)
    wanted = trained(Wrapped(model, 0, 1))
    for double in pool.run(2, moved_on_rank):
        assert double["layers.0.up.weight_orig"].dtype is torch.float64
        assert_close(double, wanted)


def product_on_rank(_: int, num_rows: int, resharded: int | bool) -> None:
    """Outside of forward the product is sharded and fresh, also when the weights are gathered, or over fewer ranks."""
    model: Any = nn.Sequential(nn.Linear(6, num_rows), nn.Linear(num_rows, 4))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=resharded)
    layer = model[0]
    prune.l1_unstructured(layer, "weight", 0.5)
    weight = layer.weight
    assert isinstance(weight, DTensor)
    assert torch.equal(whole(weight), whole(layer.weight_orig) * whole(layer.weight_mask))
    model(torch.ones(2, 6))
    after = layer.weight
    assert isinstance(after, DTensor) == bool(resharded)  # reshard_after_forward=False leaves it gathered, and masked
    assert torch.equal(whole(after.detach()), whole(weight))
    layer.reshard()
    assert torch.equal(whole(layer.weight), whole(weight))
    prune.remove(layer, "weight")
    assert torch.equal(whole(layer.weight), whole(weight))
    model(torch.ones(2, 6)).sum().backward()
    assert whole(layer.weight.grad).all()  # nothing masks it any more


@pytest.mark.parametrize(("world_size", "num_rows", "resharded"), [(2, 5, False), (4, 8, 2)])
def test_product_outside_of_forward(pool: ProcessPool, world_size: int, num_rows: int, resharded: int | bool) -> None:
    pool.run(world_size, product_on_rank, num_rows, resharded)
