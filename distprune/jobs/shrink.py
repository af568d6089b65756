"""The job that makes a model smaller: load, choose what stays, refit block by block, cut, and write what is left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.jobs.block_files import BlockFiles
from distprune.jobs.options import METHOD, SIZES, ask, asked, parse_amount, parse_size
from distprune.jobs.own_words import CalibratedJob
from distprune.jobs.report import JobReport, SmallerModel
from distprune.jobs.run import Device, open_job
from distprune.jobs.watcher import Watcher
from distprune.models.decoder_blocks import decoder_blocks
from distprune.removal.choose_units import resolved_refit
from distprune.removal.criteria import CriterionName
from distprune.removal.experts import ExpertCriterion
from distprune.removal.layers import LayerCriterion
from distprune.removal.remover import Refit
from distprune.removal.shrink_model import ShrinkHooks, shrink_model
from distprune.removal.sizes import Sizes


def parse_budget(text: str) -> int | float:
    """Return how many parameters may stay, such as 100M, or which share of them."""
    return parse_size(text) if "." in text and text[-1:].isdecimal() else parse_amount(text, "KMBT", 1000)


@asked
class ShrinkJob(CalibratedJob):
    """Make a model smaller, as :func:`distprune.shrink_model` does.

    Args:
        mlp: MLP channels that stay, such as 0.75 of them.
        heads: Query heads that stay, as many of each KV group.
        kv_groups: KV heads that stay, each with its query heads.
        experts: Experts that stay of each mixture.
        layers: Decoder layers that stay, such as 24.
        parameters: At most as many parameters stay, such as 100M. What leaves, of all of which nothing is said but
            experts, is found by trials on --calibration.
        criterion: How units are chosen. obs: by what the least squares fit of the rest loses.
        layer_criterion: How layers are chosen. loss: one by one, by the loss without each; influence: by angles.
        expert_criterion: How experts are chosen. output: by what they put out; usage: by how many tokens they get.
        refit: What becomes of the layers that read what goes: fitted anew (block: then each block as a whole, the
            default with dense targets), their bias alone, or none.
    """

    mlp: int | float | None = ask(default=None, parse=parse_size, metavar="N|SHARE", panel=SIZES)
    heads: int | float | None = ask(default=None, parse=parse_size, metavar="N|SHARE", panel=SIZES)
    kv_groups: int | float | None = ask(default=None, parse=parse_size, metavar="N|SHARE", panel=SIZES)
    experts: int | float | None = ask(default=None, parse=parse_size, metavar="N|SHARE", panel=SIZES)
    layers: int | float | None = ask(default=None, parse=parse_size, metavar="N|SHARE", panel=SIZES)
    parameters: int | float | None = ask(default=None, parse=parse_budget, metavar="N[K|M|B]|SHARE", panel=SIZES)
    criterion: CriterionName = ask(default="obs", panel=METHOD)
    layer_criterion: LayerCriterion = ask(default="loss", needs=("layers", "parameters"), panel=METHOD)
    expert_criterion: ExpertCriterion = ask(default="output", needs=("experts",), panel=METHOD)
    refit: Refit | None = ask(default=None, panel=METHOD)

    @property
    def sizes(self) -> Sizes:
        return Sizes(**self.asked_of(Sizes))

    @override
    def check_asked(self) -> None:
        super().check_asked()
        self.sizes.check_asked()
        resolved_refit(self.refit, self.targets, self.target_share)


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
    with open_job(job, group, device, watcher) as run:
        windows = job.windows(run)
        model = run.load()
        run.note_weights("model", run.directory)
        with together(run.comm):
            budget = job.sizes.check(model)
            num_layers_before = len(decoder_blocks(model))
        files = run.begin()
        samples = windows.samples(run, model, files)
        before = files.recall(run.evaluation, partial(run.evaluate, model, "before"))
        walks: list[BlockFiles] = []

        def begin_walk(model: nn.Module, layers: Sequence[int]) -> BlockFiles:
            walks.append(BlockFiles(run, files, model, files.folder / "blocks", layers))
            return walks[0]

        hooks = ShrinkHooks(files.recall, run.reporter.say, run.stage, begin_walk, budget)
        shrunk = shrink_model(model, samples, **job.asked_of(shrink_model), group=run.comm, job=hooks)
        after = run.evaluate(model, "after")
        run.save(model, files.result, layers=shrunk.layers if len(shrunk.layers) < num_layers_before else None)
        division = shrunk.division
        work = SmallerModel(
            walk=shrunk.report,
            pattern=str(division.sizes if division else job.sizes),
            blocks=walks[0].reports(),
            resumed_at=walks[0].resumed_at,
            windows=vars(windows.counts),
            trials=[vars(trial) for trial in division.trials] if division and division.trials else None,
            layers=shrunk.layers,
            num_layers_before=num_layers_before,
            num_parameters_before=shrunk.num_parameters_before,
            num_parameters=shrunk.num_parameters,
        )
        return run.report(before, after, work)
