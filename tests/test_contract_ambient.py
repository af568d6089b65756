"""The promise under whatever the process has set for its models: the same answers, with ``==``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from _pytest.mark.structures import ParameterSet
from torch import nn
from typing_extensions import override

import distprune as prune
from distprune.checkpoint.hf_load import load_model
from distprune.jobs import StreamedJob, run_streamed_job
from distprune.removal.choose_units import choose_units
from distprune.removal.layers import order_layers
from distprune.scores.base import Elements
from tests import test_contract, test_contract_reparametrized as reparametrized
from tests.ambient import STATES, ambient, of_process, of_thread
from tests.contract import SCRIPTS
from tests.hf_models import make_model
from tests.jobs.test_prune import contents
from tests.layouts import LAYOUTS, Layout
from tests.oneshot.alike import sharded
from tests.sampling import Combination, over_layouts
from tests.test_contract import DTYPES, KINDS, SCOPES, SCORES, oracle, whole_model
from tests.worlds import run_threads
from tests.wrapped import whole


def pairs_over_layouts(*axes: Sequence[Any], **layouts: Any) -> list[ParameterSet]:
    """Return what a contract without a state runs by default: every pair of values."""
    return [row for row in over_layouts(*axes, **layouts) if not row.marks]


@pytest.mark.parametrize(("layout", "world_size", "combinations"), pairs_over_layouts(SCORES, SCOPES, DTYPES, KINDS))
@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(5)
def test_in_place(state: str, layout: Layout, world_size: int, combinations: list[Combination]) -> None:
    cases = []
    for score, scope, dtype, (kind, sparsity) in combinations:
        model = whole_model(kind, dtype)
        cases.append((score, scope, sparsity, model, oracle(model, score, scope, sparsity)))
    with of_process(state):
        run_threads(world_size, test_contract.check_rank, layout, world_size, cases, partial(of_thread, state))


@pytest.mark.parametrize(
    ("layout", "world_size", "combinations"),
    pairs_over_layouts(
        SCRIPTS, reparametrized.VALUES, layouts=[layout for layout in LAYOUTS if layout.name in reparametrized.NAMES]
    ),
)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(5)
def test_reparametrized(state: str, layout: Layout, world_size: int, combinations: list[Combination]) -> None:
    with_scalars = layout.name != "last-half"
    cases = [reparametrized.made(script, kind, dtype, with_scalars) for script, (kind, dtype) in combinations]
    with of_process(state):
        run_threads(world_size, reparametrized.check_rank, layout, world_size, cases, partial(of_thread, state))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), MLP()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.mlp(self.norm(x))
        return output


class Decoder(nn.Module):
    """All its products are in linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    @override
    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(x))


WIDTH, VOCABULARY = 16, 61
TOKENS = torch.arange(6 * 20).view(6, 20) ** 2 % VOCABULARY

Answer = tuple[object, list[torch.Tensor]]


def pruned(model: nn.Module, **arguments: Any) -> object:
    blocks = prune.prune_blocks(model, TOKENS, **arguments).blocks
    return [layer for block in blocks for layer in block.layers]


def smaller(model: nn.Module, **arguments: Any) -> object:
    kept = choose_units(model, TOKENS, {"mlp": 0.75}, **arguments).kept
    return {key: index.tolist() for key, index in kept.items()}


CALIBRATED: dict[str, Callable[[nn.Module], object]] = {
    "wanda": lambda model: pruned(model, method="wanda", pattern="row", sparsity=0.5),
    "own score": lambda model: pruned(model, method=Projected(), pattern="row", sparsity=0.5),
    "sparsegpt": lambda model: pruned(model, method="sparsegpt", pattern="2:4", targets="own"),
    "admm": lambda model: pruned(model, method="admm", pattern="row", sparsity=0.5, targets="own"),
    "sparsegpt towards dense": lambda model: pruned(
        model, method="sparsegpt", pattern="row", sparsity=0.5, targets="dense"
    ),
    "admm towards dense": lambda model: pruned(model, method="admm", pattern="block:4", sparsity=0.5, targets="dense"),
    "allocate": lambda model: prune.allocate(model, TOKENS, 0.5),
    "units": smaller,
    "units by gradients": lambda model: smaller(model, criterion="taylor"),
    "layers": lambda model: order_layers(model, TOKENS, 1, criterion="influence"),
    "layers by loss": lambda model: order_layers(model, TOKENS, 1),
    "perplexity": lambda model: prune.perplexity(model, TOKENS.flatten(), sequence_length=20),
}


