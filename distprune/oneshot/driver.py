"""Runs a solver over the ranks: sends what rows need, lets scores compete, and sums what was done.

Of each input its owner makes what leads to targets and what the solver prepares, owners side by side, and sends it to
all; every rank solves the rows that it holds. Where all rows are on the owner, as of an expert, nothing is sent.

On a device nobody waits for a figure of one layer: figures stay there and are fetched once, when all layers are done.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch

from distprune.calibration.moments import Moments
from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone
from distprune.collectives.guarded import guarding
from distprune.collectives.roster import Member, roster_of_one
from distprune.collectives.tensors import broadcast_tensor
from distprune.oneshot.report import LayerReport
from distprune.oneshot.retarget import Aim, retarget, way_to_target
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import COMPUTED, SIZES, Computed, Solved, Solver, as_keys
from distprune.patterns.base import Pattern, Ranked
from distprune.patterns.unstructured import Unstructured
from distprune.scores.base import Score, local_scores
from distprune.shards.device import are_finite, fetched, on_host, own_settings

Clock = Callable[[str], AbstractContextManager[None]]
_PRODUCTS = "X^T X"  # as it is sent, beside what a solver prepares
# Of a layer: how many scores were NaN, whether new weights are not finite, how many the pattern prunes and are zero,
# ||X (W - W')^T||^2, ||X W^T||^2, and the damping.
_NUM_FIGURES = 7


@own_settings()
def prune_rows(
    comm: Communicator,
    rows: Mapping[str, Rows],
    moments: list[Moments],
    clock: Clock,
    aim: Aim,
    *,
    solver: Solver,
    pattern: Pattern,
) -> dict[str, LayerReport]:
    """Prune ``rows`` in place, by layer, and return what became of the rows of all ranks; replicas count once.

    ``moments`` are what the solver needs, and are used up. Where they come with targets, rows are first moved there as
    ``aim`` says. Every rank must call it. Rounds: 1 of 56 bytes a layer; for each input whose rows are not on its
    owner alone 2 and 1 for each tensor that is sent, and as many for targets; 1 of W^T W where the solver asks for it;
    those of what the solver chooses; 64 bytes before each.

    Raises:
        ValueError: on every rank: scores are NaN, or new weights are not finite.
        Exception: on every rank: what the solver raised on one. Rows may have been changed.
    """
    num_tokens = {name: m.num_tokens for m in moments for name in m.names}
    figures: dict[str, torch.Tensor] = {}
    with guarding(comm) as ranks:
        inputs = [_Input(ranks, solver, m, {name: rows[name] for name in m.names}) for m in moments]
        moments.clear()
        with clock("target"):
            ways = [way_to_target(one.moments, aim) if one.is_owner and aim.share else {} for one in inputs]
            for one in inputs if aim.share else ():
                retarget(one.rows, one.sent(ways.pop(0)), aim)
        with clock("factor"):
            for one in inputs if solver.needs_gram else ():
                one.sum_gram()
            for one in inputs:
                one.prepare()
        while inputs:
            one = inputs.pop(0)
            with clock("factor"):
                one.send()
            with clock("sweep"):
                figures |= one.solve(pattern)
        with clock("sweep"):  # or wait for those that still do
            return _reports(ranks, rows, figures, num_tokens)


def _reports(
    comm: Communicator, rows: Mapping[str, Rows], figures: Mapping[str, torch.Tensor], num_tokens: Mapping[str, int]
) -> dict[str, LayerReport]:
    """Return what became of the ``rows`` of all ranks, by layer.

    ``figures`` (_NUM_FIGURES,), float64, are what this rank adds, of layers that it has rows of, on their device: one
    wait. Every rank must call it: one round of 56 bytes a layer and 8.
    """

    def fill(words: torch.Tensor) -> None:
        here = dict(zip(figures, fetched([*figures.values()]), strict=True))
        for name, word in zip(rows, words, strict=True):
            word.copy_(here.get(name, word))

    reports = {}
    totals = sum_together(comm, (len(rows), _NUM_FIGURES), fill, torch.float64).tolist()
    for (name, layer), (num_nans, is_spoiled, num_pruned, num_zeros, *others) in zip(rows.items(), totals, strict=True):
        if num_nans:
            raise ValueError(f"scores are NaN in {layer.name!r}; mend the values first")
        if is_spoiled:
            raise ValueError(f"the new weights of {layer.name!r} are NaN or infinite in {layer.weight.dtype}")
        error, output, damping = others
        relative_error = (max(error, 0.0) / output) ** 0.5 if output > 0 else None
        counts = layer.num_out * layer.weight.shape[1], int(num_pruned), int(num_zeros)
        reports[name] = LayerReport(layer.name, *counts, relative_error, damping or None, num_tokens[name])
    return reports


@dataclass
class _Input:
    """Layers that share an input, and this rank's ``rows`` of them. All ranks take the same steps, in turn.

    Where only the owner has rows, ``comm`` is each rank alone.
    """

    comm: Communicator
    solver: Solver
    moments: Moments
    rows: Mapping[str, Rows]
    num_nans: defaultdict[str, list[torch.Tensor]] = field(default_factory=partial(defaultdict, list))

    def __post_init__(self) -> None:
        self.is_owner = self.moments.owner == self.comm.rank
        if self.moments.is_alone or self.comm.size == 1:
            self.comm = Alone()

    def sent(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the owner's ``tensors`` on every rank that has rows."""
        comm, owner, received = self.comm, self.moments.owner, dict[str, torch.Tensor]()
        if comm.size == 1:
            return tensors
        device = next(iter(self.rows.values())).weight.device
        kinds = {name: [str(values.dtype).removeprefix("torch."), [*values.shape]] for name, values in tensors.items()}
        for name, (dtype, shape) in comm.broadcast(kinds, owner).items():
            empty = partial(torch.empty, shape, dtype=getattr(torch, dtype), device=device)
            received[name] = broadcast_tensor(comm, tensors[name] if self.is_owner else empty(), owner)
        return received

    def sum_gram(self) -> None:
        """Let the owner have W^T W over all ranks' rows, float64."""
        num_in = len(self.moments.squares)
        gram = torch.zeros((num_in, num_in), dtype=torch.float64, device=self.moments.squares.device)
        for layer in self.rows.values():
            if layer.owned and layer.weight.numel():
                weight = self.solver.weighed(layer).double()
                gram += weight.t() @ weight
        self.comm.reduce_(gram, "sum", None if self.comm.size == 1 else self.moments.owner)
        self.moments = dataclasses.replace(self.moments, gram=gram)

    def prepare(self) -> None:
        """Let the owner make what the solver needs."""
        prepared = dict(self.solver.prepare(self.moments)) if self.is_owner else {}
        if self.moments.products is not None:
            prepared[_PRODUCTS] = self.moments.products.float()
        left = dataclasses.replace(self.moments, products=None, shift=None, residuals={}, gram=None)
        self.moments = dataclasses.replace(left, prepared=prepared)

    def send(self) -> None:
        """Let every rank that has rows have what the owner made. Squares are everywhere."""
        if self.moments.has_products:
            prepared = dict(self.sent(self.moments.prepared))
            self.moments = dataclasses.replace(self.moments, products=prepared.pop(_PRODUCTS, None), prepared=prepared)

    def solve(self, pattern: Pattern) -> dict[str, torch.Tensor]:
        """Solve the rows, and return what became of them."""
        if self.comm.size == 1 and not self.is_owner:
            return {}
        before = {name: layer.weight.clone() for name, layer in self.rows.items()}
        solved = self.solver.solve(self.rows, self.moments, pattern, self._choose)
        return {name: self._figures(name, layer, before.pop(name)) for name, layer in solved.items()}

    def _figures(self, name: str, solved: Solved, before: torch.Tensor) -> torch.Tensor:
        """Return what :func:`_reports` adds up of this rank's rows of a layer; replicas and factors count once."""
        rows, weight = self.rows[name], self.rows[name].weight
        figures = torch.zeros(_NUM_FIGURES, dtype=torch.float64, device=weight.device)
        if rows.owned:
            error, output = solved.error, self.moments.squared_output(before)
            error = self.moments.squared_output(before.float().sub_(weight)) if error is None else error
            num_pruned, num_zeros = (weight.numel() - torch.count_nonzero(there) for there in (solved.keep, weight))
            numbers = sum(self.num_nans[name]), ~are_finite(weight), num_pruned, num_zeros, error, output
            for i, number in enumerate(numbers):
                figures[i] = number
        if self.is_owner:
            figures[-1] = solved.damping
        return figures

    def _choose(
        self, values: Mapping[str, torch.Tensor], pattern: Pattern, score: Score = COMPUTED
    ) -> dict[str, torch.Tensor]:
        """As :class:`Choose`."""
        of_weights = not isinstance(score, Computed)
        if pattern.is_by_row and not of_weights:
            return {name: pattern.of(self.rows[name].name).keep(as_keys(scores)) for name, scores in values.items()}
        is_local = self.comm.size == 1 and not on_host(self.moments.squares.device) and score is SIZES
        if is_local and isinstance(pattern, Unstructured) and pattern.scope == "tensor":  # one sort, no wait
            return {name: pattern.keep_alone(self.rows[name].name, as_keys(sizes)) for name, sizes in values.items()}
        shards = [self.rows[name].shard(local) for name, local in values.items()]
        members = [Member(shard.name, shard.geometry.global_shape, str(shard.local.dtype)) for shard in shards]
        norms = self.moments.norms
        evidence = {shard.name: {"input_norm": norms.expand_as(shard.local)} for shard in shards if of_weights}
        scores = partial(local_scores, score, shards, evidence, zeros_are_gone=of_weights)
        ranked = Ranked(self.comm, roster_of_one(self.comm, members), score, scores, checks=False)
        masks, counts = ranked.choose(pattern).write_masks(ranked.scores)
        for name, (_, _, num_nans) in zip(values, counts, strict=True):
            self.num_nans[name].append(num_nans)
        return dict(zip(values, masks, strict=True))
