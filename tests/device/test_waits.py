"""How often the host waits for the device, and sends it tensors: ceilings, which only ever go down.

Counted with 8 matrices of 4 chunks each, so that a wait for each chunk, or each matrix, is not to be overlooked. Of
one-shot pruning what one block more takes is counted, of a model with 7 linear layers in a block, two rows at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import distprune as prune
from distprune.calibration import moments as calibration_moments
from distprune.collectives.communicator import Alone
from distprune.oneshot import rows
from distprune.removal.choose_units import choose_units
from distprune.removal.experts import choose_experts
from distprune.removal.layers import order_layers
from distprune.shards import device as device_work
from tests.architectures import samples, tiny_model
from tests.device.accelerator import DEVICE, on_rank
from tests.device.counter import Costs
from tests.selection.test_device import linear
from tests.worlds import ProcessPool

NUM_MATRICES, CHUNK = 8, 2048
PATTERNS: dict[str, dict[str, Any]] = {
    "global": {"sparsity": 0.5},
    "tensor": {"sparsity": 0.5, "scope": "tensor"},
    "random": {"sparsity": 0.5, "score": "random", "seed": 3},
    "row": {"sparsity": 0.5, "pattern": "row"},
    "2:4": {"pattern": "2:4"},
    "block": {"sparsity": 0.5, "pattern": "block:4"},
    "channels": {"sparsity": 0.5, "pattern": "channels:1"},
    "block, other shapes": {"sparsity": 0.5, "pattern": "block:4"},
    "channels, other shapes": {"sparsity": 0.5, "pattern": "channels:1"},
}
SOLVERS: dict[str, Any] = {
    "wanda": prune.Unstructured(0.5),
    "sparsegpt": prune.NByM(2, 4),
    "admm": prune.Unstructured(0.5),
    "fitted admm": prune.Unstructured(0.5),
    "permuted wanda": prune.NByM(2, 4),
}
# By call: waits of the host, and tensors that it sends. To be lowered with what lowers them, down to
# prune_model 8 and O(1), a held step 0 and 0, a step of training O(rounds) and O(1). Of one-shot pruning a wait for
# each layer is free: there is none for a window, a chunk or a column.
CEILINGS: dict[str, tuple[int, int]] = {
    "global": (4, 0),
    "tensor": (4, 3),
    "random": (5, 0),
    "row": (1, 0),
    "2:4": (1, 0),
    "block": (3, 2),
    "channels": (3, 2),
    "block, other shapes": (3, 2),
    "channels, other shapes": (3, 2),
    "held step": (0, 0),
    "training that prunes": (6, 1),  # what is held is read for the first time
    "training that regrows": (12, 6),
    "straight through": (2, 0),
    "straight through, no step": (1, 0),  # as torch.distributed.checkpoint takes one
    "wanda": (3, 0),  # inputs and new weights that are finite, of each stage, and outputs
    "permuted wanda": (19, 19),  # values and an MLP: 6 each where channels go, in turns; whether outputs are the same
    "sparsegpt": (7, 0),  # one more for the factor of each of 4 inputs
    "admm": (18, 0),  # 4 stages, two factors each, and one more for the dense stream
    "fitted admm": (22, 0),  # errors before and after, sizes of parameters twice, and whether all was finite
    "perplexity": (1, 3),  # a forward of the model waits once by itself
    "allocate": (1, 1),
    "order of layers": (3, 3),  # a forward at the beginning, and one without each of two layers
    "influences": (1, 1),
    "units": (28, 6),  # two linear layers that read units: three factors each, whatever the number of units
    "choice of 4 experts": (5, 1),  # twice to learn which tokens all experts are given, as the model does itself
    "admm of 4 experts": (9, 1),
    "a window of fitted admm": (2, 2),  # how blocks are called: in the walk, and in a step of the fit
}
# One window more, each of which is a batch.
OF_WINDOWS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "perplexity": lambda model, tokens: prune.perplexity(model, tokens, group=Alone(), batch_tokens=1),
    "allocate": lambda model, tokens: prune.allocate(model, tokens, 0.5, group=Alone(), batch_tokens=1),
    "order of layers": lambda model, tokens: order_layers(model, tokens, 1, group=Alone(), batch_tokens=1),
    "influences": lambda model, tokens: order_layers(
        model, tokens, 1, criterion="influence", group=Alone(), batch_tokens=1
    ),
    "choice of 4 experts": lambda model, tokens: choose_experts(model, tokens, 2, group=Alone(), batch_tokens=1),
    "admm of 4 experts": lambda model, tokens: prune.prune_blocks(
        model, tokens, 0.5, refit="none", group=Alone(), batch_tokens=1
    ),
    "a window of fitted admm": lambda model, tokens: prune.prune_blocks(
        model, tokens, 0.5, group=Alone(), batch_tokens=1
    ),
}
Counts = tuple[Counter[str], Counter[str]]  # waits and sends, by line


def matrices(device: torch.device) -> nn.ModuleList:
    return nn.ModuleList(linear() for _ in range(NUM_MATRICES)).to(device)


def others(device: torch.device) -> nn.ModuleList:
    """Return twice as many matrices, no two laid out alike."""
    return nn.ModuleList(nn.Linear(64, 128 + 4 * i, bias=False) for i in range(2 * NUM_MATRICES)).to(device)


def of_call(device: torch.device, name: str) -> Counts:
    model = others(device) if "other" in name else matrices(device)
    with Costs(DEVICE) as costs:
        prune.prune_model(model, **PATTERNS[name], group=Alone())
    return costs.waits, costs.sends


def of_step(device: torch.device, name: str) -> Counts:
    """Of the third step: the second time that anything is done to the masks."""
    model = matrices(device)
    optimizer = torch.optim.AdamW(model.parameters())
    if name == "held step":
        prune.prune_model(model, 0.5, group=Alone())
        prune.hold_zeros(model, optimizer, group=Alone())
    elif name.startswith("straight through"):
        prune.StraightThrough(model, optimizer, group=Alone())
    else:
        rises: dict[str, Any] = {"schedule": prune.cubic(0.8, stop=4, every=2)}
        regrows = {"schedule": prune.constant(0.8), "regrow": prune.Regrow(stop=4, every=2, by="gradient")}
        arguments = regrows if name == "training that regrows" else rises
        prune.SparseTraining(model, optimizer, **arguments, group=Alone())
    costs = Costs(DEVICE)
    for _ in range(3):
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(device)
        torch.stack([layer(inputs).square().mean() for layer in model]).sum().backward()  # type: ignore[no-untyped-call]
        if name.endswith("no step"):
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.zero_grad(set_to_none=False)
        costs = Costs(DEVICE)
        with costs:
            optimizer.step()
        optimizer.zero_grad()
    return costs.waits, costs.sends


def of_one_more(num: int, make: Callable[[int], nn.Module], call: Callable[[nn.Module, int], object]) -> Counts:
    """Of ``call`` on what ``make`` makes for ``num`` things and one more, what the last one adds."""
    counts = []
    for i in (num, num + 1):
        model = make(i)
        with Costs(DEVICE) as costs:
            call(model, i)
        counts.append((costs.waits, costs.sends))
    (waits, sends), (more_waits, more_sends) = counts
    return more_waits - waits, more_sends - sends


def llama(device: torch.device, num_blocks: int) -> nn.Module:
    return tiny_model("llama", num_hidden_layers=num_blocks, num_key_value_heads=2).to(device)


def of_block(device: torch.device, name: str) -> Counts:
    *more, method = name.split()
    how: dict[str, Any] = {"method": method, "refit": "block" if "fitted" in more else "none"}
    how |= {"permute": "channels"} if "permuted" in more else {}

    def call(model: nn.Module, _: int) -> None:
        prune.prune_blocks(model, samples(4), **how, pattern=SOLVERS[name], group=Alone())

    return of_one_more(2, partial(llama, device), call)


def of_window(device: torch.device, name: str) -> Counts:
    def make(_: int) -> nn.Module:
        if "experts" in name:
            return tiny_model("mixtral", num_local_experts=4, num_hidden_layers=1).to(device)
        return llama(device, 2)

    return of_one_more(4, make, lambda model, num: OF_WINDOWS[name](model, samples(num)))


def of_removal(device: torch.device, _: str) -> Counts:
    """Of one block more, of which MLP channels and KV groups go."""

    def call(model: nn.Module, _: int) -> None:
        choose_units(model, samples(4), {"mlp": 0.5, "kv_groups": 1}, refit="least_squares", group=Alone())

    return of_one_more(2, partial(llama, device), call)


def counted_on_rank(rank: int) -> dict[str, Counts]:
    device = on_rank(rank)
    kinds: dict[str, Callable[[torch.device, str], Counts]] = dict.fromkeys(PATTERNS, of_call)
    steps = ("held step", "training that prunes", "training that regrows")
    kinds |= dict.fromkeys((*steps, "straight through", "straight through, no step"), of_step)
    kinds |= dict.fromkeys(SOLVERS, of_block) | {"units": of_removal}
    kinds |= dict.fromkeys(OF_WINDOWS, of_window)
    of_rows = patch.object(rows, "_ON_DEVICE", 64), patch.object(calibration_moments, "_DEVICE_CHUNK", 64)
    with patch.object(device_work, "_DEVICE_CHUNK", CHUNK), of_rows[0], of_rows[1]:
        return {name: of_kind(device, name) for name, of_kind in kinds.items()}


def test_the_host_waits_and_sends_no_more_often(devices: ProcessPool) -> None:
    (found,) = devices.run(1, counted_on_rank)
    assert found.keys() == CEILINGS.keys()
    too_many = [
        f"{name}: {kind} {counts.total()} times, at most {most}: {dict(counts.most_common())}"
        for name, both in found.items()
        for kind, counts, most in zip(("waits", "sends"), both, CEILINGS[name], strict=True)
        if counts.total() > most
    ]
    assert not too_many, "\n".join(too_many)
