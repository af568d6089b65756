"""What a solver is: new rows for linear layers, from their weights and the statistics of their inputs.

A solver is local arithmetic. Who holds which rows, and what ranks tell each other, is the driver's business.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, MomentsOf
from distprune.calibration.triangle import pack_triangle, unpack_triangle
from distprune.oneshot.rows import Rows
from distprune.patterns.base import Pattern
from distprune.scores.as_score import Magnitude
from distprune.scores.base import Elements, LocalScores, Score
from distprune.shards.device import on_host

Prepared = TypeVar("Prepared")


Figure: TypeAlias = torch.Tensor | float  # a tensor, of one element, is fetched with all others of a block


@dataclass(frozen=True)
class Solved:
    """What became of this rank's rows of one layer. ``error`` is ||X (W - W')^T||^2.

    ``num_nans``: scores that were NaN, where nobody waited to hear of them.
    """

    num_pruned: Figure
    error: Figure
    damping: Figure = 0.0
    num_nans: Figure = 0


@dataclass(frozen=True)
class Stage:
    """Columns ``start`` to ``stop`` compete by ``pattern``."""

    start: int
    stop: int
    pattern: Pattern


def as_keys(sizes: torch.Tensor) -> torch.Tensor:
    """Return ``sizes``, float32 and not negative, as a pattern's ``keep`` is to sort them. Local.

    On a device their bits, which are in the same order: of integers none is NaN, so nobody waits to hear of one.
    """
    return sizes if on_host(sizes.device) else sizes.view(torch.int32)


class Computed(Score):
    """What a solver computes itself, and hands over in the place of weights."""

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight


class Pruning(ABC):
    """Layers that share an input, while a solver prunes them: of each stage the scores, then the choice; then the end.

    Local. A solver without stages has :meth:`finish` alone.
    """

    def scores(self, stage: int) -> list[LocalScores]:
        """Return the scores of each layer, which compete over all rows of all ranks."""
        raise NotImplementedError

    def apply(self, stage: int, keep: Sequence[torch.Tensor]) -> None:
        """Take in which of them stay: of each layer (rows, columns), bool."""
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> dict[str, Solved]:
        """Write the new weights into the rows, and return what became of them, by layer."""


class Solver(ABC, Generic[Prepared]):
    """Prunes rows of linear layers, from the statistics of their inputs.

    >>> class Own(Solver):
    ...     needs = "pairs"  # all of X^T X
    ...     def prepare(self, moments):  # once for all layers that share an input
    ...         return SparseGPT().prepare(moments)
    ...     def begin(self, rows, prepared, pattern):  # returns what writes the new rows
    ...         return SparseGPT().begin(rows, prepared, pattern)
    >>> prune_blocks(llama, samples, method=Own(), pattern="2:4").sparsity
    0.5

    Subclasses give :meth:`prepare` and :meth:`begin`; what they do not override asks for nothing else.

    ``Prepared`` is what is made once of the moments of an input, for all layers that share it. An input that is spread
    is prepared by its owner and, if the solver ``sends``, sent to the others; else every rank prepares all. What is
    sent is a dataclass, and of it the tensors, in the shapes that :meth:`sent_like` says; of those named in
    ``triangles``, (d, d), the upper triangle, which comes out symmetric.
    """

    needs: ClassVar[MomentsOf] = "features"
    sends: ClassVar[bool] = False
    triangles: ClassVar[Collection[str]] = ()
    needs_gram: ClassVar[bool] = False  # prepare is given that of what weighed returns, summed over all ranks' rows
    score: Score = Magnitude()  # by which what ``scores`` returns is sorted

    def scored_by(self, score: Score) -> Solver[Prepared]:  # noqa: ARG002
        """Return the solver with its ``score`` replaced, by one that was told its seed."""
        return self

    def stages(self, num_in: int, pattern: Pattern) -> Sequence[Stage]:  # noqa: ARG002
        """Return what competes over all rows, in turn; nothing if each row is decided by itself.

        Raises:
            NotImplementedError: it cannot prune by ``pattern``.
        """
        return ()

    def weighed(self, rows: Rows) -> torch.Tensor:
        """Return the weights of ``rows``, (rows, in), as their Gram matrix is to be taken."""
        return rows.weight

    @abstractmethod
    def prepare(self, moments: Moments) -> Prepared:
        """Return what :meth:`begin` is given; ``moments`` may be overwritten, or returned as they are."""

    def sent_like(self, rows: Rows) -> Prepared:
        """Return what is prepared for ``rows``, its tensors on the meta device."""
        raise NotImplementedError

    def pack(self, prepared: Prepared) -> list[torch.Tensor]:
        """Return the tensors of ``prepared`` as they are sent."""
        tensors = {name: of for name, of in vars(prepared).items() if isinstance(of, torch.Tensor)}
        return [pack_triangle(of) if name in self.triangles else of for name, of in tensors.items()]

    def unpack(self, like: Prepared, packed: Sequence[torch.Tensor], moments: Moments) -> Prepared:  # noqa: ARG002
        """Return what was packed, bit by bit; ``like`` is :meth:`sent_like` it.

        ``moments`` are those it was made of, in the same bits; they may be overwritten.
        """
        names = [name for name, of in vars(like).items() if isinstance(of, torch.Tensor)]
        tensors = dict(zip(names, packed, strict=True))
        # By columns, as LAPACK's results lie: so products round alike on all ranks.
        tensors |= {name: unpack_triangle(tensors[name]).t() for name in self.triangles}
        return dataclasses.replace(like, **tensors)  # type: ignore[type-var]

    @abstractmethod
    def begin(self, rows: Mapping[str, Rows], prepared: Prepared, pattern: Pattern) -> Pruning:
        """Return what prunes ``rows``, by layer, of layers that share the input that ``prepared`` is of."""
