"""What a job did: one typed report, from which report.json, the model card, the picture and the summary are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from distprune.jobs.options import Job
from distprune.oneshot import Allocation, OneShotReport
from distprune.pruning import PruneReport


@dataclass(frozen=True)
class Evaluation:
    """Perplexities by file, and metrics by task."""

    perplexity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Walked:
    """A walk through the decoder blocks. ``blocks`` are as the journal has them, with those of earlier starts.

    ``windows``: how many are of the ``text``, were written ``continuing`` it, or are the model's ``own`` altogether.
    """

    walk: OneShotReport
    pattern: str
    blocks: Sequence[Mapping[str, Any]]
    resumed_at: int
    windows: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return {**self.walk.to_dict(), **{key: value for key, value in vars(self).items() if key != "walk"}}


@dataclass(frozen=True)
class PrunedBlocks(Walked):
    """Pruned block by block."""

    allocation: Allocation


@dataclass(frozen=True)
class SmallerModel(Walked):
    """Made smaller. ``layers`` are those that stay; ``speed`` is of :func:`compare_speed`."""

    trials: Sequence[Mapping[str, Any]] | None
    layers: Sequence[int]
    num_layers_before: int
    num_parameters_before: int
    num_parameters: int
    speed: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Trained:
    """Fine-tuned with its zeros held."""

    method: str
    num_steps: int
    num_tokens: int
    seconds: float
    losses: Sequence[float]
    num_zeros: int
    num_elements: int
    resumed_at: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return vars(self)


Work: TypeAlias = PruneReport | PrunedBlocks | SmallerModel | Trained
_Work = TypeVar("_Work", bound=Work, covariant=True)

_KEYS: dict[type, str] = {PruneReport: "pruning", PrunedBlocks: "pruning", SmallerModel: "removal", Trained: "training"}


@dataclass(frozen=True)
class JobReport(Generic[_Work]):
    """The report of a ``job`` on the model in the directory ``model``. Ranks differ in seconds."""

    job: Job
    model: Path
    versions: Mapping[str, str]
    num_ranks: int
    device: str
    before: Evaluation
    after: Evaluation
    seconds: Mapping[str, float]  # by stage
    work: _Work

    def to_dict(self) -> dict[str, Any]:
        """Return what ``report.json`` has."""
        return {
            **self.versions,
            "model": str(self.model),
            "arguments": self.job.arguments(),
            "num_ranks": self.num_ranks,
            "device": self.device,
            "perplexity_before": self.before.perplexity,
            "perplexity_after": self.after.perplexity,
            "tasks_before": self.before.tasks,
            "tasks_after": self.after.tasks,
            "stage_seconds": self.seconds,
            _KEYS[type(self.work)]: self.work.to_dict(),
        }
