"""What a job did: one typed report, from which report.json, the model card, the picture and the summary are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from typing_extensions import override

from distprune.checkpoint.hub import name_of_model
from distprune.formatting import one_line, share, zeros
from distprune.jobs.figures import laid_out, rows
from distprune.jobs.options import Job
from distprune.oneshot.allocation import Allocation
from distprune.oneshot.report import OneShotReport
from distprune.pruning.report import PruneReport

_MOST_LINES = 15


@dataclass(frozen=True)
class Evaluation:
    """Perplexities by file, and metrics by task."""

    perplexity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Zeros:
    """How sparse a model is: the zeros of its prunable weights, of how many, and of how many parameters in all.

    Prunable are the weights that a job prunes by default (see ``find_shards``) or was asked to prune.
    """

    num_zeros: int
    num_prunable: int
    num_parameters: int | None  # None: unknown

    @property
    def sparsity(self) -> float:
        """The share of zeros of the prunable weights."""
        return self.num_zeros / max(self.num_prunable, 1)

    @override
    def __str__(self) -> str:
        return zeros(self.num_zeros, self.num_prunable, self.num_parameters)


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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return {**self.walk.to_dict(), **{key: value for key, value in vars(self).items() if key != "walk"}}


@dataclass(frozen=True, repr=False)
class PrunedBlocks(Walked):
    """Pruned block by block. ``num_parameters``: of the whole model."""

    allocation: Allocation
    num_parameters: int

    @property
    def zeros(self) -> Zeros:
        """The zeros of all blocks, those of earlier starts too."""
        layers = [layer for block in self.blocks for layer in block["layers"]]
        num_zeros, num_elements = (sum(layer[key] for layer in layers) for key in ("num_zeros", "num_elements"))
        return Zeros(num_zeros, num_elements, self.num_parameters)


@dataclass(frozen=True, repr=False)
class SmallerModel(Walked):
    """Made smaller. ``layers`` are those that stay."""

    trials: Sequence[Mapping[str, Any]] | None
    layers: Sequence[int]
    num_layers_before: int
    num_parameters_before: int
    num_parameters: int


@dataclass(frozen=True)
class Trained:
    """Fine-tuned with its zeros held: ``num_zeros`` of all ``num_elements``, and those of its prunable weights."""

    method: str
    num_steps: int
    num_tokens: int
    seconds: float
    losses: Sequence[float]
    num_zeros: int
    num_elements: int
    num_prunable_zeros: int
    num_prunable: int
    resumed_at: int

    @property
    def zeros(self) -> Zeros:
        return Zeros(self.num_prunable_zeros, self.num_prunable, self.num_elements)

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.zeros.sparsity)} sparse, {self.num_steps:,} steps of {self.method}")

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
    peak_memory: Sequence[int] = ()  # of each rank's process, in bytes
    peak_device_memory: Sequence[int] = ()  # of each rank's CUDA device, in bytes

    @property
    def zeros(self) -> Zeros | None:
        """How sparse the output is; ``None`` of a smaller model, whose zeros were not counted."""
        work: Work = self.work
        if isinstance(work, PruneReport):
            return Zeros(work.num_zeros, work.num_elements, work.num_parameters)
        return None if isinstance(work, SmallerModel) else work.zeros

    @property
    def done(self) -> str:
        """What was done, in words."""
        work: Work = self.work
        if isinstance(work, Trained):
            return "fine-tuned with its zeros held"
        if isinstance(work, SmallerModel):
            return f"made smaller by {work.walk.method}"
        return f"pruned by {work.score if isinstance(work, PruneReport) else work.walk.method}"

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.model.name}, {self.work!r}")

    @override
    def __str__(self) -> str:
        """Return what was done, in at most 15 lines; all of it is in :meth:`to_dict`."""
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        title = f"{name_of_model(self.model)}, {self.done} on {ranks} ({self.device})"
        lines = [title, *laid_out(rows(self.to_dict()))]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES - 1 :] = [f"  and {len(lines) - _MOST_LINES + 1} more lines in report.json"]
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
            "peak_memory": self.peak_memory,
            "peak_device_memory": self.peak_device_memory,
            "zeros": None if self.zeros is None else {**vars(self.zeros), "sparsity": self.zeros.sparsity},
            _KEYS[type(self.work)]: self.work.to_dict(),
        }
