"""A block is fitted as a whole as a plain loop in one process does it, and to the same bits on any number of ranks."""

from __future__ import annotations

import copy
import math
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot import block, block_fit, driver
from distprune.oneshot.block_fit import BlockFit, fit_block, num_steps
from distprune.oneshot.memory_plan import FIT, plan_walk
from distprune.oneshot.model_shape import shape_of
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.walk_costs import WalkRequest
from tests.architectures import samples, tiny_model
from tests.device_path import Memory
from tests.oneshot.alike import matrices, sharded
from tests.oneshot.test_tensor_parallel import wrapped
from tests.oneshot_oracle import first_inputs
from tests.worlds import ProcessPool
from tests.wrapped import whole

TOKENS = samples(9, 32)
HOW: dict[str, Any] = {"method": "admm", "pattern": "2:4"}
EXACT: dict[str, Any] = {"method": "magnitude", "targets": "dense", "pattern": "2:4"}


def fitted_plainly(block: nn.Module, dense: nn.Module, model: nn.Module, size_of_batch: int) -> float:
    """Fit ``block``, the first of ``model``, to what ``dense`` puts out; return the relative error after."""
    calls = [first_inputs(model, decoder_blocks(model)[0][1], tokens[None]) for tokens in TOKENS]

    def run(of: nn.Module, number: int) -> torch.Tensor:
        args, kwargs = calls[number]
        output = of(*args, **kwargs)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    with torch.no_grad():
        wanted = [run(dense, number) for number in range(len(TOKENS))]
        size = sum(float((of - args[0]).square().sum()) for of, (args, _) in zip(wanted, calls, strict=True))
    unit = wanted[0].numel() * len(wanted) / size
    fit = {name: p for name, p in block.named_parameters() if name != "mlp.gate.weight"}  # a router
    kept = {name: (p != 0) | (p.ndim == 1) for name, p in fit.items()}
    sizes = {name: p.square().mean().sqrt() / 0.1 if p.ndim > 1 else p.abs().mean() for name, p in fit.items()}
    rates = {name: 1e-3 * float(of.detach()) for name, of in sizes.items()}
    rates |= {name: rates[name[:-4] + "weight"] for name in fit if name.endswith("bias")}
    first, second = ({name: torch.zeros_like(p) for name, p in fit.items()} for _ in range(2))
    batches: list[list[int]] = []
    for epoch in range(2):
        starts = list(range(0, len(TOKENS), size_of_batch))
        random.Random(f"0:0:{epoch}").shuffle(starts)
        batches += [list(range(len(TOKENS)))[start : start + size_of_batch] for start in starts]
    for step, batch in enumerate(batches, 1):
        loss = sum((unit * (run(block, number) - wanted[number]).square().sum() for number in batch), torch.zeros(()))
        gradients = dict(zip(fit, torch.autograd.grad(loss, list(fit.values())), strict=True))
        done = (step - 1) / (len(batches) - 1)  # a warm-up of one step
        rate = 1.0 if step == 1 else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        with torch.no_grad():
            for name, p in fit.items():
                gradient = gradients[name] * kept[name]
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
                p.sub_(rates[name] * rate * mean / (square.sqrt() + 1e-8))
    with torch.no_grad():
        error = sum(float((run(block, number) - wanted[number]).square().sum()) for number in range(len(TOKENS)))
    return math.sqrt(error / size)


@pytest.mark.parametrize(
    ("architecture", "most_batches", "size"), [("llama", 32, 4), ("gpt2", 32, 4), ("mixtral", 2, 5)]
)
def test_as_a_plain_loop(architecture: str, most_batches: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fit, "_MOST_BATCHES", most_batches)
    changes = {"n_layer" if architecture == "gpt2" else "num_hidden_layers": 1}
    dense, plain, model = (tiny_model(architecture, **changes) for _ in range(3))
    prune_blocks(plain, TOKENS, **HOW, refit="none")
    before = copy.deepcopy(plain)
    error = fitted_plainly(decoder_blocks(plain)[0][1], decoder_blocks(dense)[0][1], dense, size)
    fit = prune_blocks(model, TOKENS, **HOW).blocks[0].fit
    assert fit is not None
    assert fit.after < 0.99 * fit.before
    assert fit.after == pytest.approx(error, rel=1e-4)
    for (name, own), wanted, old in zip(model.named_parameters(), plain.parameters(), before.parameters(), strict=True):
        off, moved = ((of - wanted).detach().norm() for of in (own, old))
        # Softmax does not feel the biases of keys: their gradients are rounding errors.
        assert off <= 0.01 * moved or name.endswith("c_attn.bias"), name
    for name, weight in matrices(model).items():
        assert torch.equal(weight == 0, matrices(before)[name] == 0)
        assert not (weight.signbit() & (weight == 0)).any()


