"""A budget divided by measured cost: kinds are tried out at two sizes each, and the model is put back after each trial.

The cost of a size is what the mean log likelihood of held-out windows loses by it: those that the refit has seen say
too little. They are scored whole and in pieces, and what loses more counts: models treat the first token of a text in a
way of its own (massive activations, Sun et al., arXiv 2402.17762), which what is left may keep for those few tokens
that windows begin with, and not for others.

Costs of other sizes follow from the two. Costs do not add up exactly, so mixes are measured, too: the three that
promise most, each of another set of kinds. The best one wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.evaluation import perplexity
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.units import UnitKind
from distprune.removal.choose_units import Removal
from distprune.removal.layers import skipping
from distprune.removal.readers import find_readers
from distprune.removal.sizes import Budget, Chosen, Sizes
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard

_MOST_WINDOWS = 64  # of the samples, in trials
_HELD_OUT = 4  # every 4th of them
_SHARES = 1 / 3, 2 / 3  # of what has to leave: how much does in the trials of a kind alone
_NUM_MIXES = 3
_PIECE = 32  # tokens of a held-out window that are also scored by themselves
_MOST_COST = 1e3  # of a model that puts out infinities
_LEAST = 1e-3  # a cost, in log-perplexity: no measurement tells less from nothing
_POWER = 1.5  # of a cost in the number of parameters, as long as it is known of one number alone
_POWERS = (1.0, 2.5)  # the least and the greatest


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


Recall = Callable[[str, Callable[[], Any]], Any]  # what was made under a name, or what the function makes


def divide_budget(
    model: nn.Module,
    samples: torch.Tensor,
    sizes: Sizes,
    budget: Budget,
    choose: Callable[..., Removal],
    order: Callable[..., list[int]],
    *,
    recall: Recall,
    say: Callable[[str], object],
    group: Group = None,
) -> Division:
    """Return the sizes, with those of ``sizes``, at which ``model`` meets ``budget`` and is expected to lose least.

    Args:
        model, samples: as of :func:`choose_units`; at least 2 windows, and no more than 64 of them are used. The model
            is left as it was.
        choose: ``choose_units`` of this model, to be called with samples, sizes and layers.
        order: ``order_layers`` of this model, to be called with how many stay, and those that are known to go.
        recall: called with the name of each trial and what makes it, of what JSON knows.
        say: called after each trial that is not recalled, with what it found.

    Every rank of ``group`` must call it, with equal arguments, and all come to the same sizes. In memory: a copy of the
    shards that one trial changes, on the CPU. Rounds: for each trial those of ``choose``, of ``order`` where layers
    leave, of ``recall``, twice those of ``perplexity``, and 1 of 64 bytes; before the first, those of ``recall`` and
    twice those of ``perplexity``; at the end 1 of 64 bytes.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``choose`` and ``order`` raise; a loss of the
            dense model that is NaN or infinite; sizes that a model can have one by one, and not together.
    """
    comm = communicator(group)
    fitted, held_out = _split(samples)
    trials: list[Trial] = []
    gone: list[int] = []

    def losses() -> list[float]:
        return [math.log(perplexity(model, windows, group=comm)) for windows in held_out]

    def losses_before() -> list[float]:
        before = losses()
        if not all(map(math.isfinite, before)):  # the same on every rank
            raise ValueError(f"the loss before anything is removed is {before[0]}")
        return before

    def measure(wanted: Chosen) -> tuple[float, list[int]]:
        """Return what ``wanted`` costs, and the layers that go."""
        leave = order(int(wanted["layers"]), known=gone) if "layers" in wanted else []
        keep: dict[Any, int | float] = {kind: size for kind, size in wanted.items() if kind != "layers"}
        left = [index for index in range(len(decoder_blocks(model))) if index not in leave]
        with _put_back(comm, model, keep, left):
            choose(fitted, keep, layers=left)
            with skipping(model, set(leave)):
                costs = [after - old for after, old in zip(losses(), before, strict=True)]
        cost = max(costs) if all(map(math.isfinite, costs)) else _MOST_COST
        say(f"trial {len(trials) + 1} of at most {num_trials}: {Trial(wanted, budget.removed(wanted), cost)}")
        return min(cost, _MOST_COST), leave

    def measure_all(mixes: Sequence[Chosen]) -> list[Trial]:
        for wanted in mixes:
            cost, leave = recall(f"trial-{len(trials) + 1}", partial(measure, wanted))
            gone[:] = leave if len(leave) > len(gone) else gone
            trials.append(Trial(wanted, budget.removed(wanted), cost))
        return trials[len(trials) - len(mixes) :]

    if len(budget.options) < 2 or budget.is_met({}):
        chosen = max(budget.mixes(), key=budget.left)
    else:
        alone = _alone(budget)
        num_trials = len(alone) + _NUM_MIXES
        before = recall("trial-0", losses_before)
        mixes = _promising(budget, measure_all(alone))
        chosen = min(measure_all(mixes), key=lambda trial: trial.cost).sizes
    divided = replace(sizes, parameters=None, **chosen)
    with together(comm, sizes=str(divided)):
        if chosen:
            replace(divided, experts=None).check(model)  # experts have gone before
    return Division(divided, tuple(trials), tuple(gone))


def _split(samples: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the windows that refits are given, and those that are held out: whole, and in pieces."""
    some = samples[:: math.ceil(len(samples) / _MOST_WINDOWS)]
    is_held = torch.arange(len(some), device="cpu") % _HELD_OUT == min(len(some), _HELD_OUT) - 1
    fitted, whole = some[~is_held], some[is_held]
    is_begun = bool((samples[:, 0] == samples[0, 0]).all())  # all texts are, with one token of the tokenizer's
    start = whole[:, : int(is_begun)]
    size, rest = _PIECE - start.shape[1], whole[:, start.shape[1] :]
    num_pieces = rest.shape[1] // size
    pieces = rest[:, : num_pieces * size].reshape(-1, size)
    pieces = torch.cat([start.repeat_interleave(num_pieces, 0), pieces], 1)
    return fitted, [whole, pieces] if num_pieces > 1 else [whole]


