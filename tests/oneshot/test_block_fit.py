"""A block is fitted as a whole as a plain loop in one process does it, on any number of ranks but for rounding."""

from __future__ import annotations

import copy
import math
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from distprune.calibration.walk import Walk
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot import block, block_fit, driver
from distprune.oneshot.block_fit import batch_size, fit_block
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import EPOCHS
from distprune.shards import device
from tests.architectures import samples, tiny_model
from tests.families import family_model, tokens
from tests.oneshot.alike import matrices, sharded
from tests.oneshot.test_tensor_parallel import wrapped
from tests.oneshot_oracle import first_inputs
from tests.worlds import ProcessPool
from tests.wrapped import whole

TOKENS = samples(9, 32)
HOW: dict[str, Any] = {"method": "admm", "pattern": "2:4"}
EXACT: dict[str, Any] = {"method": "magnitude", "targets": "dense", "pattern": "2:4", "permute": "none"}


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
    rates = {name: 2e-3 * float(of.detach()) for name, of in sizes.items()}
    rates |= {name: rates[name[:-4] + "weight"] for name in fit if name.endswith("bias")}
    first, second = ({name: torch.zeros_like(p) for name, p in fit.items()} for _ in range(2))
    batches: list[list[int]] = []
    for epoch in range(EPOCHS):
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
    """Prune by magnitude, without targets for single layers: what is fitted has the same masks everywhere.

    Products of the fit are in float32, but where ``fault`` is "rounds": in bfloat16.
    """
    if isinstance(layout, str) and "tp" in layout:
        model = wrapped(layout, "llama")
    else:
        model = tiny_model("llama").to(dtype)
        model = model if layout in ("plain", "offload") else sharded(model, layout)
    if fault == "spoils" and rank == 1:
        decoder_blocks(model)[0][1].register_forward_hook(lambda _, __, output: spoil_gradient(output))
    told: Any
    asked = {**EXACT, "refit": "none" if fault == "none" else "block", "offload": layout == "offload"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "way_to_target", lambda *_: {})
        if fault == "rounds":
            patch.setattr(device, "_CPU_BFLOAT16", [lambda: True])
        try:
            told = [of.fit for of in prune_blocks(model, TOKENS, **asked).blocks]
        except ValueError as error:
            told = repr(error)
    return {name: whole(p) for name, p in model.named_parameters()}, told


def spoil_gradient(output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("world_size", "layouts", "dtype"),
    [(2, ["plain", "offload", None], torch.bfloat16), (2, [None], torch.float32), (4, [(2, 2)], torch.float32)],
    ids=["2-bf16", "2", "4-hsdp"],
)
@pytest.mark.sampled(2)
def test_any_number_of_ranks(pool: ProcessPool, world_size: int, layouts: list[Any], dtype: torch.dtype) -> None:
    weights, fits = pruned(0, "plain", dtype)
    for layout in layouts:
        for found in pool.run(world_size, pruned, layout, dtype):
            check_alike(found, (weights, fits))


def check_alike(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """But for rounding: the same masks, errors, and weights."""
    for name, weight in wanted[0].items():
        assert torch.equal(found[0][name] == 0, weight == 0), name
        off = (found[0][name] - weight).float().norm() / weight.float().norm()
        assert off < (1e-2 if weight.dtype == torch.bfloat16 else 1e-3), name
    for fit, of in zip(found[1], wanted[1], strict=True):
        assert (fit.before, fit.after) == pytest.approx((of.before, of.after), rel=1e-2)


@pytest.mark.sampled(1)
def test_tensor_parallel(pool: ProcessPool) -> None:
    (weights, fits), *_ = pool.run(2, pruned, "tp", torch.float32)
    assert all(fit.after < 0.99 * fit.before for fit in fits)
    for found in pool.run(4, pruned, "fsdp-tp", torch.float32):
        check_alike(found, (weights, fits))


@pytest.mark.parametrize("layout", [None, "tp"])
def test_products_of_gradients_may_be_rough(pool: ProcessPool, layout: Any) -> None:
    (_, fits), (_, rough) = (pool.run(2, pruned, layout, torch.float32, fault)[0] for fault in ("", "rounds"))
    for fit, exact in zip(rough, fits, strict=True):
        assert (fit.before, fit.after) == pytest.approx((exact.before, exact.after), rel=1e-3)
        assert fit.after != exact.after


def test_gradients_that_are_nan_on_one_rank_are_named_on_all(pool: ProcessPool) -> None:
    first = {name: p for name, p in pruned(0, "plain", torch.float32, "none")[0].items() if "layers.0" in name}
    for weights, error in pool.run(2, pruned, None, torch.float32, "spoils"):
        assert re.search("'model.layers.0': .* in calibration samples [0-9, ]+, while it is fitted", error)
        assert all(torch.equal(weights[name], p) for name, p in first.items())  # as before the fit


def test_what_has_no_rate_stays() -> None:
    """Biases move as fast as their weights: not at all where these are all 0."""
    model, seen = tiny_model("gpt2", n_layer=1), list[torch.Tensor]()
    layer: Any = decoder_blocks(model)[0][1].get_submodule("mlp.c_fc")
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(0.5)
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.bias.detach().clone()))
    fit = prune_blocks(model, TOKENS, **HOW).blocks[0].fit
    assert fit is not None
    assert len(seen) > EPOCHS * len(TOKENS) // batch_size(len(TOKENS))
    assert all(bool((bias == 0.5).all()) for bias in seen)


