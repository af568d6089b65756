"""Sparsity where it costs least: a share for each linear layer, from one backward pass over the dense model.

Zeroing weight W_ij changes output i by W_ij x_j, which the loss feels as r_i W_ij^2 H_jj to second order: r_i is the
sum over tokens of the squared gradient of output i, H_jj that of the squares of input j. Weights of all layers compete
by that, and how many of each layer fall below the one threshold is its share, to within what a histogram of their
logarithms tells. Which of them go is not decided here: a solver chooses within each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import nn

from distprune.calibration.own_words import samples_of
from distprune.calibration.sensitivity import Sensitivity, measure_sensitivities, sums_of_all
from distprune.calibration.token_ids import TokenIds
from distprune.collectives.agree import max_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.models.decoder_blocks import bare_model, decoder_blocks
from distprune.models.find_shards import Found
from distprune.models.linear_layers import LinearLayer, expert_place
from distprune.oneshot.plan import check_predicts, make_plan
from distprune.oneshot.recipe import Recipe
from distprune.patterns.within_rows import PerRow
from distprune.pruning.agreement import agreeing
from distprune.shards.device import fetched, on_host, own_settings, row_chunks, sent
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import LocalMatrix, Matrix
from distprune.shards.parts import check_parts

Allocation = Literal["uniform", "gradients"]
Bounds = tuple[int, int]  # the least and the most
_NUM_BINS, _NUM_OCTAVES = 2048, 64  # of scores: those further below the highest are alike
_NUM_HALVINGS = 40


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
    rows of the smallest layer. A layer that no token reached (an expert that nothing was routed to), or that runs
    without gradients (an indexer of attention), has ``sparsity``.

    Args:
        model, samples, group, batch_tokens: as of :func:`distprune.prune_blocks`; samples of two tokens or more.
        max_difference: no share lies further than that from ``sparsity``.
        progress: called with how many of this rank's batches are done, and how many there are.

    Every rank of ``group`` must call it, with equal arguments; all come to the same shares, and N ranks to those of
    one but for rounding. The model is left as it was. In memory beyond its shards: the hidden states of one batch
    between blocks, the activations of one block, which a backward pass needs, and 16 KiB a layer. Rounds: 7 (4 more
    where ranks hold different parameters), those of ``in_step``, and one for each 8 MiB of 8 bytes for each input and
    output of a layer, and of 16 KiB a layer.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``prune_blocks`` refuses; a budget that no
            shares within bounds meet; NaN or Inf in the loss, with the samples, or in gradients, with the layer; logits
            that are cut over ranks; torch's inference mode.
        RuntimeError: on every rank: a forward that changes the model's own weights.
    """
    comm, model = communicator(group), bare_model(model)
    samples = samples_of(comm, model, samples)

    with agreeing(comm) as agreed:
        if not isinstance(sparsity, float) or not isinstance(max_difference, Real):
            raise TypeError(f"each must be a share such as 0.6: {sparsity=}, {max_difference=}")
        recipe = Recipe(method="magnitude", pattern=PerRow(sparsity))
        plan = make_plan(model, samples, recipe, batch_tokens=batch_tokens)
        check_predicts(plan.samples)
        if not 0 <= max_difference <= 1:
            raise ValueError(f"{max_difference=} is not between 0 and 1")
        agreed.found = Found(plan.shards, has_blocks=True)
        agreed.facts = {**plan.facts, "max_difference": repr(max_difference)}
    shards = {shard.name: shard for shard in agreed.shards()}
    check_parts(comm, agreed.roster, lambda: list(shards.values()))
    every = {
        f"{block}.{layer}": linear
        for (block, _), of_block in zip(decoder_blocks(model), plan.linears, strict=True)
        for layer, linear in of_block.linears.items()
    }
    linears = {name: linear for name, linear in every.items() if linear.num_in * linear.num_out}
    found = measure_sensitivities(comm, model, linears, plan.samples, progress, batch_tokens)
    layers = [
        _Layer(shards[name.removesuffix(linear.name) + linear.parameter_path], linear, found[name])
        for name, linear in linears.items()
    ]
    histograms = _histograms(comm, layers)
    with together(comm):
        num_out = [linear.num_out for linear in linears.values()]
        bounds = [
            _bounds(linear.num_in, sparsity, max_difference if found[name].inputs.any() else 0.0)
            for name, linear in linears.items()
        ]
        of_layers = [(low * rows, high * rows) for (low, high), rows in zip(bounds, num_out, strict=True)]
        budget = round(sparsity * sum(linear.num_out * linear.num_in for linear in linears.values()))
        counts = below_one_threshold(torch.stack(histograms), of_layers, budget)
        pruned = whole_rows_of(counts, num_out, bounds, budget)
        shares = {name: num / linear.num_in for (name, linear), num in zip(linears.items(), pruned, strict=True)}
        return {name: shares.get(name, sparsity) for name in every}


def _bounds(num_in: int, sparsity: float, max_difference: float) -> Bounds:
    """Return the least and the most weights that may go of a row; the uniform number is always allowed."""
    uniform = round(sparsity * num_in)
    least = math.ceil(round((sparsity - max_difference) * num_in, 6))
    most = math.floor(round((sparsity + max_difference) * num_in, 6))
    return max(0, min(least, uniform)), min(num_in, max(most, uniform))


