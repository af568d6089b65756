"""A budget divided by measured cost: kinds are tried out at a few sizes each, and the model is put back after each.

The cost of a size is what the mean log likelihood of held-out windows loses by it: those that the refit has seen say
too little. They are scored whole and in pieces, and what loses more counts: models treat the first token of a text in a
way of its own (massive activations, Sun et al., arXiv 2402.17762), which what is left may keep for those few tokens
that windows begin with, and not for others.

Costs of other sizes follow from those tried. The sizes that then are cheapest together are tried next, each kind by
itself, and so on, until those have been tried. What kinds cost beyond the sum when they leave together only shows
together: so the cheapest of all is tried, then what is cheapest without one of its kinds, with half as much of one, or
with as much of one as was tried alone, as long as it promises as much as the best that was tried. That one is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.evaluation import Continuation, log_likelihoods
from distprune.formatting import one_line
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.plan import check_samples
from distprune.removal.budget import Budget, Chosen, cost_curve
from distprune.removal.choose_units import Removal
from distprune.removal.layers import LayerCriterion, order_layers, skipping
from distprune.removal.readers import find_readers
from distprune.removal.remover import Asked
from distprune.removal.sizes import Sizes
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard

_MOST_WINDOWS = 64  # of the samples, in trials
_HELD_OUT = 4  # every 4th of them
_MOST_ALONE, _MOST_TRIALS = 6, 12  # of kinds alone, and of all
_NEAR = 0.15  # a size that removes within 15 % as much as one that was tried need not be
_PIECE = 32  # tokens of a held-out window that are also scored by themselves
_MARGIN = 1.1  # a promise of up to a tenth more than what was measured is tried, too: promises are not exact
_MOST_COST = 1e3  # of a model that puts out infinities


@dataclass(frozen=True)
class Trial:
    """``cost``: by how much held-out log-perplexity rises if ``sizes`` stay, by kind, and of the others all."""

    sizes: Chosen
    num_removed: int
    cost: float

    @override
    def __str__(self) -> str:
        sizes = ", ".join(f"{kind.replace('_', ' ')} {size}" for kind, size in self.sizes.items())
        return f"{sizes}: {self.num_removed:,} fewer, log-perplexity {self.cost:+.4f}"


@dataclass(frozen=True)
class Division:
    """What a budget comes to: ``sizes``; with them the ``trials``, and layers in the order in which they go."""

    sizes: Sizes
    trials: tuple[Trial, ...] = ()
    layers_gone: tuple[int, ...] = ()

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.sizes}; {len(self.trials)} trials, {len(self.layers_gone)} layers gone")


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
    offload: bool = False,
    batch_tokens: int | None = None,
) -> Division:
    """Return the sizes, with those of ``sizes``, at which ``model`` meets ``budget`` and is expected to lose least.

    Args:
        model, samples: as of :func:`choose_units`; at least 2 windows, and no more than 64 of them are used. The model
            is left as it was.
        choose: ``choose_units`` of this model, to be called with samples, sizes and layers.
        layer_criterion, offload, batch_tokens: as of :func:`order_layers`.
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
            before = _losses(comm, model, held_out)
        if not all(map(math.isfinite, before)):  # the same on every rank
            raise ValueError(f"the loss before anything is removed is {before[0]}")
        order, num_layers = known.layers_gone, len(decoder_blocks(model))
        if num_layers - int(wanted.get("layers", num_layers)) > len(order):
            num_left = int(wanted["layers"])
            going = order_layers(
                model,
                samples,
                num_left,
                criterion=layer_criterion,
                known=order,
                group=comm,
                offload=offload,
                batch_tokens=batch_tokens,
            )
            order = tuple(going)
        after = _losses_without(comm, model, choose, fitted, held_out, wanted, order)
        costs = [new - old if math.isfinite(new) else _MOST_COST for new, old in zip(after, before, strict=True)]
        cost = min(max(costs), _MOST_COST)
        num_removed = budget.left({}) - budget.left(wanted)
        known = Division(sizes, (*known.trials, Trial(wanted, num_removed, cost)), order)
        with together(comm):
            if on_trial is not None:
                on_trial(known)
    best = _best(budget, known.trials)
    chosen = best.sizes if best else _cheapest(budget, ())
    divided = dataclasses.replace(sizes, parameters=None, **chosen)
    with together(comm, sizes=str(divided)):
        if chosen:
            dataclasses.replace(divided, experts=None).check(model)  # experts have gone before
    return dataclasses.replace(known, sizes=divided)


