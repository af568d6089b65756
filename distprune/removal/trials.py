"""A budget divided by measured cost: kinds are tried out at a few sizes each, and the model is put back after each.

The cost of a size is what the mean log likelihood of held-out windows loses by it: those that the refit has seen say
too little. Costs of other sizes follow from those tried. The sizes that then are cheapest together are tried next, each
kind by itself, and so on, until those have been tried. What kinds cost beyond the sum when they leave together is not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.collectives import Communicator, Group, communicator, together
from distprune.evaluation import Continuation, log_likelihoods
from distprune.masks import reset_forward
from distprune.models import LinearMap, decoder_blocks, find_units, linear_maps
from distprune.oneshot.plan import check_samples
from distprune.removal.budget import Budget, Chosen, cost_curve
from distprune.removal.choose_units import Removal
from distprune.removal.layers import LayerCriterion, order_layers, skipping
from distprune.removal.sizes import Sizes
from distprune.shards import LocalShard, local_shard

__all__ = ["Division", "Trial", "divide_budget", "find_budget"]

_MOST_WINDOWS = 64  # of the samples, in trials
_HELD_OUT = 4  # every 4th of them
_MOST_TRIALS = 8
_NEAR = 0.15  # a size that removes within 15 % as much as one that was tried need not be
_MOST_COST = 1e3  # of a model that puts out infinities


@dataclass(frozen=True)
class Trial:
    """``cost``: by how much held-out log-perplexity rises if ``size`` of ``kind`` stays, and nothing else leaves."""

    kind: str
    size: int | float
    num_removed: int
    cost: float

    @override
    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} {self.size}: {self.num_removed:,} fewer, log-perplexity {self.cost:+.4f}"


@dataclass(frozen=True)
class Division:
    """What a budget comes to: ``sizes``; with them the ``trials``, and layers in the order in which they go."""

    sizes: Sizes
    trials: tuple[Trial, ...] = ()
    layers_gone: tuple[int, ...] = ()


OnTrial = Callable[[Division], None]


def find_budget(model: nn.Module, samples: torch.Tensor, sizes: Sizes) -> Budget | None:
    """Return the budget that ``sizes`` sets ``model``; ``None``: none. Local.

    Raises:
        ValueError, TypeError: it cannot be met, and what the least is; nothing would have to leave; or ``samples`` are
            too few, or do not fit.
    """
    if sizes.parameters is None:
        return None
    check_samples(model, samples)
    if min(samples.shape) < 2:
        shape = tuple(samples.shape)
        raise ValueError(
            f"parameters: what leaves is said by held-out samples: 2 of 2 tokens are the least, not {shape}"
        )
    return Budget.of(model, sizes)


def divide_budget(
    model: nn.Module,
    samples: torch.Tensor,
    sizes: Sizes,
    budget: Budget,
    choose: Callable[..., Removal],
    *,
    layer_criterion: LayerCriterion = "loss",
    begun: Division | None = None,
    on_trial: OnTrial | None = None,
    group: Group = None,
) -> Division:
    """Return the sizes, with those of ``sizes``, at which ``model`` meets ``budget`` and is expected to lose least.

    Args:
        model, samples: as of :func:`choose_units`; at least 2 windows, and no more than 64 of them are used. The model
            is left as it was.
        choose: ``choose_units`` of this model, to be called with samples, sizes and layers.
        layer_criterion: as of :func:`order_layers`.
        begun: what ``on_trial`` was told last, to go on with.
        on_trial: called after each trial, with what is known then.

    Every rank of ``group`` must call it, with equal arguments, and all come to the same sizes. In memory: a copy of the
    shards that one trial changes, on the CPU. Rounds: for each trial those of ``choose`` and of ``log_likelihoods``, of
    layers those of ``order_layers``, and 2 of 64 bytes; at the end another one.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``choose`` and ``order_layers`` raise; a loss of
            the dense model that is NaN or infinite; sizes that a model can have one by one, and not together.
    """
    comm = communicator(group)
    fitted, held_out = _split(samples)
    known, before = begun or Division(sizes), None
    while (wanted := _next(budget, known.trials)) is not None:
        if before is None:
            before = _loss(comm, model, held_out)
        if not math.isfinite(before):  # the same on every rank
            raise ValueError(f"the loss before anything is removed is {before}")
        kind, size = wanted
        order = known.layers_gone
        if kind == "layers" and len(decoder_blocks(model)) - int(size) > len(order):
            found = order_layers(model, samples, int(size), criterion=layer_criterion, known=order, group=comm)
            order = tuple(found)
        loss = _loss_without(comm, model, choose, fitted, held_out, wanted, order)
        cost = min(loss - before, _MOST_COST) if math.isfinite(loss) else _MOST_COST
        known = Division(sizes, (*known.trials, Trial(*wanted, budget.removed(*wanted), cost)), order)
        with together(comm):
            if on_trial is not None:
                on_trial(known)
    chosen = _cheapest(budget, known.trials)
    divided = dataclasses.replace(sizes, parameters=None, **chosen)
    with together(comm, sizes=str(divided)):
        if chosen:
            dataclasses.replace(divided, experts=None).check(model)  # experts have gone before
    return dataclasses.replace(known, sizes=divided)


def _split(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the windows that refits are given, and those that are held out."""
    some = samples[:: math.ceil(len(samples) / _MOST_WINDOWS)]
    is_held = torch.arange(len(some)) % _HELD_OUT == min(len(some), _HELD_OUT) - 1
    return some[~is_held], some[is_held]


