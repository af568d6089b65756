"""A walk through the blocks of a model, each of which is pruned in its turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from distprune.calibration.moments import Moments
from distprune.calibration.order import BlockOrder, learn_order
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.targets import Targets
from distprune.calibration.visit import walking
from distprune.calibration.walk import Walk
from distprune.collectives.agree import agree, max_together, together
from distprune.collectives.base import Communicator, Traffic
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.oneshot.block_fit import BlockFit, batch_size, fit_block
from distprune.oneshot.block_layers import naming, unreached
from distprune.oneshot.channel_order import permute_block
from distprune.oneshot.driver import Clock
from distprune.oneshot.plan import WalkPlan
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


def run_blocks(
    meter: Meter,
    sample_group: SampleGroup,
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
        sample_group,
        model,
        plan.samples,
        offload=plan.offload,
        has_dense=recipe.has_targets,
        batch_tokens=plan.batch_tokens,
        num_together=batch_size(len(plan.samples)) if recipe.refit == "block" else None,
    ) as walk:
        pruner = _BlockPruner(comm, walk, plan, prune_rows)
        for index in range(len(walk.blocks)):
            if index in plan.skipped:
                continue
            # The dense stream goes through a block before it is restored.
            begun = pruner.begin(index) if finished is None or recipe.has_targets else None
            if finished is not None:
                if pruner.is_restored(index, finished):
                    num_parameters = None
                    continue
                finished = None
            reports.append(pruner.prune(begun or pruner.begin(index)))
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
class _Begun:
    """Block ``index``: its ``order`` and ``targets``, found before it is pruned, and what becomes of it.

    ``dense``: weights that stay so, with the reasons; ``reports`` are by layer.
    """

    index: int
    traffic: Traffic  # before
    seconds: dict[str, float]
    dense: dict[str, str]
    order: BlockOrder = field(init=False)
    targets: Targets | None = None
    reports: dict[str, LayerReport] = field(default_factory=dict)


@dataclass
class _BlockPruner:
    """Has ``prune_rows`` prune layers of each block of a walk, in turn. With targets the walk must have a dense stream.

    ``orders`` are by the names of all layers: blocks are alike. The dense stream is behind ``num_dense`` blocks.
    """

    comm: Communicator
    walk: Walk
    plan: WalkPlan
    prune_rows: PruneRows
    orders: dict[tuple[tuple[str, ...], ...], BlockOrder] = field(default_factory=dict)
    num_dense: int = 0

    def begin(self, index: int) -> _Begun:
        """Put the channels of block ``index`` in order, if that is asked for, and advance the dense stream behind it.

        Every rank must call it, as what follows: :meth:`is_restored`, :meth:`prune`.
        """
        layers, pattern = self.plan.linears[index], self.plan.recipe.permutes
        stages = _STAGES if pattern is None else ("permute", *_STAGES)
        begun = _Begun(index, self.comm.traffic.copy(), dict.fromkeys(stages, 0.0), dict(layers.dense))
        if pattern is not None:
            with clock(begun.seconds, "permute"):
                permute_block(self.comm, self.walk, index, layers.linears, self._owned, pattern)
        with clock(begun.seconds, "forward"):
            begun.order = self._order(index, layers.linears)
            if self.plan.recipe.has_targets:
                begun.targets = self._dense_pass(index, layers.linears, begun.order)
        return begun

    def is_restored(self, index: int, finished: Finished) -> bool:
        """Return whether ``finished`` brings block ``index`` to what it was pruned to; then advance behind it."""
        with together(self.comm):
            is_done = bool(finished(index))
        agree(self.comm, {f"finished({index})": is_done})
        if is_done and self._next(index) < len(self.walk.blocks):
            self.walk.advance(index, self.comm)
        return is_done

    def prune(self, begun: _Begun) -> BlockReport:
        """Prune the block stage by stage, and advance the walk behind it, if another block follows."""
        walk, index, recipe = self.walk, begun.index, self.plan.recipe
        for stage in begun.order.stages:
            with clock(begun.seconds, "forward"):
                statistics = self._run(begun, stage)
            for moments in self._reduced(statistics, begun):
                self._prune_layers(begun, moments)
                del moments  # before the next wave is made
        begun.targets = None
        fit, advances = None, self._next(index) < len(walk.blocks)
        if recipe.refit == "block":
            with clock(begun.seconds, "fit"):
                linears = linear_layers(walk.blocks[index][1]).values()
                matrices = {linear.parameter_path for linear in linears} - begun.dense.keys()
                fit = fit_block(self.comm, walk, index, matrices, recipe.seed or 0, advances)
        elif advances:
            with clock(begun.seconds, "forward"):
                walk.advance(index, self.comm)
        return self._report(begun, fit)

    @property
    def _owned(self) -> dict[str, bool]:
        """Whether this rank counts a parameter, by its name in the model."""
        return {shard.name: shard.owned for shard in self.plan.shards}

    def _prune_layers(self, begun: _Begun, moments: list[Moments]) -> None:
        """Prune the layers that ``moments`` are of, but for those that no token reached."""
        plan, name, layers = self.plan, self.walk.blocks[begun.index][0], self.plan.linears[begun.index].linears
        now = {layer: layers[layer] for layer in layers if any(layer in m.names for m in moments)}
        unseen = unreached(name, now, moments)
        begun.dense |= {now.pop(layer).parameter_path: reason for layer, reason in unseen.items()}
        moments = [m for m in moments if m.names[0] in now]
        has_target = not any(f"{name}.{layer}" in plan.towards_own for layer in now)
        aim = Aim((plan.recipe.target_share or 0.0) if has_target else 0.0)
        if self._heals(begun.index, begun.order) in now:
            aim = _HEALING
        with whole_rows(self.comm, now, self._owned, f"{name}.") as rows, torch.no_grad():
            begun.reports |= self.prune_rows(self.comm, rows, moments, partial(clock, begun.seconds), aim)

    def _report(self, begun: _Begun, fit: BlockFit | None) -> BlockReport:
        name, linears = self.walk.blocks[begun.index][0], self.plan.linears[begun.index].linears
        adding = [layer for layer in linears if layer in begun.order.adding]
        used = self.comm.traffic - begun.traffic
        return BlockReport(
            begun.index,
            name,
            layers=tuple(begun.reports[layer] for layer in linears if layer in begun.reports),
            dense={f"{name}.{path}": reason for path, reason in begun.dense.items()},
            residual=tuple(f"{name}.{layer}" for layer in adding if self.plan.recipe.has_targets),
            seconds=begun.seconds,
            num_rounds=used.num_rounds,
            num_bytes=used.num_bytes,
            fit=fit,
        )

    def _reduced(self, statistics: InputStatistics, begun: _Begun) -> Iterator[list[Moments]]:
        """Yield the moments of ``statistics``, as :meth:`InputStatistics.reduce` does; an error names the block."""
        waves = statistics.reduce(self.plan.expert_memory)
        while True:
            with clock(begun.seconds, "reduce"), naming(self.walk.blocks[begun.index][0]):
                moments = next(waves, None)
            if moments is None:
                return
            yield moments
            del moments

    def _next(self, index: int) -> int:
        """Return the block after block ``index`` that is not skipped, or how many blocks there are."""
        return next(i for i in range(index + 1, len(self.walk.blocks) + 1) if i not in self.plan.skipped)

    def _order(self, index: int, linears: Mapping[str, LinearLayer]) -> BlockOrder:
        by_layer = self.plan.recipe.sequential == "layer"
        if not (by_layer or self.plan.recipe.has_targets):
            return BlockOrder((tuple(linears),), frozenset(), frozenset(), frozenset())
        everything = linear_layers(self.walk.blocks[index][1])
        names = tuple(linears), tuple(everything)
        if names not in self.orders:
            order = learn_order(self.comm, self.walk, index, everything).of(linears)
            self.orders[names] = order if by_layer else order.at_once()
        return self.orders[names]

    def _dense_pass(self, index: int, linears: Mapping[str, LinearLayer], order: BlockOrder) -> Targets:
        """Advance the dense stream behind block ``index``, which is dense, and return what it meets there."""
        walk = self.walk
        self._advance_dense(index)
        targets = Targets(walk, order, linear_layers(walk.blocks[index][1]))
        targets.run(self.comm, index, linears)
        self.num_dense = index + 1
        self._advance_dense(self._next(index))
        if (healed := self._heals(index, order)) is not None:
            for of_sample, hidden in zip(targets.samples, walk.dense, strict=True):
                of_sample.totals[healed] = hidden.reshape(-1, hidden.shape[-1])
        elif index in self.plan.healed:
            layer = f"{walk.blocks[index][0]}.{self.plan.healed[index]}"
            why = "what it puts out is not added to hidden states as it is"
            warnings.warn(f"{layer!r} cannot make up for the blocks behind it: {why}", stacklevel=2)
        return targets

    def _heals(self, index: int, order: BlockOrder) -> str | None:
        """Return the layer of block ``index`` whose target is what is behind a gap; it must add to hidden states."""
        healed = self.plan.healed.get(index)
        return healed if healed in order.adding else None

    def _advance_dense(self, stop: int) -> None:
        """Run the blocks up to ``stop``, which are dense, on the dense stream."""
        while self.num_dense < stop:
            self.walk.advance(self.num_dense, self.comm, dense=True)
            self.num_dense += 1

    def _run(self, begun: _Begun, stage: Sequence[str]) -> InputStatistics:
        """Run the block on all samples, as far as the layers of ``stage`` ask for, and return what they are given."""
        recipe, linears = self.plan.recipe, {layer: self.plan.linears[begun.index].linears[layer] for layer in stage}
        stops = begun.order.called_once.issuperset(linears)
        needs = "products" if recipe.has_targets else recipe.solver.needs
        statistics = InputStatistics(self.comm, self.walk, linears, needs, begun.targets, stops)
        statistics.run(begun.index)
        return statistics
