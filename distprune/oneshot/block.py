"""A walk through the blocks of a model, each of which is pruned in its turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from distprune.calibration.moments import Moments, Needs
from distprune.calibration.order import BlockOrder, learn_order
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.statistics import EXPERT_MEMORY, InputStatistics
from distprune.calibration.targets import Targets
from distprune.calibration.visit import walking
from distprune.calibration.walk import Walk
from distprune.collectives.agree import agree, max_together, together
from distprune.collectives.base import Communicator, Traffic
from distprune.collectives.guarded import guarding
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.oneshot.block_fit import BlockFit, batch_size, fit_block
from distprune.oneshot.block_layers import BlockLayers, unreached
from distprune.oneshot.channel_order import order_channels
from distprune.oneshot.channels import find_channels
from distprune.oneshot.driver import Clock
from distprune.oneshot.report import BlockReport, LayerReport, Meter, OneShotReport, clock
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import Rows, whole_rows
from distprune.patterns.n_by_m import NByM
from distprune.shards.local_shard import LocalShard

OnBlock = Callable[[int, BlockReport], None]
Finished = Callable[[int], bool]

_STAGES = ("forward", "reduce", "target", "factor", "sweep", "fit")
_HEALING = Aim(share=1.0, damping=1.0)  # what one layer can make up for whole layers overfits with less


@dataclass(frozen=True)
class WalkOptions:
    """How blocks are pruned; ``target_share`` is of the way to targets, 0: there are none, and no dense stream.

    The layers ``towards_own``, by their names in the model, have no targets. Blocks in ``skipped`` are passed over by
    all but the dense stream; ``healed`` names the layer of a block before them whose target is what the dense stream
    is behind them.
    """

    needs: Needs  # of what layers are given, where there are no targets
    by_layer: bool  # layers in the order they run, each given what is left of those before
    target_share: float
    towards_own: Set[str] = frozenset()
    skipped: Set[int] = frozenset()
    healed: Mapping[int, str] = field(default_factory=dict)
    fits: bool = False  # each block as a whole, behind its layers; there must be targets
    seed: int = 0  # of the fit
    expert_memory: int = EXPERT_MEMORY  # bytes of the sums of routed layers that a rank has at a time
    permutes: NByM | None = None  # before a block is pruned, its channels change places, for this pattern

    @property
    def has_targets(self) -> bool:
        return self.target_share > 0


# Prunes rows, this rank's, by layer of the block, and returns what became of each. Empties the moments.
# Every rank calls it.
PruneRows = Callable[[Communicator, Mapping[str, Rows], list[Moments], Clock, Aim], Mapping[str, LayerReport]]


def run_blocks(
    meter: Meter,
    sample_group: SampleGroup,
    model: nn.Module,
    samples: torch.Tensor,
    options: WalkOptions,
    linears: Sequence[BlockLayers],
    shards: Sequence[LocalShard],
    prune_rows: PruneRows,
    *,
    offload: bool,
    finished: Finished | None,
    on_block: OnBlock | None,
    batch_tokens: int | None = None,
    num_parameters: int | None = None,
    **about: Any,
) -> OneShotReport:
    """Run ``samples`` through the blocks of ``model`` and prune ``linears`` of each, but of those that are skipped.

    ``shards``: this rank's part of all parameters that are pruned, owners settled; ``about``: what else the report
    says. The other arguments are those of ``prune_blocks``. Every rank must call it.
    """
    comm, reports = meter.comm, list[BlockReport]()

    def tell(words: torch.Tensor) -> None:
        words.fill_(on_block is not None)

    calls_back = bool(max_together(comm, (1,), tell))
    owned = {shard.name: shard.owned for shard in shards}
    with walking(
        comm,
        sample_group,
        model,
        samples,
        offload=offload,
        has_dense=options.has_targets,
        batch_tokens=batch_tokens,
        num_together=batch_size(len(samples)) if options.fits else None,
    ) as walk:
        pruner = _BlockPruner(comm, walk, options, linears, owned, prune_rows)
        for index in range(len(walk.blocks)):
            if index in options.skipped:
                continue
            # The dense stream goes through a block before it is restored.
            begun = pruner.begin(index) if finished is None or options.has_targets else None
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
        sequential="layer" if options.by_layer else "block",
        target_share=options.target_share,
        refit="block" if options.fits else "none",
        permute="none" if options.permutes is None else "channels",
        num_samples=len(samples),
        blocks=tuple(reports),
        num_parameters=num_parameters,
        **about,
        **meter.read(),
    )


@dataclass
class _Begun:
    """Block ``index``: its ``order`` and ``targets``, found before it is pruned, and what becomes of it.

    ``dense``: weights that stay so, with the reasons.
    """

    index: int
    order: BlockOrder
    targets: Targets | None
    traffic: Traffic  # before
    seconds: dict[str, float]
    dense: dict[str, str]
    reports: dict[str, LayerReport] = field(default_factory=dict)  # by layer


@dataclass
class _BlockPruner:
    """Has ``prune_rows`` prune ``linears`` of each block of a walk, in turn. ``owned``: parameters this rank counts.

    With targets the walk must have a dense stream.
    """

    comm: Communicator
    walk: Walk
    options: WalkOptions
    linears: Sequence[BlockLayers]
    owned: Mapping[str, bool]
    prune_rows: PruneRows
    orders: dict[tuple[tuple[str, ...], ...], BlockOrder] = field(default_factory=dict)  # by the names of all layers
    num_dense: int = 0  # blocks that the dense stream is behind

    def begin(self, index: int) -> _Begun:
        """Put the channels of block ``index`` in order, if that is asked for, and advance the dense stream behind it.

        Every rank must call it, as what follows: :meth:`is_restored`, :meth:`prune`.
        """
        options, linears = self.options, self.linears[index]
        traffic, seconds = self.comm.traffic.copy(), dict[str, float]()
        if options.permutes is not None:
            with clock(seconds, "permute"):
                self._permute(index, options.permutes)
        with clock(seconds, "forward"):
            order = self._order(index, linears.linears)
            targets = self._dense_pass(index, linears.linears, order) if options.has_targets else None
        return _Begun(index, order, targets, traffic, seconds, dict(linears.dense))

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
        walk, index = self.walk, begun.index
        for stage in begun.order.stages:
            self._prune_stage(begun, stage)
        begun.targets = None
        fit, advances = None, self._next(index) < len(walk.blocks)
        if self.options.fits:
            with clock(begun.seconds, "fit"):
                linears = linear_layers(walk.blocks[index][1]).values()
                matrices = {linear.parameter_path for linear in linears} - begun.dense.keys()
                fit = fit_block(self.comm, walk, index, matrices, self.options.seed, advances)
        elif advances:
            with clock(begun.seconds, "forward"):
                walk.advance(index, self.comm)
        return self._report(begun, fit)

    def _prune_stage(self, begun: _Begun, stage: Sequence[str]) -> None:
        with clock(begun.seconds, "forward"):
            statistics = self._run(begun, stage)
        for moments in self._reduced(statistics, begun):
            self._prune_layers(begun, moments)
            del moments  # before the next wave is made

    def _prune_layers(self, begun: _Begun, moments: list[Moments]) -> None:
        """Prune the layers that ``moments`` are of, but for those that no token reached."""
        options, name, layers = self.options, self.walk.blocks[begun.index][0], self.linears[begun.index].linears
        now = {layer: layers[layer] for layer in layers if any(layer in m.names for m in moments)}
        unseen = unreached(name, now, moments)
        begun.dense |= {now.pop(layer).parameter_path: reason for layer, reason in unseen.items()}
        moments = [m for m in moments if m.names[0] in now]
        has_target = not any(f"{name}.{layer}" in options.towards_own for layer in now)
        aim = Aim(options.target_share if has_target else 0.0)
        if self._heals(begun.index, begun.order) in now:
            aim = _HEALING
        owned = {linear.parameter_path: self.owned[f"{name}.{linear.parameter_path}"] for linear in now.values()}
        with whole_rows(self.comm, now, owned, f"{name}.") as rows, torch.no_grad():
            begun.reports |= self.prune_rows(self.comm, rows, moments, partial(clock, begun.seconds), aim)

    def _report(self, begun: _Begun, fit: BlockFit | None) -> BlockReport:
        name, linears = self.walk.blocks[begun.index][0], self.linears[begun.index].linears
        adding = [layer for layer in linears if layer in begun.order.adding]
        stages = ("permute",) * (self.options.permutes is not None) + _STAGES
        used = self.comm.traffic - begun.traffic
        return BlockReport(
            begun.index,
            name,
            layers=tuple(begun.reports[layer] for layer in linears if layer in begun.reports),
            dense={f"{name}.{path}": reason for path, reason in begun.dense.items()},
            residual=tuple(f"{name}.{layer}" for layer in adding if self.options.has_targets),
            seconds={stage: begun.seconds.get(stage, 0.0) for stage in stages},
            num_rounds=used.num_rounds,
            num_bytes=used.num_bytes,
            fit=fit,
        )

    def _permute(self, index: int, pattern: NByM) -> None:
        """Put the channels of block ``index``, which is dense, in their order, by what it is given now.

        Every rank must call it: rounds of :meth:`InputStatistics.reduce`, and of ``order_channels`` for each layer that
        reads some.
        """
        comm, (name, block) = self.comm, self.walk.blocks[index]
        with together(comm):
            linears = self.linears[index].linears
            found = find_channels(self.walk.model, block, linears, pattern.m)
        if found:
            some = {reader: linears[reader] for reader in found}
            statistics = InputStatistics(comm, self.walk, some, "squares")
            statistics.run(index)
            with self._naming(index):
                (moments,) = statistics.reduce()
            with guarding(comm) as ranks:
                for m in moments:
                    order_channels(ranks, name, block, found[m.names[0]], m, linears, self.owned, pattern)

    def _reduced(self, statistics: InputStatistics, begun: _Begun) -> Iterator[list[Moments]]:
        """Yield the moments of ``statistics``, as :meth:`InputStatistics.reduce` does; an error names the block."""
        waves = statistics.reduce(self.options.expert_memory)
        while True:
            with clock(begun.seconds, "reduce"), self._naming(begun.index):
                moments = next(waves, None)
            if moments is None:
                return
            yield moments
            del moments

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, NotImplementedError) as error:  # on every rank
            raise type(error)(f"block {self.walk.blocks[index][0]!r}: {error}") from error

    def _next(self, index: int) -> int:
        """Return the block after block ``index`` that is not skipped, or how many blocks there are."""
        return next(i for i in range(index + 1, len(self.walk.blocks) + 1) if i not in self.options.skipped)

    def _order(self, index: int, linears: Mapping[str, LinearLayer]) -> BlockOrder:
        if not (self.options.by_layer or self.options.has_targets):
            return BlockOrder((tuple(linears),), frozenset(), frozenset(), frozenset())
        everything = linear_layers(self.walk.blocks[index][1])
        names = tuple(linears), tuple(everything)
        if names not in self.orders:  # blocks are alike
            order = learn_order(self.comm, self.walk, index, everything).of(linears)
            self.orders[names] = order if self.options.by_layer else order.at_once()
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
        elif index in self.options.healed:
            name, of_layer = walk.blocks[index][0], self.options.healed[index]
            warnings.warn(
                f"'{name}.{of_layer}' cannot make up for the blocks behind it: what it puts out is not added to hidden "
                "states as it is",
                stacklevel=2,
            )
        return targets

    def _heals(self, index: int, order: BlockOrder) -> str | None:
        """Return the layer of block ``index`` whose target is what is behind a gap; it must add to hidden states."""
        healed = self.options.healed.get(index)
        return healed if healed in order.adding else None

    def _advance_dense(self, stop: int) -> None:
        """Run the blocks up to ``stop``, which are dense, on the dense stream, if there is one."""
        while self.options.has_targets and self.num_dense < stop:
            self.walk.advance(self.num_dense, self.comm, dense=True)
            self.num_dense += 1

    def _run(self, begun: _Begun, stage: Sequence[str]) -> InputStatistics:
        """Run the block on all samples, as far as the layers of ``stage`` ask for, and return what they are given."""
        options, linears = self.options, {layer: self.linears[begun.index].linears[layer] for layer in stage}
        stops = begun.order.called_once.issuperset(linears)
        needs: Needs = "products" if options.has_targets else options.needs
        statistics = InputStatistics(self.comm, self.walk, linears, needs, begun.targets, stops)
        statistics.run(begun.index)
        return statistics
