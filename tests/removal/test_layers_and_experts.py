"""Which layers and experts stay: by plain forwards in one process, and the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from typing_extensions import override

from distprune.calibration.catch_inputs import catch_inputs, walking
from distprune.calibration.walk import Walk
from distprune.collectives.communicator import communicator
from distprune.evaluation import Continuation, log_likelihoods
from distprune.models.decoder_blocks import decoder_blocks
from distprune.removal.experts import choose_experts
from distprune.removal.layers import losses_without, order_layers, skipping
from distprune.removal.shrink_model import shrink_model
from tests.architectures import samples, tiny_model
from tests.calibration.test_walk import alternating_model, block_outputs
from tests.oneshot.alike import sharded
from tests.worlds import run_threads

TOKENS = samples(5)


def layers_left(model: nn.Module, num_kept: int, **how: Any) -> list[int]:
    gone = order_layers(model, TOKENS, num_kept, **how)
    return [layer for layer in range(len(decoder_blocks(model))) if layer not in gone]


def test_skipped_layers_are_as_if_gone() -> None:
    for architecture in ("llama", "bloom"):  # a block that puts out a tensor, and one that puts out a tuple
        model: Any = tiny_model(architecture)
        kept = [block for _, block in decoder_blocks(model)][1:]
        with torch.no_grad(), skipping(model, {0}):
            skipped = model(input_ids=TOKENS, use_cache=False).logits
        assert not any("forward" in vars(block) for _, block in decoder_blocks(model))
        parent = model.model if architecture == "llama" else model.transformer
        setattr(parent, "layers" if architecture == "llama" else "h", nn.ModuleList(kept))
        model.config.num_hidden_layers = len(kept)
        with torch.no_grad():
            assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, skipped)


def test_layers_by_influence() -> None:
    model: Any = tiny_model("llama", num_hidden_layers=4)
    after = [put_out.double() for put_out in block_outputs(model, TOKENS)]
    given = [model.model.embed_tokens(TOKENS).detach().double(), *after[:-1]]
    influences = [float(1 - torch.cosine_similarity(*pair, dim=-1).mean()) for pair in zip(given, after, strict=True)]
    wanted = sorted(sorted(range(4), key=lambda i: influences[i])[2:])
    assert layers_left(model, 2, criterion="influence") == wanted


def plain_experts(model: Any, criterion: str) -> list[list[float]]:
    """Return the scores of each block's experts, by the modules' own arguments."""
    found = [[0.0] * 4 for _ in model.model.layers]

    def hook(index: int) -> Any:
        def note(module: Any, args: Any, _: Any) -> None:
            hidden, chosen, shares = args
            for token, (experts, of_token) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
                for expert, share in zip(experts, of_token, strict=True):
                    gate, up = (module.gate_up_proj[expert] @ hidden[token]).chunk(2)
                    put_out = module.down_proj[expert] @ (module.act_fn(gate) * up)
                    found[index][expert] += 1.0 if criterion == "usage" else share * float(put_out.norm())

        return note

    handles = [layer.mlp.experts.register_forward_hook(hook(i)) for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        for tokens in TOKENS:
            model(input_ids=tokens[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("criterion", ["output", "usage"])
def test_experts(criterion: Any) -> None:
    model: Any = tiny_model("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight *= 30  # else the router shares a token's experts out evenly
    kept = choose_experts(model, TOKENS, 0.5, criterion=criterion)
    scores = plain_experts(model, criterion)
    wanted = [sorted(sorted(range(4), key=lambda e: (of[e], e))[2:]) for of in scores]
    assert [units.tolist() for units in kept.values()] == wanted
    assert {kind for _, kind, _ in kept} == {"experts"}


def losses(model: nn.Module, left: list[int]) -> dict[int, float]:
    comm = communicator()
    with walking(comm, model, TOKENS[:, :-1]) as walk:
        return losses_without(comm, walk, TOKENS[:, 1:], left)


@pytest.mark.parametrize("make", [partial(tiny_model, "llama"), partial(tiny_model, "bloom"), alternating_model])
def test_losses_are_those_of_whole_forwards(make: Callable[[], nn.Module]) -> None:
    """To the bit, where a forward runs one sample; also of layers that are called in two ways."""
    model = make()
    asked = [Continuation(sample[:-1], sample[1:]) for sample in TOKENS]
    layers = list(range(len(decoder_blocks(model))))
    for left in (layers, layers[1:]):
        for index, found in losses(model, left).items():
            with skipping(model, {*layers} - {*left} | {index}):
                assert found == -math.fsum(log_likelihoods(model, asked, batch_tokens=1)[:, 0].tolist())


def test_layers_by_loss() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    wanted = [0, 1, 2, 3]
    while len(wanted) > 2:
        without = losses(model, wanted)
        wanted.remove(min(without, key=lambda layer: without[layer]))
    tried: list[tuple[int, int]] = []
    assert layers_left(model, 2, progress=lambda *done: tried.append(done)) == wanted
    assert tried == [(1, 2), (2, 2)]


def on_rank(_: int) -> Any:
    llama, mixtral = sharded(tiny_model("llama")), sharded(tiny_model("mixtral"))
    experts = choose_experts(mixtral, TOKENS, 3)
    chosen = [layers_left(llama, 2), layers_left(llama, 2, criterion="influence"), losses(llama, [0, 2])]
    return chosen, [units.tolist() for units in experts.values()]


def test_ranks_do_what_one_does() -> None:
    llama, mixtral = tiny_model("llama"), tiny_model("mixtral")
    layers = [layers_left(llama, 2), layers_left(llama, 2, criterion="influence"), losses(llama, [0, 2])]
    experts = [units.tolist() for units in choose_experts(mixtral, TOKENS, 3).values()]
    for of_rank in run_threads(3, on_rank):
        assert of_rank == (layers, experts)


def costs_on_rank(_: int, num_kept: int) -> tuple[list[int], int, int]:
    """Return the order, and how often a layer, and what is around them, is gathered, and how many rounds there are."""
    comm, model, num_gathered = communicator(), sharded(tiny_model("llama")), 0

    class Counted(DefaultAllGather):
        @override
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_gathered
            num_gathered += 1
            return super().__call__(*args, **kwargs)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Counted())
    before = comm.traffic.num_rounds
    order = order_layers(model, TOKENS, num_kept, group=comm, batch_tokens=1)
    return order, num_gathered, comm.traffic.num_rounds - before


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_walk_gathers_every_layer_once(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers are left; and walks carry as many samples as there is memory for."""
    if num_parts == 3:  # of each rank
        monkeypatch.setattr("distprune.removal.layers._MOST_BYTES", 1)
    (one, num_of_one, rounds_of_one), _ = run_threads(2, costs_on_rank, 2)
    (two, num_of_two, rounds_of_two), _ = run_threads(2, costs_on_rank, 1)
    assert (one, two) == (order_layers(tiny_model("llama"), TOKENS, 2), order_layers(tiny_model("llama"), TOKENS, 1))
    # What is around the layers, and the first one, to learn how they are called and what one puts out; and a walk.
    assert num_of_one == 2 + num_parts * (3 + 1)
    assert num_of_two == num_of_one + num_parts * (2 + 1)
    assert rounds_of_two == rounds_of_one + num_parts * (2 + 2) + 1