def below_one_threshold(histograms: torch.Tensor, bounds: Sequence[Bounds], budget: int) -> list[float]:
    """Return how many weights of each layer go, within ``bounds``, ``budget`` over all: those below one threshold.

    ``histograms`` (layers, bins) count weights by their scores, alike in all layers; within a bin they lie evenly.

    Raises:
        ValueError: no numbers within bounds add up to ``budget``.
    """
    least, most = torch.tensor(bounds, dtype=torch.float64, device="cpu").t()
    if not least.sum() <= budget <= most.sum():
        raise ValueError(
            f"no shares meet the budget: {budget} weights are to be pruned, and the bounds allow {int(least.sum())} to "
            f"{int(most.sum())}; change the sparsity, or raise max_difference"
        )
    below = nn.functional.pad(histograms.double().cumsum(dim=1), (1, 0))
    last = histograms.shape[1] - 1

    def counts(threshold: float) -> torch.Tensor:
        place = min(int(threshold), last)
        return torch.lerp(below[:, place], below[:, place + 1], threshold - place).clamp(least, most)

    low, high = 0.0, last + 1.0
    for _ in range(_NUM_HALVINGS):
        threshold = (low + high) / 2
        low, high = (threshold, high) if counts(threshold).sum() < budget else (low, threshold)
    return list(counts(high).tolist())


def whole_rows_of(counts: Sequence[float], num_out: Sequence[int], bounds: Sequence[Bounds], budget: int) -> list[int]:
    """Return how many weights go of each row of each layer, ``counts`` weights of the layer before rounding.

    They are rounded down or up, up where the most was lost, so that ``budget`` is met but for half the rows of a layer.
    """
    exact = [round(count / rows, 6) for count, rows in zip(counts, num_out, strict=True)]
    found = [math.floor(count) for count in exact]
    left = budget - sum(count * rows for count, rows in zip(found, num_out, strict=True))
    up = sorted((i for i, (_, most) in enumerate(bounds) if found[i] < most), key=lambda i: -(exact[i] % 1))
    for i in list(up):
        if num_out[i] <= left:
            up.remove(i)
            found[i] += 1
            left -= num_out[i]
    smallest = min(up, key=num_out.__getitem__, default=None)
    if smallest is not None and 2 * left > num_out[smallest]:
        found[smallest] += 1
    return found


@dataclass(frozen=True)
class _Layer:
    """A linear layer, the part of its parameter on this rank, and what the backward pass found."""

    parameter: LocalShard
    linear: LinearLayer
    found: Sensitivity

    def factors(self) -> list[torch.Tensor]:
        """Return this rank's weights, and the roots of r_i and H_jj beside each, which are expanded."""
        linear, geometry, local = self.linear, self.parameter.geometry, self.parameter.local
        if linear.expert is not None:
            experts, *dim_runs = geometry.dim_runs
            place, shape = expert_place(experts, linear.expert), geometry.global_shape[1:]
            geometry = Geometry.nothing(shape) if place is None else Geometry(shape, tuple(dim_runs))
            local = local.new_empty(geometry.local_shape) if place is None else local[place]
        held = LocalMatrix.of(geometry, Matrix(linear.num_out, linear.num_in, linear.transposed))
        outputs = sent(self.found.outputs.sqrt()[torch.from_numpy(held.rows)], local.device)
        inputs = sent(self.found.inputs.sqrt()[torch.from_numpy(held.columns)], local.device)
        output, given = (outputs, inputs[:, None]) if linear.transposed else (outputs[:, None], inputs)
        return [local, output.expand_as(local), given.expand_as(local)]

    def histogram(self, highest: float) -> torch.Tensor:
        """Return how many of this rank's weights have which score: by its logarithm, ``highest`` at most, (bins,)."""
        device = self.parameter.local.device
        counts = torch.zeros(_NUM_BINS, dtype=torch.int64, device=device)
        for weights, outputs, inputs in row_chunks(*self.factors()) if self.parameter.owned else ():
            scores = (weights.abs().float() * outputs * inputs).log2_().flatten()
            bins = scores.sub_(highest - _NUM_OCTAVES).mul_(_NUM_BINS / _NUM_OCTAVES).clamp_(0, _NUM_BINS - 1).long()
            if on_host(device):
                counts += torch.bincount(bins, minlength=_NUM_BINS)
            else:  # where that would wait
                counts.index_add_(0, bins, torch.ones_like(bins))
        return counts

    def most(self) -> torch.Tensor:
        """Return what no score of this rank's weights is above."""
        weights, root = self.factors()[0], float((self.found.inputs.max() * self.found.outputs.max()).sqrt())
        extremes = torch.aminmax(weights) if weights.numel() else weights.new_zeros(2)  # of experts of other ranks
        return torch.stack([*extremes]).abs().amax().float() * root


@own_settings()
def _histograms(comm: Communicator, layers: Sequence[_Layer]) -> list[torch.Tensor]:
    """Return for each layer how many of its weights have which score, (bins,) float64: bins are those of all.

    Every rank must call it: a round of 8 bytes, and those of ``sums_of_all``, of 16 KiB a layer.
    """

    def fill_most(words: torch.Tensor) -> None:
        words.fill_(max(map(float, fetched([layer.most() for layer in layers])), default=0.0))

    most = float(max_together(comm, (1,), fill_most, torch.float64))
    highest = math.log2(most) if most > 0 else 0.0
    return sums_of_all(comm, [_NUM_BINS] * len(layers), lambda number: layers[number].histogram(highest))
