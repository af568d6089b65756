"""Sparsity where it costs least: a share for each linear layer, from one backward pass over the dense model.

Zeroing weight W_ij changes output i by W_ij x_j, which the loss feels as r_i W_ij^2 H_jj to second order: r_i is the
sum over tokens of the squared gradient of output i, H_jj that of the squares of input j. Weights of all layers compete
by that, and how many of each layer fall below the one threshold is its share. Which of them go is not decided here: a
solver chooses within each row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.data import tokens_together
from distprune.calibration.own_words import samples_of
from distprune.calibration.sample_group import find_sample_group
from distprune.calibration.sensitivity import Sensitivity, measure_sensitivities
from distprune.calibration.token_ids import TokenIds
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.roster import Member, roster_of_one
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import Found
from distprune.models.linear_layers import LinearLayer, expert_place
from distprune.oneshot.plan import make_plan
from distprune.oneshot.recipe import Recipe
from distprune.patterns.base import Ranked
from distprune.patterns.census import check_parts
from distprune.patterns.unstructured import Unstructured
from distprune.patterns.within_rows import PerRow
from distprune.pruning.agreement import agreeing
from distprune.scores.base import Elements, LocalScores, Score
from distprune.shards.device import fetched
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import LocalMatrix, Matrix

Allocation = Literal["uniform", "gradients"]
Bounds = tuple[int, int]  # the least and the most


def allocate(
    model: nn.Module,
    samples: TokenIds | Literal["self"],
    sparsity: float,
    *,
    max_difference: float = 0.15,
    group: Group = None,
    batch_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Return a sparsity for each linear layer in the decoder blocks of ``model``, ``sparsity`` over all of them
    together.

    >>> shares = allocate(llama, samples, 0.6)
    >>> report = prune_blocks(llama, samples, shares, pattern="row")
    >>> round(report.sparsity, 1)
    0.6

    To be given to :func:`distprune.prune_blocks` as ``sparsity``, before anything is pruned. Each share is a whole
    number of weights of each row. What it then prunes by rows is ``round(sparsity * all weights)``, to within half the
    rows of the smallest layer. A layer that no token reached (an expert that nothing was routed to) has ``sparsity``.

    Args:
        model, samples, group, batch_tokens: as of :func:`distprune.prune_blocks`; samples of two tokens or more.
        max_difference: no share lies further than that from ``sparsity``.
        progress: called with how many of this rank's batches are done, and how many there are.

    Every rank of ``group`` must call it, with equal arguments; all come to the same shares, and N ranks to those of
    one but for rounding. The model is left as it was. In memory beyond its shards: the hidden states of one batch
    between blocks, the activations of one block, which a backward pass needs, and one byte a local weight. Rounds: 6
    (4 more where ranks hold different parameters), 1 for each block of 8 bytes for each input and output of its layers,
    and a choice by :class:`distprune.Unstructured` over all layers, with 1 round of 8 bytes a layer, until no share is
    out of bounds: 3 or 4 times as a rule.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``prune_blocks`` refuses; a budget that no
            shares within bounds meet; NaN or Inf in the loss, with the samples, or in gradients, with the layer.
        RuntimeError: on every rank: a forward that changes the model's own weights.
    """
    comm = communicator(group)
    samples = samples_of(comm, model, samples)

    with agreeing(comm) as agreed:
        if not isinstance(sparsity, float):
            raise TypeError(f"sparsity must be a share such as 0.6, not {sparsity!r}")
        plan = make_plan(model, samples, Recipe(method="magnitude", pattern=PerRow(sparsity)))
        if plan.samples.shape[1] < 2:
            raise ValueError(f"samples of {plan.samples.shape[1]} token have none to predict; two are the least")
        if not 0 <= max_difference <= 1:
            raise ValueError(f"{max_difference=} is not between 0 and 1")
        agreed.found = Found(plan.shards, has_blocks=True)
        agreed.facts = {**plan.facts, "max_difference": repr(max_difference), "batch_tokens": repr(batch_tokens)}
        tokens_together(model, batch_tokens)
    shards = agreed.shards()
    check_parts(comm, agreed.roster, lambda: shards)
    sample_group = find_sample_group(comm, plan.axis)
    found = measure_sensitivities(
        comm, sample_group, model, [of.linears for of in plan.linears], plan.samples, progress, batch_tokens
    )
    with together(comm):
        by_parameter = {shard.name: shard for shard in shards}
        layers: dict[str, _Layer] = {}
        for (prefix, _), of_block in zip(decoder_blocks(model), plan.linears, strict=True):
            for linear in of_block.linears.values():
                name, own = f"{prefix}.{linear.name}", by_parameter[f"{prefix}.{linear.parameter_path}"]
                layers[name] = _Layer(name, linear, own, found[name])
        num_out = {name: of.linear.num_out for name, of in layers.items()}
        bounds = {
            name: _bounds(of.linear.num_in, sparsity, max_difference if of.found.inputs.any() else 0.0)
            for name, of in layers.items()
        }
        budget = round(sparsity * sum(of.linear.num_in * of.linear.num_out for of in layers.values()))
    counts = fill_budget(
        {name: (low * num_out[name], high * num_out[name]) for name, (low, high) in bounds.items()},
        budget,
        partial(_num_lowest, comm, layers),
    )
    rows = whole_rows_of(counts, num_out, bounds, budget)
    return {name: num / layers[name].linear.num_in for name, num in rows.items()}