def pruned(rank: int, layout: Any, dtype: torch.dtype, fault: str = "") -> tuple[Any, ...]:
    """Prune by magnitude, without targets for single layers: what is fitted then has the same bits everywhere."""
    if isinstance(layout, str) and "tp" in layout:
        model = wrapped(layout, "llama")
    else:
        model = tiny_model("llama").to(dtype)
        model = model if layout in ("plain", "offload") else sharded(model, layout)
    if fault and rank == 1:
        decoder_blocks(model)[0][1].register_forward_hook(lambda _, __, output: failing(fault, output))
    told: Any
    asked = {**EXACT, "refit": "none" if fault == "none" else "block", "offload": layout == "offload"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "way_to_target", lambda *_: {})
        try:
            told = [of.fit for of in prune_blocks(model, TOKENS, **asked).blocks]
        except (MemoryError, ValueError) as error:
            told = repr(error)
    return {name: whole(p) for name, p in model.named_parameters()}, told


def failing(fault: str, output: torch.Tensor) -> None:
    """Raise where gradients are asked for, or spoil them."""
    if output.requires_grad and fault == "raises":
        raise MemoryError("no room")
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]


def alone(dtype: torch.dtype) -> tuple[Any, ...]:
    return pruned(0, "plain", dtype)


@pytest.mark.parametrize(
    ("world_size", "layouts", "dtype"),
    [(2, ["plain", "offload", None], torch.bfloat16), (2, [None], torch.float32), (4, [(2, 2)], torch.float32)],
    ids=["2-bf16", "2", "4-hsdp"],
)
@pytest.mark.sampled(2)
def test_any_number_of_ranks(pool: ProcessPool, world_size: int, layouts: list[Any], dtype: torch.dtype) -> None:
    weights, fits = alone(dtype)
    for layout in layouts:
        for of_rank, fits_there in pool.run(world_size, pruned, layout, dtype):
            assert fits_there == fits
            assert all(torch.equal(of_rank[name], weight) for name, weight in weights.items())


@pytest.mark.sampled(1)
def test_tensor_parallel(pool: ProcessPool) -> None:
    """Activations differ from one rank's in their last bits, but not with more tensor-parallel groups."""
    (weights, fits), *_ = pool.run(2, pruned, "tp", torch.float32)
    assert all(fit.after < 0.99 * fit.before for fit in fits)
    for of_rank, fits_there in pool.run(4, pruned, "fsdp-tp", torch.float32):
        assert fits_there == fits
        assert all(torch.equal(of_rank[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("fault", "message"), [("raises", "no room"), ("spoils", "'model.layers.0': .* in calibration sample [13579]")]
)
@pytest.mark.sampled(1)
def test_an_error_on_one_rank_is_raised_on_all(pool: ProcessPool, fault: str, message: str) -> None:
    first = {name: p for name, p in pruned(0, "plain", torch.float32, "none")[0].items() if "layers.0" in name}
    for weights, error in pool.run(2, pruned, None, torch.float32, fault):
        assert re.search(message, error)
        assert all(torch.equal(weights[name], p) for name, p in first.items())  # as before the fit


def test_what_blocks_share_stays() -> None:
    model = tiny_model("llama")
    first, second = (of for _, of in decoder_blocks(model)[:2])
    attention, mlp = "input_layernorm.weight", "post_attention_layernorm.weight"
    second.input_layernorm = first.get_submodule("input_layernorm")
    shared, own = (first.get_parameter(name).detach().clone() for name in (attention, mlp))
    prune_blocks(model, TOKENS, **HOW)
    assert torch.equal(first.get_parameter(attention), shared)
    assert not torch.equal(first.get_parameter(mlp), own)


def test_rounds_and_memory() -> None:
    """As ``fit_block`` and the plan say; large matrices, of which a gradient of each window would stand out."""
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    asked = WalkRequest(
        1, len(TOKENS), len(TOKENS[0]), "admm", pairs=True, by_row=True, by_layer=True, has_targets=True, fits=True
    )
    plan = plan_walk(shape_of(model), asked).parts[FIT]
    works: list[Memory] = []

    def counted(*arguments: Any) -> BlockFit | None:
        comm = arguments[0]
        before = comm.traffic.copy()
        with Memory() as work:
            found = fit_block(*arguments)
        works.append(work)
        assert (comm.traffic - before).num_rounds == 8 + 2 * num_steps(len(TOKENS))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "fit_block", counted)
        prune_blocks(model, TOKENS, **HOW)
    assert 0.85 * plan.device <= works[0].peak <= 1.15 * plan.device


def test_inference_mode_is_refused() -> None:
    model = tiny_model("llama")
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        prune_blocks(model, TOKENS, **HOW, refit="block")