class Projected(prune.Score):
    """With a product, and numbers without a dtype, of one's own."""

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        weight = elements.weight.float()
        return weight.abs() * (weight[:, None] @ torch.tensor([[1 / 3]], device=weight.device)).squeeze(1).abs()


def answer(call: Callable[[nn.Module], object], state: str, *, is_around: bool) -> Answer:
    """Prune a model under ``state``, or with ``state`` around nothing but its products."""
    torch.manual_seed(0)
    model = Decoder()
    for module in model.modules() if not is_around else ():
        if isinstance(module, nn.Linear):
            module.forward = partial(_within, module.forward, state)  # type: ignore[method-assign]
    if dist.is_initialized():
        sharded(model)
    around: AbstractContextManager[object] = ambient(state) if is_around else nullcontext()
    if state == "matmul precision" and not is_around:  # the others do not reach into products of a backward pass
        around = patch.object(torch.autograd, "grad", partial(_within, torch.autograd.grad, state))
    with around:
        report = call(model)
    return report, [whole(parameter).clone() for parameter in model.parameters()]


def _within(products: Callable[..., Any], state: str, *arguments: Any, **named: Any) -> Any:
    with ambient(state):
        return products(*arguments, **named)


def check_calibrated(_: int, name: str, state: str) -> None:
    found, weights = answer(CALIBRATED[name], state, is_around=True)
    expected, own = answer(CALIBRATED[name], state, is_around=False)
    assert found == expected
    assert all(map(torch.equal, weights, own))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(20)
def test_calibrated(request: pytest.FixtureRequest, state: str, name: str, num_ranks: int) -> None:
    """The state is for the model's own products."""
    if num_ranks == 1:
        check_calibrated(0, name, state)
    else:
        request.getfixturevalue("pool").run(num_ranks, check_calibrated, name, state)


@pytest.mark.parametrize("state", STATES)
def test_held(state: str) -> None:
    """Training comes to what masking by hand comes to, both under the state."""
    torch.manual_seed(0)
    model = Decoder()
    by_hand = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9) for of in (model, by_hand)]
    with ambient(state):
        masks = prune.compute_masks(model, 0.6, pattern="row")
        prune.prune_model(model, 0.6, pattern="row")
        hold = prune.hold_zeros(model, optimizers[0])
        own = dict(by_hand.named_parameters())
        for step in range(4):
            for name, mask in masks.items():
                own[name].data.masked_fill_(~mask, 0)
                if step:
                    cast(torch.Tensor, own[name].grad).masked_fill_(~mask, 0)
            for of, optimizer in zip((model, by_hand), optimizers, strict=True):
                if step:
                    optimizer.step()
                torch.clear_autocast_cache()
                optimizer.zero_grad()
                of(TOKENS[step : step + 1]).logits.float().square().mean().backward()
        hold.finish()
    for name, mask in masks.items():
        own[name].data.masked_fill_(~mask, 0)
    assert all(torch.equal(weight, own[name]) for name, weight in model.named_parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("dense") / "model", dtype=torch.bfloat16)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(3)
def test_files(folder: Path, tmp_path: Path, state: str) -> None:
    """Models are loaded, with the buffers that are in no file, and files pruned, as ever."""
    expected = load_model(folder)
    run_streamed_job(StreamedJob(model=str(folder), output=str(tmp_path / "expected"), sparsity=0.4))
    with ambient(state):
        model = load_model(folder)
        run_streamed_job(StreamedJob(model=str(folder), output=str(tmp_path / "found"), sparsity=0.4))
        prune.prune_model(model, 0.4)
    for (name, tensor), (_, wanted) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(tensor, wanted), name
    prune.prune_model(expected, 0.4)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")
