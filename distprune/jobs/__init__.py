"""Whole jobs, from model directory to model directory, callable from Python; ``distprune.cli`` only shows them.

>>> from distprune.jobs import PruneJob, run_prune_job
>>> report = run_prune_job(PruneJob(model="llama", output="pruned", sparsity=0.5))  # doctest: +SKIP

Call them in one process, or on every rank of an initialized process group.
"""

from distprune.jobs.figures import Kind, by_metric, kinds_of, mean_error, range_of, removal_rows
from distprune.jobs.finetune import run_finetune_job
from distprune.jobs.finetune_job import FinetuneJob
from distprune.jobs.one_shot import OneShotJob, run_one_shot_job
from distprune.jobs.options import Job, Option, choices_of, options_of
from distprune.jobs.prune import PruneJob, run_prune_job
from distprune.jobs.report import Evaluation, JobReport, PrunedBlocks, SmallerModel, Trained, Walked, Work
from distprune.jobs.shrink import run_shrink_job
from distprune.jobs.shrink_job import ShrinkJob
from distprune.jobs.streamed import StreamedJob, run_streamed_job
from distprune.jobs.watcher import Watcher

__all__ = [
    "Evaluation",
    "FinetuneJob",
    "Job",
    "JobReport",
    "Kind",
    "OneShotJob",
    "Option",
    "PruneJob",
    "PrunedBlocks",
    "ShrinkJob",
    "SmallerModel",
    "StreamedJob",
    "Trained",
    "Walked",
    "Watcher",
    "Work",
    "by_metric",
    "choices_of",
    "kinds_of",
    "mean_error",
    "options_of",
    "range_of",
    "removal_rows",
    "run_finetune_job",
    "run_one_shot_job",
    "run_prune_job",
    "run_shrink_job",
    "run_streamed_job",
]
