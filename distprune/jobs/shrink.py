"""The job that makes a model smaller: load, choose what stays, refit block by block, cut, and write what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distprune.checkpoint import ModelWriter, locking
from distprune.collectives import together
from distprune.jobs.block_journal import BlockJournal
from distprune.jobs.calibrated import load_calibrated
from distprune.jobs.documents import write_documents
from distprune.jobs.journal import Item
from distprune.jobs.kept_units import as_text, by_block, entries_of, kept_of, num_units
from distprune.jobs.picture import can_draw
from distprune.jobs.report import JobReport, SmallerModel, Walked
from distprune.jobs.run import Device, Run, clock
from distprune.jobs.shrink_job import ShrinkJob
from distprune.jobs.speed import compare_speed
from distprune.jobs.unfinished import Unfinished, open_unfinished
from distprune.jobs.watcher import Watcher
from distprune.models import decoder_blocks
from distprune.oneshot import BlockReport
from distprune.removal import (
    Budget,
    Division,
    Kept,
    Removal,
    Sizes,
    Trial,
    choose_experts,
    choose_units,
    count_parameters,
    cut_model,
    divide_budget,
    find_budget,
    order_layers,
    remove_units,
)

__all__ = ["run_shrink_job"]

_EXPERTS, _TRIAL = "experts", "trial"  # kinds of items


def run_shrink_job(
    job: ShrinkJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> JobReport[SmallerModel]:
    """Run the job and return its report. The output is written whole, or not at all.

    In the walk the units that go are zeroed, and finished blocks lie beside the output, at their old sizes. A job that
    was killed goes on with ``resume`` after its last block that is as it was written, on as many ranks, and ends with
    the same bytes. When all blocks are done the model is cut, and written beside the output, whose place it takes.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same
    job; several ranks hold the model sharded by FSDP2. Communicates what the functions it calls do.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job,
            the model or the text, or sizes that the model cannot have; the message says which.
        FileExistsError: on every rank: an unfinished job is there without ``resume``, or with it a finished one.
    """
    run = Run(job, group, device, watcher)
    draws = can_draw(run.told.say)
    with locking(run.comm, run.output):
        model, samples = load_calibrated(run, job)
        with together(run.comm):
            job.sizes.check(model)
            budget = find_budget(model, samples, job.sizes)
        with open_unfinished(run, job) as unfinished:
            shrunk, before, after = _Shrinking(job, run, model, samples, unfinished).shrink(budget)
            del model, samples
            if job.speed:
                shrunk = replace(shrunk, speed=compare_speed(run, run.directory.path, unfinished.result))
            return write_documents(run, unfinished.result, before, after, shrunk, draws=draws)


@dataclass(frozen=True)
class _Shrinking:
    """``model`` is made smaller in place. What is chosen is recorded, and taken from there if it was."""

    job: ShrinkJob
    run: Run
    model: nn.Module
    samples: torch.Tensor
    unfinished: Unfinished

    def shrink(self, budget: Budget | None) -> tuple[SmallerModel, dict[str, Any], dict[str, Any]]:
        """Make the model smaller and write it; return what was removed, and :meth:`Run.evaluate` before and after."""
        job, run, model, unfinished = self.job, self.run, self.model, self.unfinished
        num_blocks, num_before = len(decoder_blocks(model)), count_parameters(model)
        if job.resume and not unfinished.items("before"):
            run.told.say("nothing was recorded yet: starting at the beginning")
        before = unfinished.recall("before", lambda: run.evaluate(model, "before"))
        if job.experts is not None:
            self._cut_experts(job.experts)
        sizes = job.sizes
        if budget is not None:
            with clock(run.seconds, "divide"):
                sizes = self._divide(budget)
        layers = list(unfinished.recall("layers", lambda: self._choose_layers(sizes), at_once=True))
        with clock(run.seconds, "shrink"):
            walked, kept = self._walk(sizes, layers)
            cut_model(model, kept, layers, group=run.comm)
        shrunk = SmallerModel(
            **vars(walked),
            trials=[item.value["trial"] for item in unfinished.items(_TRIAL)] or None,
            layers=layers,
            num_layers_before=num_blocks,
            num_parameters_before=num_before,
            num_parameters=count_parameters(model),
        )
        after = run.evaluate(model, "after")
        unfinished.begin_result(run.output)
        blocks = [name for name, _ in decoder_blocks(model)]
        run.save(model, unfinished.result, updated=blocks, layers=layers if len(layers) < num_blocks else None)
        return shrunk, before, after

    @property
    def _choose(self) -> Callable[..., Removal]:
        job = self.job
        return partial(
            choose_units,
            self.model,
            criterion=job.criterion,
            refit=job.refit,
            targets=job.targets,
            target_share=job.target_share,
            group=self.run.comm,
            offload=job.offload,
        )

    def _cut_experts(self, num: int | float) -> None:
        """Cut all but ``num`` experts of each block, or that share of them."""
        run, model = self.run, self.model

        def choose() -> dict[str, list[dict[str, Any]]]:
            num_before = num_units(model, ["experts"])
            with clock(run.seconds, "choose"):
                chosen = choose_experts(model, self.samples, num, criterion=self.job.expert_criterion, group=run.comm)
            return {block: entries_of(of, num_before) for block, of in by_block(chosen).items()}

        recorded = self.unfinished.recall(_EXPERTS, choose)
        with together(run.comm):
            kept = kept_of((block, of) for block, of_block in recorded.items() for of in of_block)
        remove_units(model, kept, group=run.comm)

    def _divide(self, budget: Budget) -> Sizes:
        """Return the sizes that the budget comes to; what was tried is not tried again."""
        unfinished, run = self.unfinished, self.run

        def on_trial(known: Division) -> None:
            value = {"trial": vars(known.trials[-1]), "layers_gone": list(known.layers_gone)}
            unfinished.record(Item(_TRIAL, value))
            run.told.say(f"tried {known.trials[-1]}")
            run.told.check_here()

        trials = tuple(Trial(**item.value["trial"]) for item in unfinished.items(_TRIAL))
        division = divide_budget(
            self.model,
            self.samples,
            self.job.sizes,
            budget,
            self._choose,
            layer_criterion=self.job.layer_criterion,
            begun=Division(self.job.sizes, trials, self._layers_tried()),
            on_trial=on_trial,
            group=run.comm,
        )
        run.told.say(f"sizes: {division.sizes}")
        return division.sizes

    def _layers_tried(self) -> tuple[int, ...]:
        """Return the layers whose order the trials have found."""
        trials = self.unfinished.items(_TRIAL)
        return tuple(trials[-1].value["layers_gone"]) if trials else ()

    def _choose_layers(self, sizes: Sizes) -> list[int]:
        """Return the layers that stay."""
        run = self.run
        layers, num_layers = list(range(len(decoder_blocks(self.model)))), sizes.num_layers(self.model)
        if num_layers < len(layers):
            with clock(run.seconds, "choose"), run.told.stage("choosing layers", "layers") as progress:
                gone = order_layers(
                    self.model,
                    self.samples,
                    num_layers,
                    criterion=self.job.layer_criterion,
                    known=self._layers_tried(),
                    group=run.comm,
                    progress=progress,
                )
            layers = [layer for layer in layers if layer not in gone]
            run.told.say(f"layers that stay: {as_text(layers)}")
        return layers

    def _walk(self, sizes: Sizes, layers: list[int]) -> tuple[Walked, Kept]:
        """Zero the units that go and refit what stays, block by block; return the report on all, and what stays."""
        run, model, unfinished = self.run, self.model, self.unfinished
        experts: dict[str, Any] = next((item.value for item in unfinished.items(_EXPERTS)), {})
        blocks = decoder_blocks(model)
        num_before = num_units(model, list(sizes.in_walk))
        writer = ModelWriter(model, run.directory, unfinished.folder, group=run.comm)
        in_walk = [(index, *blocks[index]) for index in layers]
        journal = BlockJournal(run, unfinished, writer, in_walk, [name for name, _ in blocks])
        writer.allocate()  # what is there of the weights stays

        def on_block(index: int, block: BlockReport, kept: Kept) -> None:
            journal.on_block(index, block, kept=[*experts.get(block.name, ()), *entries_of(kept, num_before)])

        removal = self._choose(self.samples, sizes.in_walk, layers=layers, finished=journal.finished, on_block=on_block)
        entries = journal.end()
        with together(run.comm):
            kept = kept_of((entry["name"], of) for entry in entries for of in entry["kept"] if of["kind"] != "experts")
        return Walked(removal.report, str(sizes), entries, journal.resumed_at), kept
