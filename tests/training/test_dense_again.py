"""What would make a held model dense again without a word: held, refused or warned of by name."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import distprune as prune
from distprune.training.hold import hold_zeros
from distprune.training.schedules import constant
from distprune.training.sparse_training import SparseTraining
from tests.training.optimizers import INCLUDE, check_moments, held_bits, targets
from tests.worlds import ProcessPool
from tests.wrapped import Wrapped, batches, transformer, wrap


class SAM(torch.optim.Optimizer):
    """Two steps (arXiv 2010.01412), as the implementations people copy: the optimizer inside does the second one."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-2)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
                parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @override
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class SlowWeights:
    """Every second step goes back half of the way to weights that it has kept (Lookahead, arXiv 1907.08610)."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.zero_grad = self.optimizer.zero_grad
        self.num_steps = 0
        self.slow = [parameter.detach() + 1 for parameter in self.optimizer.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for parameter, slow in zip(self.optimizer.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Lookahead(torch.optim.Optimizer):
    """The same as an optimizer whose own step runs torch's hooks."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._inside = SlowWeights(parameters)
        self.optimizer = self._inside.optimizer
        super().__init__(self.optimizer.param_groups, {})

    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._inside.step()


def post_local_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's, which calls no ``Optimizer.__init__``, and averages weights over ranks after a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        averager = PeriodicModelAverager(period=2)
        return PostLocalSGDOptimizer(torch.optim.AdamW(parameters, lr=1e-2), averager)


def _two_steps(optimizer: SAM, wrapped: Wrapped, tokens: torch.Tensor) -> None:
    wrapped.step(tokens)
    optimizer.first_step()
    wrapped.step(tokens)
    optimizer.second_step()


def _in_closure(optimizer: SAM, wrapped: Wrapped, tokens: torch.Tensor) -> None:
    wrapped.step(tokens)
    optimizer.step(lambda: float(wrapped.step(tokens)))


def train_usual(optimizer: Any, wrapped: Wrapped, tokens: torch.Tensor) -> None:
    wrapped.step(tokens)
    optimizer.step()
    optimizer.zero_grad()


WITH_INSIDE: dict[str, tuple[Callable[[list[nn.Parameter]], Any], Callable[..., None]]] = {
    "SAM": (SAM, _two_steps),
    "SAM, closure": (SAM, _in_closure),
    "Lookahead": (Lookahead, train_usual),
    "PostLocalSGD": (post_local_sgd, train_usual),
}


def inside_on_rank(_: int, layout: str, name: str) -> None:
    wrapped = wrap(layout, transformer())
    make, train = WITH_INSIDE[name]
    optimizer = make(list(wrapped.model.parameters()))
    training = SparseTraining(wrapped.model, optimizer, schedule=constant(0.5), scope="tensor", include=INCLUDE)
    held: list[torch.Tensor] = []
    for tokens in batches(5):
        train(optimizer, wrapped, tokens)
        held = held or held_bits(wrapped.model)
        assert sum(map(int, map(torch.sum, held))) > 0
        assert all(map(torch.equal, held_bits(wrapped.model), held))
    assert training.step == 5
    assert training.hold.counts().sparsity == 0.5
    inner = getattr(optimizer, "base_optimizer", None) or getattr(optimizer, "optimizer", None) or optimizer.optim
    assert check_moments(inner, wrapped.model) > 0


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for name in WITH_INSIDE
        for layout in ("plain", "ddp" if name == "PostLocalSGD" else "fsdp2")  # it averages replicas
    ],
)
@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("error")
def test_an_optimizer_inside(pool: ProcessPool, layout: str, name: str) -> None:
    pool.run(1 if layout == "plain" else 2, inside_on_rank, layout, name)


@torch.no_grad()
def _dense_layer(model: nn.Module) -> None:
    layer = model.get_submodule("layers.1.up")
    layer.load_state_dict(transformer(1).get_submodule("layers.1.up").state_dict())


def _dense_model(model: nn.Module) -> None:
    model.load_state_dict(transformer(1).state_dict())


def _dense_by_assignment(model: nn.Module) -> None:
    model.load_state_dict(transformer(1).state_dict(), assign=True)


@torch.no_grad()
def _merged(model: nn.Module) -> None:
    """An adapter, as PEFT merges it; in bfloat16 a dense weight may be zero by chance."""
    weight = model.get_parameter("layers.1.up.weight")
    weight.data += torch.ones(18, 1) @ torch.ones(1, 12)
    weight.data[0, 0] = 0.0


OVERWRITES = {
    "a layer is loaded": (_dense_layer, "108 weights .* in 'layers.1.up.weight' \\(1 parameters\\)"),
    "the model is loaded": (_dense_model, "720 weights .*, ... \\(8 parameters\\)"),
    "parameters are replaced": (_dense_by_assignment, "720 weights .*, ... \\(8 parameters\\)"),
    "an adapter is merged": (_merged, "108 weights .* 'layers.1.up.weight'.* an adapter merged"),
}


