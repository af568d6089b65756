"""What a job did: one typed report, from which report.json, the model card, the picture and the summary are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from typing_extensions import override

from distprune.brief import count, one_line, share
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

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{len(self.blocks)} blocks by {self.walk.method}")

    @override
    def __str__(self) -> str:
        return str(self.walk)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return {**self.walk.to_dict(), **{key: value for key, value in vars(self).items() if key != "walk"}}


@dataclass(frozen=True, repr=False)
class PrunedBlocks(Walked):
    """Pruned block by block."""

    allocation: Allocation


@dataclass(frozen=True, repr=False)
class SmallerModel(Walked):
    """Made smaller. ``layers`` are those that stay; ``speed`` is of :func:`compare_speed`."""

    trials: Sequence[Mapping[str, Any]] | None
    layers: Sequence[int]
    num_layers_before: int
    num_parameters_before: int
    num_parameters: int
    speed: Mapping[str, Any] | None = None

    @override
    def __str__(self) -> str:
        left = f"{count(self.num_parameters)} of {count(self.num_parameters_before)} parameters are left"
        return f"{left}, {len(self.layers)} of {self.num_layers_before} layers\n{super().__str__()}"


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

    @override
    def __repr__(self) -> str:
        of_all = f"{share(self.num_zeros / max(self.num_elements, 1))} of {count(self.num_elements)} weights zero"
        return one_line(self, f"{of_all}, {self.num_steps:,} steps of {self.method}")

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

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.model.name}, {self.work!r}")

    @override
    def __str__(self) -> str:
        """Return what was done, in at most 15 lines; all of it is in :meth:`to_dict`."""
        before, after = self.before.perplexity, self.after.perplexity
        ran = f"{self.num_ranks} ranks on {self.device}, {self.seconds.get('total', 0.0):.1f} s"
        lines = [
            f"{self.model.name}, written to {self.job.output}: {ran}",
            *(f"  perplexity on {Path(file).name}: {before[file]:.2f} -> {after[file]:.2f}" for file in [*after][:2]),
            *(f"  {line}" for line in str(self.work).splitlines()),
        ]
        return "\n".join(lines)

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