def test_what_blocks_share_stays() -> None:
    model = tiny_model("llama")
    first, second = (of for _, of in decoder_blocks(model)[:2])
    attention, mlp = "input_layernorm.weight", "post_attention_layernorm.weight"
    second.input_layernorm = first.get_submodule("input_layernorm")
    shared, own = (first.get_parameter(name).detach().clone() for name in (attention, mlp))
    prune_blocks(model, TOKENS, **HOW)
    assert torch.equal(first.get_parameter(attention), shared)
    assert not torch.equal(first.get_parameter(mlp), own)


def test_rounds_grow_with_steps_and_errors_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, fits = list[float](), list[Any]()

    def counted(*arguments: Any) -> Any:
        comm = arguments[0]
        before = comm.traffic.copy()
        fits.append(fit_block(*arguments))
        rounds.append((comm.traffic - before).num_rounds - 6)
        return fits[-1]

    monkeypatch.setattr(block, "fit_block", counted)
    runs: list[dict[str, Any]] = [{}, {"epochs": 1}, {"epochs": 8}]
    for more in runs:
        prune_blocks(tiny_model("llama", num_hidden_layers=1), TOKENS, **HOW, **more)
    num_steps = math.ceil(len(TOKENS) / batch_size(len(TOKENS)))
    assert rounds == [EPOCHS * num_steps, num_steps, 8 * num_steps]
    assert fits[0].before == fits[1].before == fits[2].before
    assert fits[2].after < fits[0].after < fits[1].after


@pytest.mark.parametrize("family", ["gemma3n_text", "xlnet"])
@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_samples_may_be_in_any_dim_of_hidden_states(family: str) -> None:
    """And parts are not batches: 9 windows in two batches, fitted in three steps an epoch."""
    fits = []
    how: dict[str, Any] = {"method": "magnitude", "targets": "dense", "refit": "block"}
    for batch_tokens in (1, 5 * 16):
        report = prune_blocks(family_model(family), tokens(9, 16), 0.5, **how, batch_tokens=batch_tokens)
        fits.append([(of.fit.before, of.fit.after) for of in report.blocks if of.fit is not None])
    assert fits[0]
    for one, other in zip(*fits, strict=True):
        assert one == pytest.approx(other, rel=1e-2)
        assert one[1] < one[0]


@pytest.mark.parametrize(
    ("said", "kind"),
    [("DefaultCPUAllocator: can't allocate memory", RuntimeError), ("no derivative", NotImplementedError)],
)
def test_where_memory_runs_out_nothing_else_is_said(
    said: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.autograd, "grad", fails)
    with pytest.raises(RuntimeError, match=said) as raised:  # NotImplementedError is one
        prune_blocks(tiny_model("llama"), samples(4), pattern="2:4")
    assert type(raised.value) is kind


def test_inference_mode_is_refused() -> None:
    model = tiny_model("llama")
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        prune_blocks(model, TOKENS, **HOW, refit="block")


@pytest.mark.parametrize("num_finished", [0, 2])
@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_what_blocks_hand_on_beside_hidden_states_is_that_of_each_stream(
    num_finished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Gemma 3n later blocks read keys and values of earlier ones, which write them into a mapping."""
    model, token_ids = family_model("gemma3n_text"), tokens(9, 16)
    dense, wanted, ours = copy.deepcopy(model), list[torch.Tensor](), list[torch.Tensor]()
    for _, module in decoder_blocks(dense):
        module.register_forward_hook(lambda *args: wanted.append(args[2]))
    with torch.no_grad():
        dense(token_ids)

    def watched(comm: Any, walk: Walk, index: int, *others: Any) -> Any:
        ours.append(torch.cat(walk.dense, walk.sample_dim).clone())
        with walk.block(index) as run, torch.no_grad():
            outputs = torch.cat([run(batch) for batch in range(walk.num_batches)], walk.sample_dim)
            in_steps = [step.calls[index].run(walk.blocks[index][1], walk.rows(step)) for step in walk.steps]
        torch.testing.assert_close(outputs, torch.cat(in_steps, walk.sample_dim))
        return fit_block(comm, walk, index, *others)

    monkeypatch.setattr(block, "fit_block", watched)
    how: dict[str, Any] = {"method": "magnitude", "targets": "dense", "refit": "block", "batch_tokens": 64}
    prune_blocks(model, token_ids, 0.5, **how, finished=lambda index: index < num_finished)
    assert len(ours) == 4 - num_finished
    for one, other in zip(ours, wanted[num_finished:], strict=True):
        torch.testing.assert_close(one, other)
