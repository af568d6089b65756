"""The job that makes a model smaller: load, choose what stays, refit block by block, cut, and write what is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.jobs.block_files import BlockFiles
from distprune.jobs.calibrated import CalibratedJob, load_calibrated
from distprune.jobs.files import JobFiles, open_files
from distprune.jobs.kept_units import as_text, entries_of, kept_of, num_units
from distprune.jobs.options import EVALUATION, METHOD, SIZES, ask, asked, parse_budget, parse_size
from distprune.jobs.report import JobReport, SmallerModel, Walked
from distprune.jobs.run import Device, Run, clock
from distprune.jobs.speed import compare_speed
from distprune.jobs.watcher import Watcher
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import count_parameters
from distprune.oneshot.recipe import share_of_targets
from distprune.oneshot.report import BlockReport
from distprune.removal.budget import Budget
from distprune.removal.choose_units import Removal, choose_units, default_targets_of, refit_in_trials, refit_of_units
from distprune.removal.criteria import CriterionName
from distprune.removal.experts import ExpertCriterion, choose_experts
from distprune.removal.layers import LayerCriterion, order_layers
from distprune.removal.plan import Kept
from distprune.removal.rebuild import remove_units
from distprune.removal.remover import Refit
from distprune.removal.shrink_model import cut_model
from distprune.removal.sizes import Sizes
from distprune.removal.trials import Division, Trial, divide_budget, find_budget

_EXPERTS = "experts"  # a record


def _size(help: str) -> Any:
    return ask(help, default=None, parse=parse_size, metavar="N|SHARE", panel=SIZES)


@asked
class ShrinkJob(CalibratedJob):
    """Make a model smaller, as :func:`distprune.shrink_model` does."""

    mlp: int | float | None = _size("MLP channels that stay, such as 0.75 of them.")
    heads: int | float | None = _size("Query heads that stay, as many of each KV group.")
    kv_groups: int | float | None = _size("KV heads that stay, each with its query heads.")
    experts: int | float | None = _size("Experts that stay of each mixture.")
    layers: int | float | None = _size("Decoder layers that stay, such as 24.")
    parameters: int | float | None = ask(
        "At most as many parameters stay, such as 100M. What leaves, of all of which nothing is said but experts, "
        "is found by trials on --calibration.",
        default=None,
        parse=parse_budget,
        metavar="N[K|M|B]|SHARE",
        panel=SIZES,
    )
    criterion: CriterionName = ask(
        "How units are chosen. obs: by what the least squares fit of the rest loses.", default="obs", panel=METHOD
    )
    layer_criterion: LayerCriterion = ask(
        "How layers are chosen. loss: one by one, by the loss without each; influence: by angles.",
        default="loss",
        needs=("layers", "parameters"),
        panel=METHOD,
    )
    expert_criterion: ExpertCriterion = ask(
        "How experts are chosen. output: by what they put out; usage: by how many tokens they get.",
        default="output",
        needs=("experts",),
        panel=METHOD,
    )
    refit: Refit | None = ask(
        "What becomes of the layers that read what goes: fitted anew (block: then each block as a whole, the default "
        "with dense targets), their bias alone, or none.",
        default=None,
        panel=METHOD,
    )
    speed: bool = ask(
        "Measure tokens per second and memory before and after; both models must fit on one rank.",
        default=True,
        decides=False,
        panel=EVALUATION,
    )

    @property
    def sizes(self) -> Sizes:
        return Sizes(**{of.name: getattr(self, of.name) for of in fields(Sizes)})

    @override
    def check_asked(self) -> None:
        super().check_asked()
        self.sizes.check_asked()
        refit = refit_of_units(self.refit, self.targets)
        share_of_targets(self.targets or default_targets_of(refit), self.target_share)


def run_shrink_job(
    job: ShrinkJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> JobReport[SmallerModel]:
    """Run the job and return its report. The output is written whole, or not at all.

    The walk zeroes the units that go; finished blocks are on the disk, beside the output, at their old sizes. A killed
    job continues with ``resume`` after its last intact block: on as many ranks it ends with the same bytes. When all
    blocks are done the model is cut, written beside the output, and put in its place.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same
    job; several ranks hold the model sharded by FSDP2. Communicates what the functions it calls do.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job,
            the model or the text, or sizes that the model cannot have; the message says which.
        FileExistsError: on every rank: an unfinished job is there without ``resume``, or with it a finished one.
    """
    run = Run(job, group, device, watcher)
    with run.locked():
        calibrated = load_calibrated(run, job)
        counts = calibrated.windows.counts
        with together(run.comm):
            job.sizes.check(calibrated.model)
            budget = find_budget(calibrated.model, calibrated.windows.stand_in(), job.sizes)
        with open_files(run, job) as files:
            samples = calibrated.samples(run, job, files)
            shrinking = _Shrinking(job, run, calibrated.model, samples, vars(counts), files)
            shrunk, before, after = shrinking.shrink(budget)
            del calibrated, shrinking, samples
            if job.speed:
                shrunk = replace(shrunk, speed=compare_speed(run, run.directory.path, files.result))
            return run.report(files.result, before, after, shrunk)


@dataclass(frozen=True)
class _Shrinking:
    """``model`` is made smaller in place. What is chosen is recorded, and taken from there if it was."""

    job: ShrinkJob
    run: Run
    model: nn.Module
    samples: torch.Tensor
    windows: Mapping[str, int]
    files: JobFiles

    def shrink(self, budget: Budget | None) -> tuple[SmallerModel, dict[str, Any], dict[str, Any]]:
        """Make the model smaller and write it; return what was removed, and :meth:`Run.evaluate` before and after."""
        job, run, model, files = self.job, self.run, self.model, self.files
        num_blocks, num_before = len(decoder_blocks(model)), count_parameters(model)
        before = files.recall(run.evaluation, lambda: run.evaluate(model, "before"))
        if job.experts is not None:
            self._cut_experts(job.experts)
        division = Division(job.sizes)
        if budget is not None:
            run.reporter.begin("trying sizes")
            with clock(run.seconds, "divide"):
                division = self._divide(budget)
        layers: list[int] = files.recall("layers", lambda: self._choose_layers(division))
        run.reporter.begin("shrinking block by block")
        with clock(run.seconds, "shrink"):
            walked, kept = self._walk(division.sizes, layers)
            cut_model(model, kept, layers, group=run.comm)
        shrunk = SmallerModel(
            **vars(walked),
            trials=[vars(trial) for trial in division.trials] or None,
            layers=layers,
            num_layers_before=num_blocks,
            num_parameters_before=num_before,
            num_parameters=count_parameters(model),
        )
        after = run.evaluate(model, "after")
        run.save(model, files.result, layers=layers if len(layers) < num_blocks else None)
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
            batch_tokens=job.batch_tokens,
        )

    def _cut_experts(self, num: int | float) -> None:
        """Cut all but ``num`` experts of each block, or that share of them."""
        run, model = self.run, self.model

        def choose() -> dict[str, list[dict[str, Any]]]:
            num_before = num_units(model, ["experts"])
            with clock(run.seconds, "choose"):
                chosen = choose_experts(
                    model,
                    self.samples,
                    num,
                    criterion=self.job.expert_criterion,
                    group=run.comm,
                    offload=self.job.offload,
                    batch_tokens=self.job.batch_tokens,
                )
            return entries_of(chosen, num_before)

        recorded = self.files.recall(_EXPERTS, choose)
        with together(run.comm):
            kept = kept_of(recorded)
        remove_units(model, kept, group=run.comm)

    def _divide(self, budget: Budget) -> Division:
        """Return what the budget comes to; what was tried is not tried again."""
        files, run = self.files, self.run

        def on_trial(trial: Trial, seconds_left: float) -> None:
            run.reporter.say(f"tried {trial}" + (f"; about {seconds_left:,.0f} s to go" if seconds_left else ""))
            run.reporter.check_here()

        division = divide_budget(
            self.model,
            self.samples,
            self.job.sizes,
            budget,
            partial(self._choose, refit=refit_in_trials(self.job.refit, self.job.targets)),
            layer_criterion=self.job.layer_criterion,
            recall=files.recall,
            on_trial=on_trial,
            group=run.comm,
            offload=self.job.offload,
            batch_tokens=self.job.batch_tokens,
        )
        run.reporter.say(f"sizes: {division.sizes}")
        return division

    def _choose_layers(self, division: Division) -> list[int]:
        """Return the layers that stay."""
        run = self.run
        layers, num_layers = list(range(len(decoder_blocks(self.model)))), division.sizes.num_layers(self.model)
        if num_layers < len(layers):
            with clock(run.seconds, "choose"), run.reporter.stage("choosing layers", "layers") as progress:
                gone = order_layers(
                    self.model,
                    self.samples,
                    num_layers,
                    criterion=self.job.layer_criterion,
                    known=division.layers_gone,
                    group=run.comm,
                    offload=self.job.offload,
                    batch_tokens=self.job.batch_tokens,
                    progress=progress,
                )
            layers = [layer for layer in layers if layer not in gone]
            run.reporter.say(f"layers that stay: {as_text(layers)}")
        return layers

    def _walk(self, sizes: Sizes, layers: list[int]) -> tuple[Walked, Kept]:
        """Zero the units that go and refit what stays, block by block; return the report on all, and what stays."""
        run, model, files = self.run, self.model, self.files
        experts: dict[str, Any] = files.known(_EXPERTS) or {}
        num_before = num_units(model, list(sizes.in_walk))
        blocks = BlockFiles(run, files, model, files.folder / "blocks", layers)

        def on_block(index: int, block: BlockReport, kept: Kept) -> None:
            in_walk = entries_of(kept, num_before).get(block.name, ())
            blocks.on_block(index, block, kept=[*experts.get(block.name, ()), *in_walk])

        removal = self._choose(self.samples, sizes.in_walk, layers=layers, finished=blocks.finished, on_block=on_block)
        entries = blocks.reports()
        with together(run.comm):
            kept = kept_of(
                {of["name"]: [units for units in of["kept"] if units["kind"] != "experts"] for of in entries}
            )
        return Walked(removal.report, str(sizes), entries, blocks.resumed_at, self.windows), kept
