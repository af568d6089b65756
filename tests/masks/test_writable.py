"""What is written into the computed weight does not vanish."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import distprune as prune
from tests.worlds import ProcessPool
from tests.wrapped import pairs_of, transformer, whole, wrap

KEEPS = torch.arange(48).view(6, 8) % 3 != 0


def layer() -> Any:
    made: Any = prune.custom_from_mask(nn.Linear(8, 6), "weight", KEEPS)
    return made


def _add(module: Any, update: torch.Tensor) -> None:
    module.weight.data += update


def _add_named(module: Any, update: torch.Tensor) -> None:
    weight = module.weight.data
    weight.add_(update)


def _add_to_rows(module: Any, update: torch.Tensor) -> None:
    for row, of_row in zip(module.weight.detach(), update, strict=True):
        row += of_row


def _set(module: Any, update: torch.Tensor) -> None:
    module.weight.data = module.weight.data.clone() + update


@torch.no_grad()
def _copy(module: Any, update: torch.Tensor) -> None:
    module.weight.copy_(module.weight + update)


@torch.no_grad()
def _assign(module: Any, update: torch.Tensor) -> None:
    module.weight[...] = module.weight + update


def _init(module: Any, update: torch.Tensor) -> None:
    nn.init._no_grad_fill_(module.weight, 0)
    assert not module.weight_orig.any()
    torch.add(module.weight_orig.detach(), update, out=module.weight.data)


ONCE: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "data +=": _add,
    "data.add_": _add_named,
    "rows of detach()": _add_to_rows,
    "data =": _set,
    "copy_": _copy,
    "[...] =": _assign,
}


@pytest.mark.parametrize("write", ONCE)
def test_a_write_goes_into_the_original(write: str) -> None:
    module = layer()
    original, before = module.weight_orig, module.weight.detach().clone()
    update = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).masked_fill(~KEEPS, 0)
    ONCE[write](module, update)  # nothing where the mask is 0: no warning
    assert module.weight_orig is original
    assert torch.equal(module.weight, before + update)
    with pytest.warns(
        UserWarning, match=f"^{int((~KEEPS).sum())} of 48 values written into 'weight' of Linear"
    ) as said:
        module.weight.data += 1.0
    assert len(said) == 1
    assert said[0].filename == __file__
    assert torch.equal(module.weight != 0, KEEPS)


def test_other_writes() -> None:
    module = layer()
    update = torch.ones(6, 8).masked_fill(~KEEPS, 0)
    _init(module, update)
    assert torch.equal(module.weight, update)
    with pytest.warns(UserWarning, match="are not kept"):
        nn.init.normal_(module.weight)
    assert int((module.weight == 1).sum()) == 0


def test_what_cannot_be_written_is_an_error_and_changes_nothing() -> None:
    module = layer()
    before = module.weight_orig.detach().clone()
    with pytest.raises(RuntimeError, match=r"'weight' of Linear is pruned, .* within torch.no_grad\(\)"):
        module.weight += 1
    for wrong in (torch.ones(8, 6), torch.ones(6, 8).half()):
        with pytest.raises(TypeError, match=r"only values of its shape \(6, 8\), dtype torch.float32"):
            module.weight.data = wrong
    assert torch.equal(module.weight_orig, before)


def test_for_all_else_it_is_a_tensor() -> None:
    module = layer()
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    assert [type(t) for t in (weight + 1, weight.clone(), weight.data.float() * 2)] == [torch.Tensor] * 3
    buffer = io.BytesIO()
    torch.save(weight.detach(), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)) is type(pickle.loads(pickle.dumps(weight.detach()))) is torch.Tensor
    (gradient,) = torch.autograd.grad(weight.square().sum(), module.weight_orig, retain_graph=True)
    assert torch.equal(gradient, 2 * weight * KEEPS)
    loss: Any = weight.sum()
    loss.backward()
    assert torch.equal(module.weight_orig.grad, KEEPS.float())
    assert weight.numpy(force=True).shape == (6, 8)


class Adapted(nn.Module):
    """A linear layer with a low-rank update, merged as PEFT's LoRA layers do."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)

    def merge(self, *, safe_merge: bool) -> Any:
        update = self.lora_B.weight @ self.lora_A.weight  # with a graph
        if safe_merge:
            weight = self.base_layer.weight.data.clone()
            weight += update
            self.base_layer.weight.data = weight
        else:
            self.base_layer.weight.data += update
        return self.base_layer