def _alone(budget: Budget) -> list[Chosen]:
    """Return of each kind the sizes that remove at most these shares of what has to leave, or the least that can."""
    tried: list[Chosen] = []
    for kind, options in budget.options.items():
        for most in _SHARES:
            num = most * (budget.left({}) - budget.limit)
            few = [size for size in options if budget.removed({kind: size}) <= num]
            wanted = {kind: (few or list(options)[:1])[-1]}
            tried += [wanted] if wanted not in tried else []
    return tried


def _promising(budget: Budget, trials: Sequence[Trial]) -> list[Chosen]:
    """Return the mixes that promise most by the ``trials`` of kinds alone, one for each set of kinds, at most three."""
    curves = {
        kind: cost_curve([(trial.num_removed, trial.cost) for trial in trials if kind in trial.sizes])
        for kind in budget.options
    }
    best: dict[frozenset[str], tuple[float, int, Chosen]] = {}
    for mix in budget.mixes():
        promise = math.fsum(curves[kind](budget.removed({kind: size})) for kind, size in mix.items())
        ranked = promise, budget.left(mix), mix
        kinds = frozenset(mix)
        best[kinds] = min(best.get(kinds, ranked), ranked, key=lambda ranked: ranked[:2])
    return [mix for _, _, mix in sorted(best.values(), key=lambda ranked: ranked[:2])[:_NUM_MIXES]]


def cost_curve(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Return the cost by the number of parameters removed: a power of it, through the last of ``points``.

    ``points``: numbers removed and costs; which power it is, the first and the last say.
    """
    (x, y), *_, (x2, y2) = [(number, max(cost, _LEAST)) for number, cost in sorted(points)] * 2
    power = _POWER if x == x2 else min(max(math.log(y2 / y) / math.log(x2 / x), _POWERS[0]), _POWERS[1])
    return lambda number: y2 * math.pow(number / x2, power)


@contextmanager
def _put_back(
    comm: Communicator, model: nn.Module, keep: dict[UnitKind, int | float], layers: Sequence[int]
) -> Iterator[None]:
    """Let ``choose_units`` change what reads the units, and put it back at the end. Every rank must call it."""

    def shards() -> list[LocalShard]:
        changed = {id(tensor): tensor for one in asked for tensor in (one.linear.parameter, one.linear.bias)}
        return [local_shard("", tensor.detach()) for tensor in changed.values() if tensor is not None]

    with together(comm):
        reset_forward(model)
        asked = find_readers(model, keep, layers, heals=True).asked.values()
        before = [shard.local.to("cpu", copy=True) for shard in shards()]
    try:
        yield
    finally:
        reset_forward(model)
        for shard, values in zip(shards(), before, strict=True):
            shard.local.copy_(values)
