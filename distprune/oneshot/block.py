"""A walk through the blocks of a model, each of which is pruned in its turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from distprune.calibration.catch_inputs import walking
from distprune.calibration.moments import Moments
from distprune.calibration.order import BlockOrder, learn_order
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.targets import Targets
from distprune.calibration.walk import Walk
from distprune.collectives.agree import max_together, together
from distprune.collectives.base import Communicator, Traffic
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.oneshot.block_fit import BlockFit, batch_size, fit_block
from distprune.oneshot.block_layers import naming, unreached
from distprune.oneshot.channel_order import permute_block
from distprune.oneshot.driver import Clock
from distprune.oneshot.plan import WalkPlan
from distprune.oneshot.recipe import EPOCHS
from distprune.oneshot.report import BlockReport, LayerReport, Meter, OneShotReport, clock
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import Rows, whole_rows

OnBlock = Callable[[int, BlockReport], None]
Finished = Callable[[int], bool]

_STAGES = ("forward", "reduce", "target", "factor", "sweep", "fit")
_HEALING = Aim(share=1.0, damping=1.0)  # what one layer can make up for whole layers overfits with less

# Prunes rows, this rank's, by layer of the block, and returns what became of each. Empties the moments.
# Every rank calls it.
PruneRows = Callable[[Communicator, Mapping[str, Rows], list[Moments], Clock, Aim], Mapping[str, LayerReport]]

_Orders = dict[tuple[tuple[str, ...], ...], BlockOrder]  # by the names of all layers: blocks are alike


def run_blocks(
    meter: Meter,
    model: nn.Module,
    plan: WalkPlan,
    prune_rows: PruneRows,
    *,
    finished: Finished | None,
    on_block: OnBlock | None,
    num_parameters: int | None = None,
    **about: Any,
) -> OneShotReport:
    """Run samples through the blocks of ``model`` and prune layers of each, as ``plan`` says, whose owners are settled.

    ``about``: what else the report says. The other arguments are those of ``prune_blocks``. Every rank must call it.
    """
    comm, recipe, reports = meter.comm, plan.recipe, list[BlockReport]()
    calls_back = bool(max_together(comm, (1,), lambda words: words.fill_(on_block is not None)))
    how = {name: getattr(recipe, name) for name in ("sequential", "target_share", "refit", "permute")}
    with walking(
        comm,
        model,
        plan.samples,
        offload=plan.offload,
        has_dense=recipe.has_targets,
        batch_tokens=plan.batch_tokens,
        num_together=batch_size(len(plan.samples)) if recipe.refit == "block" else None,
    ) as walk:
        orders: _Orders = {}
        left = [index for index in range(len(walk.blocks)) if index not in plan.skipped]
        for index in range(left[0] if recipe.has_targets else 0):
            walk.advance(index, comm, dense=True)
        for index, following in pairwise([*left, len(walk.blocks)]):
            block = _BlockWalk(comm, walk, plan, prune_rows, orders, index, following)
            if finished is None or recipe.has_targets:  # the dense stream goes through a block before it is restored
                block.begin()
            if finished is not None:
                if block.is_restored(finished):
                    num_parameters = None
                    continue
                finished = None
                if not recipe.has_targets:
                    block.begin()
            reports.append(block.prune())
            if calls_back:
                with together(comm):
                    if on_block is not None:
                        on_block(index, reports[-1])
    return OneShotReport(
        num_samples=len(plan.samples),
        blocks=tuple(reports),
        num_parameters=num_parameters,
        **how,
        **about,
        **meter.read(),
    )


@dataclass
class _BlockWalk:
    """Block ``index`` of a walk, which has ``prune_rows`` prune its layers. With targets there must be a dense stream.

    Block ``following`` comes next, if there is one. ``order`` and ``targets`` are found before the block is pruned;
    ``dense`` are weights that stay so, with the reasons; ``reports`` are by layer; ``traffic`` is that before.
    """

    comm: Communicator
    walk: Walk
    plan: WalkPlan
    prune_rows: PruneRows
    orders: _Orders
    index: int
    following: int
    order: BlockOrder = field(init=False)
    targets: Targets | None = None
    dense: dict[str, str] = field(init=False)
    traffic: Traffic = field(init=False)
    seconds: dict[str, float] = field(init=False)
    reports: dict[str, LayerReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, self.module = self.walk.blocks[self.index]
        self.layers, self.recipe = self.plan.linears[self.index].linears, self.plan.recipe
        self.advances = self.following < len(self.walk.blocks)

    @cached_property
    def everything(self) -> dict[str, LinearLayer]:
        """All linear layers of the block, those that stay dense, too."""
        return linear_layers(self.module)

    def begin(self) -> None:
        """Put the channels in order, if that is asked for, and advance the dense stream behind the block.

        Every rank must call it, as what follows: :meth:`is_restored`, :meth:`prune`.
        """
        pattern = self.recipe.permutes
        self.traffic, self.dense = self.comm.traffic.copy(), dict(self.plan.linears[self.index].dense)
        self.seconds = dict.fromkeys(_STAGES if pattern is None else ("permute", *_STAGES), 0.0)
        if pattern is not None:
            with clock(self.seconds, "permute"):
                permute_block(self.comm, self.walk, self.index, self.layers, self.plan.owned, pattern)
        with clock(self.seconds, "forward"):
            self.order = self._order()
            if self.recipe.has_targets:
                self.targets = self._dense_pass()

    def is_restored(self, finished: Finished) -> bool:
        """Return whether ``finished`` brings the block to what it was pruned to; then advance behind it."""
        with together(self.comm) as facts:
            facts[f"finished({self.index})"] = is_done = bool(finished(self.index))
        if is_done and self.advances:
            self.walk.advance(self.index, self.comm)
        return is_done

    def prune(self) -> BlockReport:
        """Prune the block stage by stage, and advance the walk behind it, if another block follows."""
        needs = "products" if self.recipe.has_targets else self.recipe.solver.needs
        for stage in self.order.stages:
            layers = {layer: self.layers[layer] for layer in stage}
            stops = self.order.called_once.issuperset(stage)
            statistics = InputStatistics(self.comm, self.walk, layers, needs, self.targets, stops)
            with clock(self.seconds, "forward"):
                statistics.run(self.index)
            for moments in self._reduced(statistics):
                self._prune_layers(moments)
                del moments  # before the next wave is made
        self.targets, fit = None, None
        if self.recipe.refit == "block":
            with clock(self.seconds, "fit"):
                matrices = {linear.parameter_path for linear in self.everything.values()} - self.dense.keys()
                how = self.recipe.seed or 0, self.recipe.epochs or EPOCHS, self.advances
                fit = fit_block(self.comm, self.walk, self.index, matrices, *how)
        elif self.advances:
            with clock(self.seconds, "forward"):
                self.walk.advance(self.index, self.comm)
        return self._report(fit)

    def _prune_layers(self, moments: list[Moments]) -> None:
        """Prune the layers that ``moments`` are of, but for those that no token reached."""
        now = {layer: self.layers[layer] for layer in self.layers if any(layer in m.names for m in moments)}
        unseen = unreached(self.name, now, moments)
        self.dense |= {now.pop(layer).parameter_path: reason for layer, reason in unseen.items()}
        moments = [m for m in moments if m.names[0] in now]
        is_own = any(f"{self.name}.{layer}" in self.plan.towards_own for layer in now)
        aim = Aim(0.0 if is_own else self.recipe.target_share or 0.0)
        if self._healed in now:
            aim = _HEALING
        with whole_rows(self.comm, now, self.plan.owned, f"{self.name}.") as rows, torch.no_grad():
            self.reports |= self.prune_rows(self.comm, rows, moments, partial(clock, self.seconds), aim)

    def _report(self, fit: BlockFit | None) -> BlockReport:
        adding = [layer for layer in self.layers if layer in self.order.adding and self.recipe.has_targets]
        used = self.comm.traffic - self.traffic
        return BlockReport(
            self.index,
            self.name,
            layers=tuple(self.reports[layer] for layer in self.layers if layer in self.reports),
            dense={f"{self.name}.{path}": reason for path, reason in self.dense.items()},
            residual=tuple(f"{self.name}.{layer}" for layer in adding),
            seconds=self.seconds,
            num_rounds=used.num_rounds,
            num_bytes=used.num_bytes,
            fit=fit,
        )

    def _reduced(self, statistics: InputStatistics) -> Iterator[list[Moments]]:
        """Yield the moments of ``statistics``, as :meth:`InputStatistics.reduce` does; an error names the block."""
        waves = statistics.reduce(self.plan.expert_memory)
        while True:
            with clock(self.seconds, "reduce"), naming(self.name):
                moments = next(waves, None)
            if moments is None:
                return
            yield moments
            del moments

    def _order(self) -> BlockOrder:
        by_layer = self.recipe.sequential == "layer"
        if not (by_layer or self.recipe.has_targets):
            return BlockOrder((tuple(self.layers),), frozenset(), frozenset(), frozenset())
        names = tuple(self.layers), tuple(self.everything)
        if names not in self.orders:
            order = learn_order(self.comm, self.walk, self.index, self.everything).of(self.layers)
            self.orders[names] = order if by_layer else order.at_once()
        return self.orders[names]

    @property
    def _healed(self) -> str | None:
        """The layer whose target is what is behind a gap, where there is one; it must add to hidden states."""
        healed = self.plan.healed.get(self.index)
        return healed if healed in self.order.adding else None

    def _dense_pass(self) -> Targets:
        """Advance the dense stream behind the block, which is dense, and a gap, and return what it meets there."""
        walk, targets = self.walk, Targets(self.walk, self.order, self.everything)
        targets.run(self.comm, self.index, self.layers)
        for skipped in range(self.index + 1, self.following):
            walk.advance(skipped, self.comm, dense=True)
        if self._healed is not None:
            for totals, hidden in zip(targets.totals, walk.dense, strict=True):
                totals[self._healed] = hidden.reshape(-1, hidden.shape[-1])
        elif self.index in self.plan.healed:
            layer, why = self.plan.healed[self.index], "what it puts out is not added to hidden states as it is"
            warnings.warn(f"'{self.name}.{layer}' cannot make up for the blocks behind it: {why}", stacklevel=2)
        return targets