@pytest.mark.parametrize("safe_merge", [False, True])
def test_an_adapter_is_merged_and_the_zeros_stay(safe_merge: bool) -> None:
    adapted = Adapted(layer().requires_grad_(False))
    expected = (adapted.base_layer.weight + adapted.lora_B.weight @ adapted.lora_A.weight).detach() * KEEPS
    with pytest.warns(UserWarning, match="^16 of 48 values written into 'weight' of Linear are not kept"):
        merged = adapted.merge(safe_merge=safe_merge)
    assert torch.equal(merged.weight, expected)


def written_on_rank(_: int, layout: str) -> list[torch.Tensor]:
    wrapped = wrap(layout, transformer())
    prune.prune_each(pairs_of(wrapped.model), prune.L1Unstructured, amount=0.5)
    for module, _name in pairs_of(wrapped.model):
        weight: Any = module.weight
        assert isinstance(weight, DTensor)
        weight.data *= 2
        with torch.no_grad():
            weight.add_(weight.clone())
        with pytest.warns(UserWarning, match="are not kept"):
            module.weight.data = torch.ones_like(weight) + weight
        with pytest.raises(TypeError, match="and layout can be written"):
            module.weight.data = whole(weight)
        weight = module.weight
        gradient = torch.autograd.grad(weight.sum(), module.get_parameter("weight_orig"))[0]
        assert torch.equal(whole(gradient) != 0, whole(module.get_buffer("weight_mask")))
    return [whole(module.weight) for module, _name in pairs_of(wrapped.model)]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
@pytest.mark.sampled(1)
def test_of_shards(pool: ProcessPool, layout: str) -> None:
    plain = transformer()
    prune.prune_each(pairs_of(plain), prune.L1Unstructured, amount=0.5)
    modules: list[Any] = [module for module, _name in pairs_of(plain)]
    expected = [(4 * module.weight + 1) * module.weight_mask for module in modules]
    for got in pool.run(2, written_on_rank, layout):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def gathered_on_rank(_: int) -> None:
    wrapped = wrap("no-reshard", transformer())
    prune.prune_each(pairs_of(wrapped.model), prune.L1Unstructured, amount=0.5)
    wrapped.model(torch.zeros(2, 3, dtype=torch.int64))
    weight: Any = pairs_of(wrapped.model)[0][0].weight
    with pytest.raises(RuntimeError, match="reshard it first"):
        weight.data += 1


def test_of_what_fsdp2_has_gathered(pool: ProcessPool) -> None:
    pool.run(2, gathered_on_rank)


def _tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 8), layer()

    model = Tied()
    model.head.weight = model.embed.weight  # as tie_weights() of transformers does


def _fused() -> None:
    conv, norm = nn.Conv2d(3, 4, 3).eval(), nn.BatchNorm2d(4).eval()
    prune.l1_unstructured(conv, "weight", 0.5)
    torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)


def _quantized() -> None:
    module = layer()
    module.weight = nn.Parameter(module.weight.detach().round())  # as quantize_() of torchao does


@pytest.mark.parametrize("write", [_tied, _fused, _quantized])
def test_another_parameter_takes_the_place_after_remove(write: Callable[[], None]) -> None:
    with pytest.raises(
        ValueError, match=r"'weight' of .* is pruned, .* call distprune.remove\(module, 'weight'\) before"
    ):
        write()


def test_after_remove_another_parameter_takes_the_place() -> None:
    module: Any = prune.remove(layer(), "weight")
    module.weight = nn.Parameter(torch.ones(6, 8))
    assert torch.equal(module(torch.ones(1, 8)), 8 + module.bias[None])
