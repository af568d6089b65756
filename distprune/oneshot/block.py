"""A walk through the blocks of a model, each of which is pruned in its turn."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
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
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.oneshot.block_fit import BlockFit, fit_block
from distprune.oneshot.block_layers import BlockLayers, copies_of, unreached, write_copies
from distprune.oneshot.channel_order import order_channels
from distprune.oneshot.channels import find_channels
from distprune.oneshot.driver import Clock
from distprune.oneshot.outcome import Outcome
from distprune.oneshot.report import BlockReport, LayerReport, Meter, OneShotReport
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import Rows, whole_rows
from distprune.patterns.n_by_m import NByM
from distprune.shards.local_shard import LocalShard

OnBlock = Callable[[int, BlockReport], None]
Finished = Callable[[int], bool]

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


# Prunes rows, this rank's, by the layer's name in the block, and returns one outcome per layer. Empties the moments.
# Every rank calls it.
PruneRows = Callable[[Communicator, Mapping[str, Rows], list[Moments], Clock, Aim], Mapping[str, Outcome]]


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
    num_together = 1 if options.fits else batch_tokens  # a fit has its own batches
    has_dense = options.has_targets
    with walking(
        comm, sample_group, model, samples, offload=offload, has_dense=has_dense, batch_tokens=num_together
    ) as walk:
        pruner = _BlockPruner(comm, walk, options, linears, owned, prune_rows, len(samples))
        for index in range(len(walk.blocks)):
            if index in options.skipped:
                continue
            if finished is not None:
                if pruner.pass_by(index, partial(finished, index)):
                    num_parameters = None
                    continue
                finished = None
            reports.append(pruner.prune(index))
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
class _Done:
    """What became of a block: weights that stay ``dense``, with the reasons; by layer, outcomes and tokens."""

    dense: dict[str, str]
    totals: dict[str, Outcome] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)


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
    num_windows: int  # over all ranks
    orders: dict[tuple[tuple[str, ...], ...], BlockOrder] = field(default_factory=dict)  # by the names of all layers
    num_dense: int = 0  # blocks that the dense stream is behind
    permuted: int = -1  # the last block whose channels have changed places

    def prune(self, index: int) -> BlockReport:
        """Prune block ``index`` and advance the walk behind it, if another block follows. Every rank must call it."""
        comm, walk, options = self.comm, self.walk, self.options
        traffic = comm.traffic.copy()
        stages = ("forward", "reduce", "target", "factor", "sweep", "fit")
        seconds = dict.fromkeys(stages if options.permutes is None else ("permute", *stages), 0.0)
        clock = partial(_clock, seconds)
        name, linears = walk.blocks[index][0], self.linears[index].linears
        if options.permutes is not None:
            with clock("permute"):
                self._permute(index, options.permutes)
        with clock("forward"):
            order = self._order(index, linears)
            targets = self._dense_pass(index, linears, order) if options.has_targets else None
        done = self._prune_stages(index, order, targets, clock)
        del targets
        fit, advances = None, self._next(index) < len(walk.blocks)
        if options.fits:
            with clock("fit"):
                fit = self._fit(index, done.dense, advances)
        elif advances:
            with clock("forward"):
                walk.advance(index, comm)
        used = comm.traffic - traffic
        reports = []
        for of_layer in (of_layer for of_layer in linears if of_layer in done.totals):
            of, num_tokens = done.totals[of_layer], done.num_tokens[of_layer]
            numel = linears[of_layer].num_out * linears[of_layer].num_in
            counts = (numel, of.num_pruned, of.num_zeros, of.relative_error, of.damping or None, num_tokens)
            reports.append(LayerReport(f"{name}.{of_layer}", *counts))
        dense = {f"{name}.{path}": reason for path, reason in done.dense.items()}
        residual = tuple(
            f"{name}.{of_layer}" for of_layer in linears if options.has_targets and of_layer in order.adding
        )
        return BlockReport(index, name, tuple(reports), dense, residual, seconds, used.num_rounds, used.num_bytes, fit)

    def _fit(self, index: int, dense: Mapping[str, str], advances: bool) -> BlockFit | None:
        """Fit block ``index`` as a whole, but not matrices ``dense``. Every rank must call it: see ``fit_block``."""
        linears = linear_layers(self.walk.blocks[index][1]).values()
        matrices = {linear.parameter_path for linear in linears} - dense.keys()
        return fit_block(self.comm, self.walk, index, matrices, self.num_windows, self.options.seed, advances)

    def _permute(self, index: int, pattern: NByM) -> None:
        """Put the channels of block ``index``, which is dense, in their order, by what it is given now.

        Every rank must call it: rounds of :meth:`InputStatistics.reduce`, and of ``order_channels`` for each layer that
        reads some.
        """
        comm, (name, block) = self.comm, self.walk.blocks[index]
        if index == self.permuted:
            return
        with together(comm):
            linears = self.linears[index].linears
            found = find_channels(self.walk.model, block, linears, pattern.m)
        if found:
            some = {reader: linears[reader] for reader in found}
            statistics = InputStatistics(some, "squares", self.walk.sample_group, comm)
            statistics.run(self.walk, index)
            for of in itertools.chain(*self._reduced(statistics, name, lambda _: nullcontext())):
                order_channels(comm, name, block, found[of.names[0]], of, linears, self.owned, pattern)
        self.permuted = index

    def _prune_stages(self, index: int, order: BlockOrder, targets: Targets | None, clock: Clock) -> _Done:
        """Prune the layers of block ``index`` stage by stage."""
        comm, options, (name, _), layers = self.comm, self.options, self.walk.blocks[index], self.linears[index]
        done = _Done(dict(layers.dense))
        for stage in order.stages:
            some = {of_layer: layers.linears[of_layer] for of_layer in stage}
            with clock("forward"):
                statistics = self._run(index, some, order, targets)
            for moments in self._reduced(statistics, name, clock):
                names = {of_layer for m in moments for of_layer in m.names}
                now = {of_layer: linear for of_layer, linear in some.items() if of_layer in names}
                unseen = unreached(name, now, moments)
                done.dense |= {now[of_layer].parameter_path: reason for of_layer, reason in unseen.items()}
                now = {of_layer: linear for of_layer, linear in now.items() if of_layer not in unseen}
                moments = [m for m in moments if m.names[0] in now]
                done.num_tokens |= {of_layer: m.num_tokens for m in moments for of_layer in m.names}
                is_own = any(f"{name}.{of_layer}" in options.towards_own for of_layer in now)
                aim = Aim(0.0 if is_own else options.target_share)
                if self._heals(index, order) in now:
                    aim = _HEALING
                owned = {of.parameter_path: self.owned[f"{name}.{of.parameter_path}"] for of in now.values()}
                with whole_rows(comm, now, owned, f"{name}.") as rows, torch.no_grad():
                    done.totals |= self.prune_rows(comm, rows, moments, clock, aim)
        return done

    def _reduced(self, statistics: InputStatistics, name: str, clock: Clock) -> Iterator[list[Moments]]:
        """Yield the moments of ``statistics``, as :meth:`InputStatistics.reduce` does, of the block ``name``."""
        waves = statistics.reduce(self.comm, expert_memory=self.options.expert_memory)
        while True:
            with clock("reduce"):
                try:
                    moments = next(waves, None)
                except (ValueError, NotImplementedError) as error:  # on every rank
                    raise type(error)(f"block {name!r}: {error}") from error
            if moments is None:
                return
            yield moments

    def pass_by(self, index: int, restore: Callable[[], bool]) -> bool:
        """Let ``restore`` bring block ``index`` to what it was pruned to before, and advance behind it if it does.

        Returns whether it did. With a dense stream, this rank's shards of the block are kept twice more meanwhile:
        whether it is restored shows only when it is not dense any more. Every rank must call it.
        """
        comm, walk, block = self.comm, self.walk, self.walk.blocks[index][1]
        if self.options.has_targets and self.options.permutes is not None:
            self._permute(index, self.options.permutes)  # the dense stream went through the block like this
        with together(comm):
            dense = copies_of(block) if self.options.has_targets else {}
        with together(comm):
            is_done = bool(restore())
        agree(comm, {f"finished({index})": is_done})
        if not is_done:
            return False
        if dense:
            with self._standing_in(block, dense):
                self._advance_dense(self._next(index))
        if self._next(index) < len(walk.blocks):
            walk.advance(index, comm)
        return True

    @contextmanager
    def _standing_in(self, block: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let ``weights``, of this rank, stand in ``block`` for its own while this lasts. Every rank: two rounds."""
        with together(self.comm):
            own = copies_of(block)
            write_copies(block, weights)
        try:
            yield
        except BaseException:
            write_copies(block, own)
            raise
        with together(self.comm):
            write_copies(block, own)

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
        with targets.listening(linears, targets):
            walk.advance(index, self.comm, dense=True, begin=targets.begin_sample)
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

    def _run(
        self, index: int, linears: Mapping[str, LinearLayer], order: BlockOrder, targets: Targets | None
    ) -> InputStatistics:
        """Run block ``index``, as far as ``linears`` ask for, on all samples, and return what they are given."""
        options, walk = self.options, self.walk
        awaited = linears if order.called_once.issuperset(linears) else ()
        needs: Needs = "products" if options.has_targets else options.needs
        statistics = InputStatistics(linears, needs, walk.sample_group, self.comm, targets, awaited, walk.offload)
        statistics.run(walk, index)
        return statistics


@contextmanager
def _clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - started