def _bounds(num_in: int, sparsity: float, max_difference: float) -> Bounds:
    """Return the least and the most weights that may go of a row; the uniform number is always allowed."""
    uniform = round(sparsity * num_in)
    least = math.ceil(round((sparsity - max_difference) * num_in, 6))
    most = math.floor(round((sparsity + max_difference) * num_in, 6))
    return max(0, min(least, uniform)), min(num_in, max(most, uniform))


def fill_budget(
    bounds: Mapping[str, Bounds], budget: int, choose: Callable[[Sequence[str], int], Mapping[str, int]]
) -> dict[str, int]:
    """Return a number for each name, within ``bounds``, ``budget`` over all: those of one threshold, but for bounds.

    ``choose`` returns how many of each of some names are among the lowest so many of theirs.

    Raises:
        ValueError: no numbers within bounds add up to ``budget``.
    """
    least, most = (sum(pair[i] for pair in bounds.values()) for i in (0, 1))
    if not least <= budget <= most:
        raise ValueError(
            f"no shares meet the budget: {budget} weights are to be pruned, and the bounds allow {least} to {most}; "
            "change the sparsity, or raise max_difference"
        )
    fixed = {name: low for name, (low, high) in bounds.items() if low == high}
    while free := [name for name in bounds if name not in fixed]:
        left = budget - sum(fixed.values())
        counts = choose(free, left)
        within = {name: min(max(counts[name], bounds[name][0]), bounds[name][1]) for name in free}
        excess = sum(within.values()) - left
        # With fewer than are wanted the threshold will rise: what is at its most stays there. Or the other way round.
        fixed |= {name: num for name, num in within.items() if not excess or (counts[name] - num) * excess < 0}
    return {name: fixed[name] for name in bounds}


def whole_rows_of(
    counts: Mapping[str, int], num_out: Mapping[str, int], bounds: Mapping[str, Bounds], budget: int
) -> dict[str, int]:
    """Return how many weights go of each row of each layer, ``counts`` weights of the layer before rounding.

    They are rounded down or up, up where the most was lost, so that ``budget`` is met but for half the rows of a layer.
    """
    rows = {name: count // num_out[name] for name, count in counts.items()}
    left = budget - sum(rows[name] * num_out[name] for name in rows)
    up = sorted((name for name in rows if rows[name] < bounds[name][1]), key=lambda n: -(counts[n] / num_out[n] % 1))
    for name in list(up):
        if num_out[name] <= left:
            up.remove(name)
            rows[name] += 1
            left -= num_out[name]
    smallest = min(up, key=num_out.__getitem__, default=None)
    if smallest is not None and 2 * left > num_out[smallest]:
        rows[smallest] += 1
    return rows


@dataclass(frozen=True)
class _Layer:
    """A linear layer, the part of its parameter on this rank, and what the backward pass found."""

    name: str
    linear: LinearLayer
    parameter: LocalShard
    found: Sensitivity

    def member(self) -> Member:
        return Member(self.name, (self.linear.num_out, self.linear.num_in), str(self.parameter.local.dtype))

    def scores(self) -> LocalScores:
        """Return the scores of this rank's part; evidence is expanded, not copied."""
        linear, geometry, local = self.linear, self.parameter.geometry, self.parameter.local
        if linear.expert is not None:
            experts, *dim_runs = geometry.dim_runs
            place, shape = expert_place(experts, linear.expert), geometry.global_shape[1:]
            geometry = Geometry.nothing(shape) if place is None else Geometry(shape, tuple(dim_runs))
            local = local.new_empty(geometry.local_shape) if place is None else local[place]
        matrix = Matrix(linear.num_out, linear.num_in, linear.transposed)
        shard = dataclasses.replace(
            self.parameter, name=self.name, local=local, geometry=geometry, matrix=matrix, tensor=None
        )
        held = LocalMatrix.of(geometry, matrix)
        assert held is not None  # DTensors cut dims, never within a row
        outputs = self.found.outputs.sqrt()[torch.from_numpy(held.rows)].to(local.device)
        inputs = self.found.inputs.sqrt()[torch.from_numpy(held.columns)].to(local.device)
        output, given = (outputs, inputs[:, None]) if linear.transposed else (outputs[:, None], inputs)
        return LocalScores(shard, _COST, {"output": output.expand_as(local), "input": given.expand_as(local)})


@final
@dataclass(frozen=True)
class _Cost(Score):
    """The root of r_i W_ij^2 H_jj. Evidence, float32, per weight: ``output``, the root of r_i; ``input``, of H_jj."""

    needs = ("output", "input")

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight.abs().float() * elements["output"] * elements["input"]


_COST = _Cost()


def _num_lowest(comm: Communicator, layers: Mapping[str, _Layer], names: Sequence[str], num: int) -> dict[str, int]:
    """Return how many weights of each of ``names`` are among the ``num`` lowest of all. Every rank must call it."""
    roster = roster_of_one(comm, [layers[name].member() for name in names])
    ranked = Ranked(comm, roster, _COST, lambda: [layers[name].scores() for name in names], checks=False)
    choice = ranked.choose(Unstructured(num))

    def count(words: torch.Tensor) -> None:
        for i, counts in enumerate(fetched(choice.write_masks(ranked.scores)[1])):
            words[i] = counts[0] if ranked.scores[i].shard.owned else 0

    return dict(zip(names, sum_together(comm, (len(names),), count).tolist(), strict=True))