@pytest.mark.parametrize(
    ("architecture", "sizes"), [("mixtral", {"experts": 2}), ("llama", {"layers": 2}), ("llama", {"parameters": 0.85})]
)
def test_every_walk_offloads(architecture: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of a walk that does not would lie where there is no memory for them."""
    walks: list[bool] = []

    def caught(*args: Any, offload: bool, **more: Any) -> Walk:
        walks.append(offload)
        return catch_inputs(*args, offload=offload, **more)

    monkeypatch.setattr("distprune.calibration.catch_inputs.catch_inputs", caught)
    shrink_model(tiny_model(architecture), TOKENS, layer_criterion="influence", offload=True, **sizes)
    assert len(walks) >= 2
    assert all(walks)


@pytest.mark.parametrize("criterion", ["loss", "influence"])
def test_layers_go_in_an_order_that_does_not_depend_on_how_many_go(criterion: Any) -> None:
    llama, tried = tiny_model("llama"), list[tuple[int, int]]()
    both = order_layers(llama, TOKENS, 1, criterion=criterion)
    first = order_layers(llama, TOKENS, 2, criterion=criterion)
    assert both[:1] == first
    again = order_layers(llama, TOKENS, 1, criterion=criterion, known=first, progress=lambda *done: tried.append(done))
    assert again == both
    assert len(tried) == (1 if criterion == "loss" else 3)  # by the loss, without the first that goes
    assert order_layers(llama, TOKENS, 2, criterion=criterion, known=both) == first
    assert sorted({*range(3)} - {*both}) == layers_left(llama, 1, criterion=criterion)


def test_a_few_windows_say_which_layers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; it would take as many times as long."""
    llama = tiny_model("llama")
    of_all, of_two = order_layers(llama, TOKENS, 1), order_layers(llama, TOKENS[:2], 1)
    assert of_all != of_two
    monkeypatch.setattr("distprune.removal.layers._MOST_SAMPLES", 2)
    assert order_layers(llama, TOKENS, 1) == of_two