def _next(budget: Budget, trials: Sequence[Trial]) -> tuple[str, int | float] | None:
    """Return what to try next: each kind once, by at most half of what has to leave; then what is cheapest together."""
    num_to_go = budget.left({}) - budget.limit
    if len(budget.options) < 2 or num_to_go <= 0:
        return None
    for kind, of in budget.options.items():
        if all(trial.kind != kind for trial in trials):
            few = [size for size in of.sizes if budget.removed(kind, size) <= num_to_go / 2]
            return kind, (few or of.sizes[:1])[-1]
    for kind, size in _cheapest(budget, trials).items() if len(trials) < _MOST_TRIALS else ():
        num = budget.removed(kind, size)
        if all(trial.kind != kind or abs(trial.num_removed - num) > _NEAR * num for trial in trials):
            return kind, size
    return None


def _cheapest(budget: Budget, trials: Sequence[Trial]) -> Chosen:
    """Return the sizes that are cheapest together, by what ``trials`` say; without any, those that leave most."""
    curves = {
        kind: cost_curve([(trial.num_removed, trial.cost) for trial in trials if trial.kind == kind])
        for kind in (budget.options if trials else ())
    }

    @functools.cache
    def cost(kind: str, size: int | float) -> float:
        num = budget.removed(kind, size)
        return curves[kind](num) if trials else num

    return budget.cheapest(cost)


def _loss_without(
    comm: Communicator,
    model: nn.Module,
    choose: Callable[..., Removal],
    fitted: torch.Tensor,
    held_out: torch.Tensor,
    wanted: tuple[str, int | float],
    order: Sequence[int],
) -> float:
    """Return the loss on ``held_out`` of the model that is left, refitted on ``fitted``; the model stays as it is."""
    kind, size = wanted
    num_layers = len(decoder_blocks(model))
    gone = set(order[: num_layers - int(size)]) if kind == "layers" else set[int]()
    keep = {} if kind == "layers" else {kind: size}
    layers = [index for index in range(num_layers) if index not in gone]
    with _put_back(comm, model, kind):
        choose(fitted, keep, layers=layers)
        with skipping(model, gone):
            return _loss(comm, model, held_out)


def _loss(comm: Communicator, model: nn.Module, windows: torch.Tensor) -> float:
    """Return the mean over all tokens that are predicted."""
    scored = log_likelihoods(model, [Continuation(window[:-1], window[1:]) for window in windows], group=comm)
    return -math.fsum(scored[:, 0].tolist()) / windows[:, 1:].numel()


@contextmanager
def _put_back(comm: Communicator, model: nn.Module, kind: str) -> Iterator[None]:
    """Give the maps that read units of ``kind``, and their biases, the weights back that they had before."""
    with together(comm):
        reset_forward(model)
        maps = _readers(model, "mlp" if kind == "layers" else kind)  # an MLP makes up for the layers that go behind it
        before = [shard.local.to("cpu", copy=True) for shard in _shards(maps)]
    try:
        yield
    finally:
        reset_forward(model)
        for shard, values in zip(_shards(maps), before, strict=True):
            shard.local.copy_(values)


def _readers(model: nn.Module, kind: Any) -> list[LinearMap]:
    found: dict[int, LinearMap] = {}
    for _, block in decoder_blocks(model):
        maps = linear_maps(block)
        with suppress(NotImplementedError):  # then nothing makes up for layers
            read = [maps[units.reader] for units in find_units(block, kind) if units.reader in maps]
            found |= {id(linear.parameter): linear for linear in read}
    return list(found.values())


def _shards(maps: Iterable[LinearMap]) -> Iterator[LocalShard]:
    """Yield this rank's part of each map's weight and bias."""
    for linear in maps:
        bias = None if linear.expert is not None else getattr(linear.module, "bias", None)
        for parameter in (linear.parameter, bias):
            if parameter is not None:
                yield local_shard(linear.name, parameter.detach())