@pytest.mark.parametrize(
    ("when", "way"),
    [
        (when, way)
        for when in ("before a step", "after the backward pass", "before the end")
        for way in OVERWRITES
        if (when, way) != ("after the backward pass", "parameters are replaced")  # then they have no gradients
    ],
)
def test_what_is_overwritten(way: str, when: str) -> None:
    """Zeros are lost with a warning that names the parameter, and are written again."""
    overwrite, says = OVERWRITES[way]
    wrapped, model = Wrapped(model := transformer(), 0, 1), model
    prune.prune_model(model, 0.5, include=INCLUDE, scope="tensor")
    hold = hold_zeros(model, include=INCLUDE)  # the optimizer comes after the parameters that are assigned
    held = held_bits(model)
    first, second, third = batches(3)

    def train(tokens: torch.Tensor, between: Callable[[nn.Module], None] = lambda _: None) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapped.step(tokens)
        between(model)
        optimizer.step()
        model.zero_grad()

    def lose() -> None:
        if when == "after the backward pass":
            return train(second, overwrite)
        overwrite(model)
        return train(second) if when == "before a step" else hold.finish()

    train(first)
    with pytest.warns(UserWarning, match=says):
        lose()
    assert all(map(torch.equal, held_bits(model), held))
    if when != "before the end":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(third)
        hold.finish()
    assert all(map(torch.equal, held_bits(model), held))


@pytest.mark.parametrize("make", [SAM, Lookahead])
def test_a_step_that_moves_weights_is_left_out_once(make: Callable[[Iterable[nn.Parameter]], Any]) -> None:
    model = transformer()
    optimizer = make(model.parameters())
    regrow = prune.Regrow(stop=6, every=2, by="gradient")
    training = SparseTraining(model, optimizer, schedule=constant(0.5), regrow=regrow, include=INCLUDE)
    wrapped = Wrapped(model, 0, 1)
    for tokens in batches(6):
        if isinstance(optimizer, SAM):
            _in_closure(optimizer, wrapped, tokens)
        else:
            train_usual(optimizer, wrapped, tokens)
    inner = optimizer.base_optimizer if isinstance(optimizer, SAM) else optimizer.optimizer
    assert training.step == 6
    assert inner.state[model.get_parameter("layers.0.up.weight")]["step"] == 4


def one_rank_on_rank(rank: int, layout: str) -> None:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE, scope="tensor")
    hold = hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    held = held_bits(wrapped.model)
    for i, tokens in enumerate(batches(3)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if rank == 1 and i == 1:
                with torch.no_grad():
                    for shard in targets(wrapped.model):
                        shard.local.add_(1)
            train_usual(optimizer, wrapped, tokens)
        assert any("were overwritten" in str(each.message) for each in said) == (rank == 1 and i == 1)
        assert all(map(torch.equal, held_bits(wrapped.model), held))
    assert hold.counts().sparsity == 0.5


@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.sampled(2)
def test_one_rank_alone_is_overwritten(pool: ProcessPool, layout: str) -> None:
    """No rank waits for another."""
    pool.run(2, one_rank_on_rank, layout)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))])
def test_a_copy_goes_on_as_the_original(copied: Callable[[Any], Any]) -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = prune.cubic(0.8, stop=4)
    training = SparseTraining(model, optimizer, schedule=schedule, score="movement", include=INCLUDE)
    all_of_it = model, optimizer, training
    first, *rest = batches(5)
    train_usual(optimizer, Wrapped(model, 0, 1), first)
    its_copy = copied(all_of_it)
    for each_model, each_optimizer, _training in (all_of_it, its_copy):
        for tokens in rest:
            train_usual(each_optimizer, Wrapped(each_model, 0, 1), tokens)
    assert its_copy[2].report() == training.report() == copied(training.report())
    assert training.report().sparsity == pytest.approx(0.8, abs=1e-3)
    assert all(map(torch.equal, model.parameters(), its_copy[0].parameters()))


class LayerWise(torch.optim.Optimizer):
    """As transformers trains GaLore layer by layer: a dummy that steps nothing, and an optimizer a parameter."""

    def __init__(self, optimizer_dict: dict[nn.Parameter, torch.optim.Optimizer]) -> None:
        super().__init__([torch.zeros(1)], {})
        self.optimizer_dict = optimizer_dict


def test_an_optimizer_for_each_layer() -> None:
    model = transformer()
    optimizers: dict[Any, torch.optim.Optimizer] = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())  # type: ignore[no-untyped-call]
    prune.prune_model(model, 0.5, include=INCLUDE)
    hold = hold_zeros(model, LayerWise(optimizers), include=INCLUDE)
    held = held_bits(model)
    for tokens in batches(3):
        Wrapped(model, 0, 1).step(tokens)
    assert all(map(torch.equal, held_bits(model), held))
    hold.remove()
    training = SparseTraining(model, LayerWise(optimizers), schedule=constant(0.6), include=INCLUDE)
    with pytest.raises(NotImplementedError, match="steps within the backward pass"):
        Wrapped(model, 0, 1).step(tokens)
    training.remove()


def test_a_wrapper_that_runs_no_hooks() -> None:
    model = transformer()
    prune.prune_model(model, 0.5, include=INCLUDE, scope="tensor")
    optimizer: Any = SlowWeights(model.parameters())
    hold = hold_zeros(model, optimizer, include=INCLUDE)
    held = held_bits(model)
    first, second, third = batches(3)
    for tokens in (first, second):
        train_usual(optimizer, Wrapped(model, 0, 1), tokens)
    assert prune.sparsity(model, include=INCLUDE) == 0
    with pytest.warns(UserWarning, match="an optimizer such as Lookahead wrote weights"):
        train_usual(optimizer, Wrapped(model, 0, 1), third)
    hold.finish()
    assert all(map(torch.equal, held_bits(model), held))


def test_a_layer_that_is_added() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hold_zeros(model, optimizer)
    model.append(nn.Linear(8, 8))
    prune.prune_model(model, 0.5, scope="tensor")
    optimizer.add_param_group({"params": model[2].parameters()})
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert prune.sparsity(model) == 0.5
