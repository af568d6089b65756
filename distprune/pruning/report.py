"""What a pruning call did, in numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from typing_extensions import override

from distprune.formatting import count, cut, one_line, share, took, worst, zeros
from distprune.pruning.masks import Masks
from distprune.totals import Counted, Totals

_NUM_REASONS = 4  # shown, why parameters are left out


@dataclass(frozen=True, repr=False)
class ParameterReport(Counted):
    """One parameter, counted over all ranks, replicas once.

    >>> report = prune_model(torch.nn.Linear(8, 8), 0.5)
    >>> [(part.name, part.num_zeros, part.num_elements) for part in report.parameters]
    [('weight', 32, 64)]
    """

    name: str
    num_elements: int
    num_pruned: int  # by this call
    num_zeros: int  # in all, after it
    # The highest score pruned among its competitors; None: nothing new was pruned, or each group or row has its own.
    threshold: float | None


@dataclass(frozen=True)
class PruneReport(Totals):
    """What a call did. Ranks differ in :attr:`masks`, ``seconds`` and, where groups are cut, ``num_bytes``; stages of a
    pipeline in ``left_out``.

    >>> report = prune_model(torch.nn.Linear(8, 8), 0.5)
    >>> report.sparsity, report.num_zeros, report.parameters[0].name
    (0.5, 32, 'weight')

    It can be pickled, without the masks.
    """

    score: str
    pattern: str  # its repr
    seed: int | None
    parameters: tuple[ParameterReport, ...]
    num_rounds: int  # of communication, this call
    num_bytes: int  # of messages per rank, this call
    seconds: float
    num_parameters: int | None  # elements of the whole model; None: only shards are known, or stages of a pipeline
    _masks: Callable[[], Masks] = field(repr=False, compare=False)
    left_out: Mapping[str, str] = field(default_factory=dict)  # by default no weights, with why; two dims or more

    @cached_property
    def masks(self) -> Masks:
        """Return the masks, False where a weight is zero, read from the weights when first asked for. Local.

        Raises:
            ValueError: the report was pickled, and the weights were not.
        """
        return self._masks()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "_masks": _left_behind}

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nothing in it changes

    @property
    @override
    def counted(self) -> tuple[ParameterReport, ...]:
        return self.parameters

    @property
    def num_pruned(self) -> int:
        return sum(parameter.num_pruned for parameter in self.parameters)

    @override
    def __repr__(self) -> str:
        of_all = f"{share(self.sparsity)} of {count(self.num_elements)} weights zero"
        return one_line(self, f"{of_all} by {self.score}, {cut(self.pattern, 40)}")

    @override
    def __str__(self) -> str:
        """Return what was done, in at most 13 lines; all of it is in :meth:`to_dict`."""
        lines = [
            cut(f"{self.pattern} by {self.score}"),
            f"  sparsity: {zeros(self.num_zeros, self.num_elements, self.num_parameters)}",
            *worst("highest sparsities", self.parameters, lambda of: of.name, lambda of: of.sparsity, share),
            f"  {count(self.num_pruned)} weights newly pruned in {took(self.seconds, self.num_rounds, self.num_bytes)}",
        ]
        for reason, num in Counter(self.left_out.values()).most_common(_NUM_REASONS):
            first = next(name for name, why in self.left_out.items() if why == reason)
            lines.append("  " + cut(f"left out, {reason}: {num}, {'such as ' if num > 1 else ''}{first}"))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the masks, with the totals, in types that JSON has."""
        own = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("_masks", "parameters")
        }
        totals = {name: getattr(self, name) for name in ("num_elements", "num_pruned", "num_zeros", "sparsity")}
        return {**own, "parameters": [dataclasses.asdict(parameter) for parameter in self.parameters], **totals}


def _left_behind() -> Masks:
    raise ValueError("a report is pickled without its masks; use report.masks.save(path), or Masks.of(model)")