def _split(samples: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the windows that refits are given, and those that are held out: whole, and in pieces."""
    some = samples[:: math.ceil(len(samples) / _MOST_WINDOWS)]
    is_held = torch.arange(len(some), device="cpu") % _HELD_OUT == min(len(some), _HELD_OUT) - 1
    fitted, whole = some[~is_held], some[is_held]
    num_pieces = whole.shape[1] // _PIECE
    pieces = whole[:, : num_pieces * _PIECE].reshape(-1, _PIECE)
    return fitted, [whole, pieces] if num_pieces > 1 else [whole]


def _next(budget: Budget, trials: Sequence[Trial]) -> Chosen | None:
    """Return what to try next: each kind once, by at most half of what has to leave; then what is cheapest together."""
    num_to_go = budget.left({}) - budget.limit
    if len(budget.options) < 2 or num_to_go <= 0 or len(trials) >= _MOST_TRIALS:
        return None
    alone = {kind: [trial for trial in trials if trial.sizes.keys() == {kind}] for kind in budget.options}
    for kind, tried in alone.items():
        if not tried:
            sizes = list(budget.options[kind])
            few = [size for size in sizes if budget.removed(kind, size) <= num_to_go / 2]
            return {kind: (few or sizes[:1])[-1]}
    if sum(map(len, alone.values())) == len(trials) < _MOST_ALONE:
        for kind, size in _cheapest(budget, trials).items():
            num = budget.removed(kind, size)
            if all(abs(trial.num_removed - num) > _NEAR * num for trial in alone[kind]):
                return {kind: size}
    return _next_together(budget, trials)


def _next_together(budget: Budget, trials: Sequence[Trial]) -> Chosen | None:
    """Return the cheapest that meets the limit; then what promises most beside the best that was tried."""
    best, cost = _best(budget, trials), _cost(budget, trials)
    if best is None:
        return _cheapest(budget, trials)
    tried = [trial.sizes for trial in trials]
    promises = [
        (math.fsum(itertools.starmap(cost, sizes.items())), sizes)
        for sizes in _candidates(budget, trials, best, cost)
        if sizes not in tried
    ]
    promise, sizes = min(promises, key=lambda of: of[0], default=(math.inf, None))
    return sizes if promise < _MARGIN * best.cost else None


def _candidates(
    budget: Budget, trials: Sequence[Trial], best: Trial, cost: Callable[[str, int | float], float]
) -> Iterator[Chosen]:
    """Yield the cheapest of all; then, for each kind, the cheapest with none of it gone, half as much, or as in trials.

    Half as much as in the ``best`` trial, and as much as in each of ``trials`` of that kind alone.
    """
    yield _cheapest(budget, trials)
    for kind, sizes in budget.options.items():
        num = budget.removed(kind, best.sizes[kind]) if kind in best.sizes else 0
        half = [size for size in sizes if budget.removed(kind, size) <= num / 2]
        alone = [trial.sizes[kind] for trial in trials if trial.sizes.keys() == {kind}]
        for size in (None, *half[-1:], *alone):
            rest = budget.with_size(kind, size).cheapest(cost)
            if rest is not None:
                yield rest if size is None else {**rest, kind: size}


def _best(budget: Budget, trials: Sequence[Trial]) -> Trial | None:
    """Return the cheapest trial that meets the limit."""
    meet = [trial for trial in trials if budget.is_met(trial.sizes)]
    return min(meet, key=lambda trial: trial.cost, default=None)


def _cheapest(budget: Budget, trials: Sequence[Trial]) -> Chosen:
    """Return the sizes that are cheapest together, by what ``trials`` say; without any, those that leave most."""
    chosen = budget.cheapest(_cost(budget, trials) if trials else budget.removed)
    assert chosen is not None  # the budget can be met
    return chosen


def _cost(budget: Budget, trials: Sequence[Trial]) -> Callable[[str, int | float], float]:
    """Return the cost of a kind's size, by the trials of it alone."""
    curves = {
        kind: cost_curve([(trial.num_removed, trial.cost) for trial in trials if trial.sizes.keys() == {kind}])
        for kind in budget.options
    }
    return functools.cache(lambda kind, size: curves[kind](budget.removed(kind, size)))


def _losses_without(
    comm: Communicator,
    model: nn.Module,
    choose: Callable[..., Removal],
    fitted: torch.Tensor,
    held_out: Sequence[torch.Tensor],
    wanted: Chosen,
    order: Sequence[int],
) -> list[float]:
    """Return the losses of the model that is left, refitted on ``fitted``; the model stays as it is."""
    num_layers = len(decoder_blocks(model))
    gone = set(order[: num_layers - int(wanted.get("layers", num_layers))])
    keep: dict[Any, int | float] = {kind: size for kind, size in wanted.items() if kind != "layers"}
    layers = [index for index in range(num_layers) if index not in gone]
    with together(comm):
        reset_forward(model)
        asked = find_readers(model, decoder_blocks(model), keep, layers, heals=True).asked.values()
        readers = list({id(of.linear.parameter): of for of in asked}.values())
        before = [shard.local.to("cpu", copy=True) for shard in _shards(readers)]
    try:
        choose(fitted, keep, layers=layers)
        with skipping(model, gone):
            return _losses(comm, model, held_out)
    finally:  # all that choosing changes
        reset_forward(model)
        for shard, values in zip(_shards(readers), before, strict=True):
            shard.local.copy_(values)


def _losses(comm: Communicator, model: nn.Module, held_out: Sequence[torch.Tensor]) -> list[float]:
    """Return the mean loss over all tokens that are predicted, for each of ``held_out``, (windows, length)."""
    scored = [Continuation(window[:-1], window[1:]) for windows in held_out for window in windows]
    found = iter(log_likelihoods(model, scored, group=comm)[:, 0].tolist())
    return [-math.fsum(itertools.islice(found, len(windows))) / windows[:, 1:].numel() for windows in held_out]


def _shards(readers: Iterable[Asked]) -> Iterator[LocalShard]:
    """Yield this rank's part of each reader's weight and bias."""
    for of in readers:
        for parameter in (of.linear.parameter, of.linear.bias):
            if parameter is not None:
                yield local_shard(of.linear.name, parameter.detach())
