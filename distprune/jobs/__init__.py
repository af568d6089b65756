"""Whole jobs, from model directory to model directory, callable from Python; ``distprune.cli`` only shows them.

>>> from distprune.jobs import PruneJob, run_prune_job
>>> report = run_prune_job(PruneJob(model="llama", output="pruned", sparsity=0.5))  # doctest: +SKIP

Call them in one process, or on every rank of an initialized process group.
"""

from distprune.jobs.compare import ComparedOutput, Comparison, compare_outputs
from distprune.jobs.finetune import FinetuneJob, run_finetune_job
from distprune.jobs.one_shot import OneShotJob, PlanJob, PlannedWalk, run_one_shot_job, run_plan_job
from distprune.jobs.options import BareJob, Job
from distprune.jobs.prune import PruneJob, run_prune_job
from distprune.jobs.report import Evaluation, JobReport, PrunedBlocks, SmallerModel, Trained, Walked, Work
from distprune.jobs.sample import Sampled, SampleJob, run_sample_job
from distprune.jobs.shrink import ShrinkJob, run_shrink_job
from distprune.jobs.streamed import StreamedJob, run_streamed_job
from distprune.jobs.watcher import Watcher

__all__ = [
    "BareJob",
    "ComparedOutput",
    "Comparison",
    "Evaluation",
    "FinetuneJob",
    "Job",
    "JobReport",
    "OneShotJob",
    "PlanJob",
    "PlannedWalk",
    "PruneJob",
    "PrunedBlocks",
    "SampleJob",
    "Sampled",
    "ShrinkJob",
    "SmallerModel",
    "StreamedJob",
    "Trained",
    "Walked",
    "Watcher",
    "Work",
    "compare_outputs",
    "run_finetune_job",
    "run_one_shot_job",
    "run_plan_job",
    "run_prune_job",
    "run_sample_job",
    "run_shrink_job",
    "run_streamed_job",
]
