"""What sparse training did, step by step: in numbers, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from distprune.figure import new_figure, saved
from distprune.formatting import count, one_line, share

_NUM_SHOWN = 8  # updates; the others are in ``updates``


@dataclass(frozen=True)
class Update:
    """What happened before the step of this number: more zeros, or zeros in other places. Counted over all ranks."""

    step: int
    num_zeros: int
    num_elements: int
    num_moved: int = 0

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return self.num_zeros / max(self.num_elements, 1)


@dataclass(frozen=True)
class TrainingReport:
    """All updates of this run so far, of ``num_steps`` steps. The same on every rank.

    >>> layer = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(layer.parameters())
    >>> training = SparseTraining(layer, optimizer, schedule=constant(0.5))
    >>> optimizer.step()
    >>> report = training.finish()
    >>> report.num_steps, report.sparsity
    (1, 0.5)
    """

    updates: tuple[Update, ...]
    num_steps: int

    @property
    def sparsity(self) -> float:
        """The share of zeros now."""
        return self.updates[-1].sparsity if self.updates else 0.0

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.sparsity)} zeros after {self.num_steps:,} steps")

    @override
    def __str__(self) -> str:
        """Return what was done, in at most 10 lines; all of it is in ``updates``."""
        lines = [
            f"{self.num_steps:,} steps, {len(self.updates)} updates, {share(self.sparsity)} of the weights are zero"
        ]
        num_left_out = max(0, len(self.updates) - _NUM_SHOWN)
        if num_left_out:
            lines.append(f"  {num_left_out} updates before")
        for update in self.updates[num_left_out:]:
            moved = f", {count(update.num_moved)} moved" if update.num_moved else ""
            lines.append(f"  step {update.step:>8,}  {share(update.sparsity):>7}{moved}")
        return "\n".join(lines)

    def draw(self, path: str | Path | None = None, *, losses: Sequence[float] = (), overwrite: bool = False) -> Any:
        """Return a matplotlib figure of the sparsity over the steps, and of ``losses``, one a step, if given.

        It is written to ``path``, a PNG, if that is given; ``overwrite``: also over a file. Local; for one rank.

        >>> training.report().draw("training.png", losses=losses)  # doctest: +SKIP

        Raises:
            ImportError: the extra ``plot`` is not installed.
            ValueError: ``path`` is no ``.png``, is a link, or lies in a model's directory.
            FileExistsError: it is there, and ``overwrite`` is off.
            OSError: it cannot be written.
        """
        figure = new_figure(9.0, 4.5)
        sparsity = figure.subplots()
        steps = [0, *(update.step for update in self.updates), self.num_steps]
        shares = [0.0, *(update.sparsity for update in self.updates), self.sparsity]
        sparsity.step(steps, shares, where="post", color="tab:blue")
        sparsity.set(xlabel="step", ylabel="sparsity: the share of zeros", ylim=(0, 1))
        sparsity.set_title(f"Sparse training: {share(self.sparsity)} zeros after {self.num_steps:,} steps")
        sparsity.grid(alpha=0.3)
        if len(losses):
            loss = sparsity.twinx()
            loss.plot(range(len(losses)), list(losses), color="tab:orange", linewidth=0.8)
            loss.set_ylabel("loss", color="tab:orange")
        return saved(figure, path, overwrite=overwrite)
