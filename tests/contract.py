"""What is promised: which methods work in which layouts. Contract tests run the list, the support matrix shows it.

Nouns: a *script* is a sequence of pruning calls on one model, each on top of the last; a *step* is one
of them, with the oracle's answer beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from typing_extensions import override

import distprune as prune
from distprune.patterns.base import Choice, Pattern, Ranked
from distprune.scores.base import Elements, LocalScores
from tests.oracle import keep_highest, random_scores
from tests.pattern_oracle import keep_in_pattern

__all__ = ["COLUMNS", "ROWS", "SCRIPTS", "SEED", "Script", "Step", "support_table"]

SEED = 17

Wholes = dict[str, torch.Tensor]
Pairs = list[tuple[nn.Module, str]]


@dataclass(frozen=True)
class Step:
    """``call(pairs, amount)`` prunes; ``oracle(values, masks, amount)`` gives the whole masks after it."""

    row: str
    call: Callable[[Pairs, Wholes], None]
    oracle: Callable[[Wholes, Wholes], Wholes]


@dataclass(frozen=True)
class Script:
    name: str
    steps: tuple[Step, ...]
    needs_matrices: bool = False  # structured methods do
    shapes: tuple[tuple[int, int], ...] | None = None  # the only ones it works on


def count(amount: int | float, num_left: int) -> int:
    return amount if isinstance(amount, int) else round(amount * num_left)


def _each(make: Callable[[int, str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Wholes, Wholes], Wholes]:
    return lambda values, masks: {
        name: masks[name] & make(i, name, value, masks[name]) for i, (name, value) in enumerate(values.items())
    }


def _by_scores(
    scores: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], amount: int | float
) -> list[torch.Tensor]:
    return keep_highest(scores, masks, count(amount, sum(int(mask.sum()) for mask in masks)))


def l1(amount: float) -> Step:
    return Step(
        "l1_unstructured",
        lambda pairs, _: prune.prune_each(pairs, prune.L1Unstructured, amount=amount),
        _each(lambda _, __, value, mask: _by_scores([value.abs()], [mask], amount)[0]),
    )


def random(amount: float) -> Step:
    return Step(
        "random_unstructured",
        lambda pairs, _: prune.prune_each(pairs, prune.RandomUnstructured, amount=amount, seed=SEED),
        _each(lambda i, name, v, mask: _by_scores([random_scores(f"{i}.{name}", v.shape, SEED)], [mask], amount)[0]),
    )


def _channels(mask: torch.Tensor, dim: int, amount: float, score: Callable[[int], float]) -> torch.Tensor:
    """Prune channels of those that have something left; ties from the first up."""
    left = [c for c in range(mask.shape[dim]) if bool(mask.select(dim, c).any())]
    keep = torch.ones_like(mask)
    for channel in sorted(left, key=lambda c: (score(c), c))[: count(amount, len(left))]:
        keep.select(dim, channel).fill_(False)
    return keep


def _norm(values: torch.Tensor, n: float | str) -> float:
    """What orders as the L_n norm does, summed exactly."""
    sizes = [abs(float(v)) for v in values.flatten().double()]
    if n == math.inf:
        return max(sizes, default=-math.inf)
    if n == -math.inf:
        return min(sizes, default=math.inf)
    power = 2.0 if n == "fro" else float(n)
    if power == 0:
        return float(sum(size != 0 for size in sizes))
    if power < 0:
        return -sum(math.inf if size == 0 else size**power for size in sizes)
    return math.fsum(size**power for size in sizes) if all(map(math.isfinite, sizes)) else math.inf


def ln(amount: float, n: float | str, dim: int) -> Step:
    def oracle(_: int, __: str, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pruned = value.masked_fill(~mask, 0)
        return _channels(mask, dim, amount, lambda c: _norm(pruned.select(dim, c), n))

    return Step(
        "ln_structured",
        lambda pairs, _: prune.prune_each(pairs, prune.LnStructured, amount=amount, n=n, dim=dim),
        _each(oracle),
    )


def random_channels(amount: float, dim: int) -> Step:
    def oracle(i: int, name: str, _: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = random_scores(f"{i}.{name}", (mask.shape[dim],), SEED)
        return _channels(mask, dim, amount, lambda c: int(scores[c]))

    return Step(
        "random_structured",
        lambda pairs, _: prune.prune_each(pairs, prune.RandomStructured, amount=amount, dim=dim, seed=SEED),
        _each(oracle),
    )


def identity() -> Step:
    return Step(
        "identity",
        lambda pairs, _: prune.prune_each(pairs, prune.Identity),
        _each(lambda _, __, ___, mask: mask),
    )


def _checkered(whole: torch.Tensor) -> torch.Tensor:
    return torch.arange(whole.numel(), device="cpu").view(whole.shape) % 3 != 1


def custom() -> Step:
    """Every third parameter: torch takes long to place the user's product on a mesh."""

    def call(pairs: Pairs, values: Wholes) -> None:
        for module, name in pairs[::3]:
            prune.custom_from_mask(module, name, _checkered(values[name]))
        prune.prune_each([pair for i, pair in enumerate(pairs) if i % 3], prune.Identity)

    def oracle(i: int, _: str, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask if i % 3 else _checkered(value)

    return Step("custom_from_mask", call, _each(oracle))


def together(method: type[torch_prune.BasePruningMethod], amount: int | float) -> Step:
    is_random = method is prune.RandomUnstructured

    def oracle(values: Wholes, masks: Wholes) -> Wholes:
        scores = [
            random_scores(f"{i}.{name}", value.shape, SEED) if is_random else value.abs()
            for i, (name, value) in enumerate(values.items())
        ]
        kept = _by_scores(scores, list(masks.values()), amount)
        return {name: mask & keep for (name, mask), keep in zip(masks.items(), kept, strict=True)}

    seed: dict[str, Any] = {"seed": SEED} if is_random else {}
    return Step(
        "global_unstructured",
        lambda pairs, _: prune.global_unstructured(pairs, method, amount=amount, **seed),
        oracle,
    )


def scored(amount: float) -> Step:
    """By importance scores that are nothing like the weights, whole on every rank."""

    def scores_of(whole: torch.Tensor) -> torch.Tensor:
        return ((torch.arange(whole.numel(), device="cpu").view(whole.shape) * 7919) % 13).to(torch.float32)

    def call(pairs: Pairs, values: Wholes) -> None:
        given = {(module, name): scores_of(values[name]) for module, name in pairs}
        prune.prune_each(pairs, prune.L1Unstructured, given, amount=amount)

    return Step("l1_unstructured", call, _each(lambda _, __, v, mask: _by_scores([scores_of(v)], [mask], amount)[0]))


def in_pattern(pattern: Pattern, *, at_random: bool = False, by_scores: bool = False) -> Step:
    """By magnitude, by a hash, or by the magnitude of scores that are nothing like the weights."""

    def scores_of(whole: torch.Tensor) -> torch.Tensor:
        return ((torch.arange(whole.numel(), device="cpu").view(whole.shape) * 7919) % 13 - 6).to(torch.float32)

    def call(pairs: Pairs, values: Wholes) -> None:
        if at_random:
            prune.prune_each(pairs, prune.RandomPattern, pattern=pattern, seed=SEED)
            return
        given = {(module, name): scores_of(values[name]) for module, name in pairs} if by_scores else None
        prune.prune_each(pairs, prune.L1Pattern, given, pattern=pattern)

    def oracle(i: int, name: str, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ranked = scores_of(value) if by_scores else value
        method = "random" if at_random else "magnitude"
        return keep_in_pattern(pattern, [f"{i}.{name}"], [ranked], [mask], method=method)[0]

    return Step("random_pattern" if at_random else "l1_pattern", call, _each(oracle))


# Rows and columns that 2 and 4 divide: even; groups and blocks cut by most numbers of ranks; fewer columns than
# ranks; nothing; wide.
FITTING = ((16, 8), (6, 12), (2, 4), (0, 4), (4, 20))
HALF_ROWS, TWO_OF_FOUR, BLOCKS = prune.PerRow(0.45), prune.NByM(2, 4), prune.Block(2, 0.4, "tensor")

SCRIPTS = (
    Script("unstructured", (l1(0.5), l1(0.3), random(0.4), scored(0.5))),
    Script("from-random", (random(0.37), l1(0.5), identity())),
    Script("global", (custom(), together(prune.L1Unstructured, 0.5), together(prune.RandomUnstructured, 3))),
    Script("channels-of-rows", (ln(0.5, 2, 0), l1(0.3), random_channels(0.4, 1)), needs_matrices=True),
    Script("channels-of-columns", (l1(0.4), ln(0.3, 1, -1), ln(0.5, math.inf, 0)), needs_matrices=True),
    Script("norms", (ln(0.2, 3, 1), ln(0.3, -math.inf, 0), ln(0.3, 0.5, -1), ln(0.3, 0, 0)), needs_matrices=True),
    Script("more-norms", (ln(0.3, "fro", 1), ln(0.4, -1, 0), ln(0.3, 2.5, 1), random_channels(0.5, 0)), True),
    Script(
        "groups",
        (in_pattern(TWO_OF_FOUR), l1(0.3), in_pattern(prune.NByM(1, 2), at_random=True), in_pattern(HALF_ROWS)),
        shapes=(*FITTING, (1, 8)),
    ),
    Script(
        "rows",
        (
            in_pattern(HALF_ROWS, by_scores=True),
            in_pattern(HALF_ROWS, at_random=True),
            in_pattern(TWO_OF_FOUR, by_scores=True),
            in_pattern(prune.Unstructured(0.5, "tensor")),
        ),
        shapes=(*FITTING, (1, 8)),
    ),
    Script(
        "blocks",
        (
            in_pattern(BLOCKS),
            random(0.3),
            in_pattern(BLOCKS, by_scores=True),
            in_pattern(BLOCKS, at_random=True),
            in_pattern(TWO_OF_FOUR),
        ),
        shapes=FITTING,
    ),
)

# Columns of the table, and what stands for them among the synthetic layouts (tests/layouts.py).
COLUMNS = {
    "plain": ("plain",),
    "DDP": ("plain",),
    "FSDP1": (),
    "FSDP2": ("shard0", "shard1", "last-half"),
    "HSDP": ("hsdp",),
    "TP": ("shard0", "shard1", "replicate"),
    "FSDP x TP": ("strided", "shard0-shard1", "shard0-shard0", "shard0-replicate", "copies", "3d"),
    "stages": ("stages", "sharded-stages"),
    "MPI": (),
}

IN_PLACE = tuple(COLUMNS)
REPARAMETRIZED = tuple(column for column in COLUMNS if column not in ("FSDP1", "stages", "MPI"))

# Rows: the columns a method works in.
ROWS = {
    "`prune_model`, magnitude": IN_PLACE,
    "`prune_model`, random": IN_PLACE,
    "`prune_model`, N:M": IN_PLACE,
    "`prune_model`, per row": IN_PLACE,
    "`prune_model`, blocks": IN_PLACE,
    "`prune_model`, channels": IN_PLACE,
    "`prune_model`, a score of your own": IN_PLACE,
    "`prune_model`, a pattern of your own": IN_PLACE,
    **{f"`{row}`": REPARAMETRIZED for row in dict.fromkeys(step.row for script in SCRIPTS for step in script.steps)},
    "`remove`": REPARAMETRIZED,
}


class OwnScore(prune.Score):
    """A score that depends on where a weight is."""

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight.float() * (elements.flat_indices() % 7 - 3)


@dataclass(frozen=True)
class Below(prune.Pattern):
    """Whatever scores at most ``threshold`` goes."""

    threshold: float
    needs_matrix = False

    @override
    def __str__(self) -> str:
        return f"below:{self.threshold}"

    @override
    def choose(self, ranked: Ranked) -> Choice:
        def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
            at, weight = slice(0, scores.shard.local.numel()), scores.shard.local.reshape(-1)
            out[:] = (scores.values(at).abs() > self.threshold) & (weight != 0)
            return torch.stack([(~out).sum(), (weight == 0).sum(), torch.tensor(0)])

        return Choice([self.threshold] * len(ranked.roster.members), decide)


def own_cases() -> list[dict[str, Any]]:
    """Arguments with a score of one's own and every pattern, and with a pattern of one's own."""
    patterns: list[Pattern] = [Below(0.6), prune.NByM(2, 4), prune.PerRow(0.4)]
    for scope in ("global", "tensor"):
        patterns += [
            prune.Unstructured(0.4, scope),
            prune.Block(2, 0.4, scope),
            prune.Channels(0.4, 0, scope),
            prune.Channels(0.4, -1, scope),
        ]
    return [{"score": OwnScore(), "pattern": pattern} for pattern in patterns] + [{"pattern": Below(0.6)}]


def support_table() -> str:
    """Return the table methods x layouts as docs/reference/support.md shows it."""
    lines = [
        "| | " + " | ".join(COLUMNS).replace(" x ", " \N{MULTIPLICATION SIGN} ") + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row, columns in ROWS.items():
        lines.append(f"| {row} | " + " | ".join("✓" if column in columns else "" for column in COLUMNS) + " |")
    return "\n".join(lines)
