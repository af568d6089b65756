"""A budget divided by measured cost: kinds are tried out at two sizes each, and the model is put back after each trial.

The cost of a size is what the mean log likelihood of held-out windows loses by it: those that the refit has seen say
too little. They are scored whole and in pieces, and what loses more counts: models treat the first token of a text in a
way of its own (massive activations, Sun et al., arXiv 2402.17762), which what is left may keep for those few tokens
that windows begin with, and not for others.

Costs of other sizes follow from the two. Costs do not add up exactly, so mixes are measured, too: the three that
promise most, each of another set of kinds. The best one wins.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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
_SHARES = 1 / 3, 2 / 3  # of what has to leave: how much does in the trials of a kind alone
_NUM_MIXES = 3
_PIECE = 32  # tokens of a held-out window that are also scored by themselves
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


Recall = Callable[[str, Callable[[], Any]], Any]


def make_anew(name: str, make: Callable[[], Any]) -> Any:  # noqa: ARG001
    """Return what ``make`` returns. A job's own recalls what it returned under this name before the job was killed."""
    return make()


def say_nothing(text: str) -> None:
    """Keep ``text`` for oneself."""


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
    recall: Recall = make_anew,
    say: Callable[[str], None] = say_nothing,
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
        recall: called with the name of each trial and what makes it, of what JSON knows.
        say: called after each trial that is not recalled, with what it found, and how long the others may take.

    Every rank of ``group`` must call it, with equal arguments, and all come to the same sizes. In memory: a copy of the
    shards that one trial changes, on the CPU. Rounds: for each trial those of ``choose`` and of ``log_likelihoods``, of
    layers those of ``order_layers``, and 2 of 64 bytes; at the end another one.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``choose`` and ``order_layers`` raise; a loss of
            the dense model that is NaN or infinite; sizes that a model can have one by one, and not together.
    """
    comm = communicator(group)
    how: dict[str, Any] = {"group": comm, "offload": offload, "batch_tokens": batch_tokens}
    order = partial(order_layers, model, samples, criterion=layer_criterion, **how)
    trying = _Trying(comm, model, *_split(samples), choose, order)
    trials: list[Trial] = []

    def try_all(mixes: Sequence[Chosen], num_later: int) -> None:
        for number, wanted in enumerate(mixes, 1):
            num_measured = len(trying.seconds)
            cost, trying.gone = recall(f"trial-{len(trials) + 1}", partial(trying.measure, wanted, trying.gone))
            trials.append(Trial(wanted, budget.left({}) - budget.left(wanted), cost))
            if len(trying.seconds) > num_measured:
                seconds = (len(mixes) - number + num_later) * statistics.mean(trying.seconds)
                say(f"tried {trials[-1]}" + (f"; about {seconds:,.0f} s to go" if seconds else ""))

    if len(budget.options) < 2 or budget.is_met({}):
        chosen = max(budget.mixes(), key=budget.left)
    else:
        try_all(_alone(budget), _NUM_MIXES)
        mixes = _promising(budget, trials)
        try_all(mixes, 0)
        chosen = min(trials[-len(mixes) :], key=lambda trial: trial.cost).sizes
    divided = dataclasses.replace(sizes, parameters=None, **chosen)
    with together(comm, sizes=str(divided)):
        if chosen:
            dataclasses.replace(divided, experts=None).check(model)  # experts have gone before
    return Division(divided, tuple(trials), tuple(trying.gone))


def _alone(budget: Budget) -> list[Chosen]:
    """Return of each kind the sizes that remove at most these shares of what has to leave, or the least that can."""
    tried: list[Chosen] = []
    for kind, options in budget.options.items():
        for most in _SHARES:
            num = most * (budget.left({}) - budget.limit)
            few = [size for size in options if budget.removed(kind, size) <= num]
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
        promise = math.fsum(curves[kind](budget.removed(kind, size)) for kind, size in mix.items())
        ranked = promise, budget.left(mix), mix
        kinds = frozenset(mix)
        if kinds not in best or ranked[:2] < best[kinds][:2]:
            best[kinds] = ranked
    return [mix for _, _, mix in sorted(best.values(), key=lambda ranked: ranked[:2])[:_NUM_MIXES]]


def _split(samples: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the windows that refits are given, and those that are held out: whole, and in pieces."""
    some = samples[:: math.ceil(len(samples) / _MOST_WINDOWS)]
    is_held = torch.arange(len(some), device="cpu") % _HELD_OUT == min(len(some), _HELD_OUT) - 1
    fitted, whole = some[~is_held], some[is_held]
    num_pieces = whole.shape[1] // _PIECE
    pieces = whole[:, : num_pieces * _PIECE].reshape(-1, _PIECE)
    return fitted, [whole, pieces] if num_pieces > 1 else [whole]


