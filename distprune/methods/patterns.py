"""Methods whose elements compete in a pattern: N:M groups, rows, blocks, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from typing_extensions import override

from distprune.collectives import Communicator, Group, Roster
from distprune.methods.amount import check_seed, seeded
from distprune.methods.base import Part, Selecting
from distprune.methods.blocks import decide_blocks
from distprune.methods.decide import Candidate, Decision, Method, Rule, Scope, decide
from distprune.methods.within_rows import decide_within_rows
from distprune.models import matrix_of_weight
from distprune.selection import Block, NByM, Pattern, Unstructured, check_divides, check_pattern
from distprune.shards import Matrix

__all__ = ["L1Pattern", "RandomPattern", "amount_of", "check_scope", "decide_pattern", "fitting_matrix"]


def amount_of(pattern: Pattern) -> float:
    """Return the fraction that ``pattern`` prunes of whatever competes in it."""
    return 1 - pattern.n / pattern.m if isinstance(pattern, NByM) else pattern.amount


def check_scope(pattern: Pattern, scope: Scope) -> None:
    """Raise if ``pattern`` has no competition that ``scope`` could widen.

    Raises:
        ValueError: groups and rows are decided one by one.
    """
    if not isinstance(pattern, Unstructured | Block):
        raise ValueError(f"{scope=} does not go with {pattern!r}: groups and rows are decided one by one")


def fitting_matrix(pattern: Pattern, module: nn.Module, name: str, shape: Sequence[int], full_name: str) -> Matrix:
    """Return how parameter ``name`` of ``module``, of the global ``shape``, is a matrix that ``pattern`` fits. Local.

    Raises:
        ValueError: it has fewer than two dims, or the pattern's groups or blocks do not divide it;
            ``full_name`` names it.
        NotImplementedError: which of its dims are the inputs is not known.
    """
    matrix = matrix_of_weight(module, name, shape, full_name)
    check_divides(pattern, full_name, matrix.num_out, matrix.num_in)
    return matrix


def decide_pattern(
    comm: Communicator, roster: Roster, candidates: Sequence[Candidate], pattern: Pattern, rule: Rule
) -> Decision:
    """Return what ``pattern`` prunes by the scores of ``rule``, whose amount is the pattern's if it has one.

    Every rank must call it; rounds, bytes and errors are those of ``decide``, ``decide_within_rows`` or
    ``decide_blocks``.
    """
    if isinstance(pattern, Unstructured):
        return decide(comm, roster, candidates, rule)
    if isinstance(pattern, Block):
        return decide_blocks(comm, roster, candidates, pattern, rule)
    return decide_within_rows(comm, roster, candidates, pattern, rule)


class _InPattern(Selecting):
    """What both share. What is pruned already is out, and stays pruned: ``PRUNING_TYPE`` is "unstructured"."""

    PRUNING_TYPE = "unstructured"
    pattern: Pattern

    @override
    def matrix_of(self, module: nn.Module, name: str, shape: Sequence[int]) -> Matrix | None:
        if isinstance(self.pattern, Unstructured):
            return None
        return fitting_matrix(self.pattern, module, name, shape, name)

    def _decided(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope, method: Method, seed: int | None
    ) -> list[torch.Tensor]:
        if scope == "global":
            check_scope(self.pattern, scope)
        reads: Literal["all", "replicas", "nothing"] = "nothing"
        if method == "magnitude":  # a selection among elements finds NaNs by itself
            reads = "replicas" if isinstance(self.pattern, Unstructured) else "all"
        rule = Rule(method, amount_of(self.pattern), scope, seed, reads=reads)
        candidates = [Candidate(part.shard, part.mask) for part in parts]
        return decide_pattern(comm, roster, candidates, self.pattern, rule).masks


class RandomPattern(_InPattern):
    """Prunes at random in a pattern.

    See :class:`L1Pattern` for patterns, :class:`RandomUnstructured` for randomness. Blocks are drawn by their number.
    """

    def __init__(self, pattern: Pattern, *, seed: int | None = None) -> None:
        check_pattern(pattern)
        check_seed(seed)
        self.pattern = pattern
        self.seed = seed

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        return self._decided(comm, roster, parts, scope, "random", self.seed)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, pattern: Pattern, *, group: Group = None, seed: int | None = None
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, pattern=pattern, group=group, **seeded(seed))


class L1Pattern(_InPattern):
    """Prunes the smallest magnitudes in a pattern.

    It is :class:`NByM`, :class:`PerRow`, :class:`Block` or :class:`Unstructured`. Of a weight, dim 0 is the
    outputs (rows) and the other dims, flattened, are the inputs, along which groups and rows run; transformers'
    ``Conv1D`` and experts modules as they keep theirs. Importance scores count by their magnitude, as in
    :class:`L1Unstructured`. A bare tensor, given to :meth:`prune` or :meth:`compute_mask`, is read as (out, in).

    On top of earlier pruning, N:M keeps ``n`` of every ``m`` in all: what is pruned already counts as pruned,
    so ``min(n, left)`` stay. :class:`PerRow` prunes its fraction of what is left of each row, and
    :class:`Block` its fraction of the blocks in which anything is left, by the sums of what is left.

    Under ``global_unstructured`` all parameters' blocks (or elements) compete; groups and rows raise a
    ``ValueError`` there, ``prune_each`` takes them.
    """

    def __init__(self, pattern: Pattern) -> None:
        check_pattern(pattern)
        self.pattern = pattern

    @override
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        return self._decided(comm, roster, parts, scope, "magnitude", None)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls,
        module: nn.Module,
        name: str,
        pattern: Pattern,
        importance_scores: torch.Tensor | None = None,
        *,
        group: Group = None,
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, pattern=pattern, importance_scores=importance_scores, group=group)