@dataclass
class _Trying:
    """Measures what sizes cost, and in how many ``seconds``.

    ``gone`` are the layers that went in trials so far, the first to go first; ``before`` the losses of the whole model.
    """

    comm: Communicator
    model: nn.Module
    fitted: torch.Tensor
    held_out: Sequence[torch.Tensor]
    choose: Callable[..., Removal]
    order: Callable[..., list[int]]
    gone: list[int] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def measure(self, wanted: Chosen, known: Sequence[int]) -> tuple[float, list[int]]:
        """Return what ``wanted`` costs, and the layers that go, of which ``known`` are the first."""
        begun = time.perf_counter()
        self.before = self.before or _losses(self.comm, self.model, self.held_out)
        if not all(map(math.isfinite, self.before)):  # the same on every rank
            raise ValueError(f"the loss before anything is removed is {self.before[0]}")
        num_layers = len(decoder_blocks(self.model))
        num_left = int(wanted.get("layers", num_layers))
        gone = list(known) if num_layers - num_left <= len(known) else self.order(num_left, known=known)
        after = self._losses_without(wanted, gone[: num_layers - num_left])
        costs = [new - old if math.isfinite(new) else _MOST_COST for new, old in zip(after, self.before, strict=True)]
        self.seconds.append(time.perf_counter() - begun)
        return min(max(costs), _MOST_COST), gone

    def _losses_without(self, wanted: Chosen, gone: Sequence[int]) -> list[float]:
        """Return the losses of the model that is left, refitted; the model stays as it is."""
        model = self.model
        keep: dict[Any, int | float] = {kind: size for kind, size in wanted.items() if kind != "layers"}
        layers = [index for index in range(len(decoder_blocks(model))) if index not in gone]
        with together(self.comm):
            reset_forward(model)
            asked = find_readers(model, decoder_blocks(model), keep, layers, heals=True).asked.values()
            readers = list({id(reader.linear.parameter): reader for reader in asked}.values())
            before = [shard.local.to("cpu", copy=True) for shard in _shards(readers)]
        try:
            self.choose(self.fitted, keep, layers=layers)
            with skipping(model, set(gone)):
                return _losses(self.comm, model, self.held_out)
        finally:  # all that choosing changes
            reset_forward(model)
            for shard, values in zip(_shards(readers), before, strict=True):
                shard.local.copy_(values)


def _losses(comm: Communicator, model: nn.Module, held_out: Sequence[torch.Tensor]) -> list[float]:
    """Return the mean loss over all tokens that are predicted, for each of ``held_out``, (windows, length)."""
    scored = [Continuation(window[:-1], window[1:]) for windows in held_out for window in windows]
    likelihoods = iter(log_likelihoods(model, scored, group=comm)[:, 0].tolist())
    return [-math.fsum(itertools.islice(likelihoods, len(windows))) / windows[:, 1:].numel() for windows in held_out]


def _shards(readers: Iterable[Asked]) -> Iterator[LocalShard]:
    """Yield this rank's part of each reader's weight and bias."""
    for reader in readers:
        for parameter in (reader.linear.parameter, reader.linear.bias):
            if parameter is not None:
                yield local_shard(reader.linear.name, parameter.detach())
