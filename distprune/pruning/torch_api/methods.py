"""The methods of ``torch.nn.utils.prune``, each a pattern and a score, and two more that prune in any pattern."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.utils.prune as torch_prune
from typing_extensions import override

from distprune.patterns.as_pattern import as_pattern
from distprune.patterns.base import Pattern, check_share
from distprune.patterns.channels import Channels
from distprune.patterns.unstructured import Unstructured
from distprune.pruning.agreement import check_seed
from distprune.pruning.torch_api.base import Selecting, apply_of
from distprune.scores.as_score import Magnitude
from distprune.scores.base import Score
from distprune.scores.channel_norm import ChannelNorm, Norm
from distprune.scores.random import Random

Amount: TypeAlias = int | float  # a share, or how many
Scores: TypeAlias = torch.Tensor | None  # that count in place of the parameter


class Identity(Selecting):
    """Prunes nothing; sets up the mask. See ``torch.nn.utils.prune.Identity``.

    >>> Identity().prune(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    apply = apply_of(torch_prune.Identity)

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return None, Magnitude()


class RandomUnstructured(Selecting):
    """Prunes ``amount`` elements at random. See ``torch.nn.utils.prune.RandomUnstructured``.

    >>> int(RandomUnstructured(0.5, seed=1).prune(torch.ones(8)).sum())
    4

    The mask is a hash of ``seed``, the place of the parameter in the call, its name and the flat index:
    the same in every layout. **Two calls with one seed on parameters of one name and shape prune the same places**:
    give each call its own seed, or prune all in one call of :func:`prune_each`. ``seed=None``: the first rank draws one
    from torch's default generator.
    """

    apply = apply_of(torch_prune.RandomUnstructured, "seed")

    def __init__(self, amount: Amount, *, seed: int | None = None) -> None:
        check_share(amount, "amount")
        check_seed(seed)
        self.amount = amount
        self.seed = seed

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return Unstructured(self.amount), Random(self.seed)


class L1Unstructured(Selecting):
    """Prunes the ``amount`` elements of smallest magnitude. See ``torch.nn.utils.prune.L1Unstructured``.

    >>> L1Unstructured(2).prune(torch.tensor([1.0, -4.0, 2.0]))
    tensor([ 0., -4.,  0.])
    """

    apply = apply_of(torch_prune.L1Unstructured)

    def __init__(self, amount: Amount) -> None:
        check_share(amount, "amount")
        self.amount = amount

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return Unstructured(self.amount), Magnitude()


class RandomStructured(Selecting):
    """Prunes ``amount`` channels along ``dim`` at random. See ``torch.nn.utils.prune.RandomStructured``.

    >>> int(RandomStructured(1, dim=0, seed=1).prune(torch.ones(4, 2)).sum())
    6

    Randomness as in :class:`RandomUnstructured`, by the channel's index.
    """

    PRUNING_TYPE = "structured"
    apply = apply_of(torch_prune.RandomStructured, "seed")

    def __init__(self, amount: Amount, dim: int = -1, *, seed: int | None = None) -> None:
        check_share(amount, "amount")
        check_seed(seed)
        self.amount = amount
        self.dim = dim
        self.seed = seed

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return Channels(self.amount, self.dim), Random(self.seed)


class LnStructured(Selecting):
    """Prunes the ``amount`` channels along ``dim`` of smallest L_n norm. See ``torch.nn.utils.prune.LnStructured``.

    >>> LnStructured(1, n=2, dim=0).prune(torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
    tensor([[3., 4.],
            [0., 0.]])

    ``n``: any number, inf, -inf or ``"fro"``. Norms are compared as exact sums on a common grid, so that
    the ranking is the same in every layout (see ``distprune/patterns/unit_sums.py``).
    """

    PRUNING_TYPE = "structured"
    apply = apply_of(torch_prune.LnStructured)

    def __init__(self, amount: Amount, n: Norm, dim: int = -1) -> None:
        check_share(amount, "amount")
        ChannelNorm(n)
        self.amount = amount
        self.n = n
        self.dim = dim

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return Channels(self.amount, self.dim), ChannelNorm(self.n)


class L1Pattern(Selecting):
    """Prunes the smallest magnitudes in a pattern, given as such or as text.

    >>> L1Pattern("2:4").prune(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[0., 0., 3., 4.]])

    Of a weight, dim 0 is the outputs (rows) and the other dims, flattened, are the inputs, along which groups and
    rows run; transformers' ``Conv1D`` and experts modules as they keep theirs. Importance scores count by their
    magnitude, as in :class:`L1Unstructured`. A bare tensor, given to ``prune`` or ``compute_mask``, is read as
    (out, in).

    On top of earlier pruning, N:M keeps ``n`` of every ``m`` in all: what is pruned already counts as pruned,
    so ``min(n, left)`` stay. :class:`PerRow` prunes its share of what is left of each row, and
    :class:`Block` its share of the blocks in which anything is left, by the sums of what is left.

    Under ``global_unstructured`` all parameters' blocks (or elements) compete; groups and rows raise a
    ``ValueError`` there, ``prune_each`` takes them.
    """

    def __init__(self, pattern: Pattern | str) -> None:
        self.pattern = as_pattern(pattern)

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return self.pattern, Magnitude()


class RandomPattern(Selecting):
    """Prunes at random in a pattern.

    >>> int(RandomPattern("2:4", seed=1).prune(torch.ones(1, 8)).sum())
    4

    See :class:`L1Pattern` for patterns, :class:`RandomUnstructured` for randomness. Blocks are drawn by their number.
    """

    def __init__(self, pattern: Pattern | str, *, seed: int | None = None) -> None:
        check_seed(seed)
        self.pattern = as_pattern(pattern)
        self.seed = seed

    @override
    def rule(self) -> tuple[Pattern | None, Score]:
        return self.pattern, Random(self.seed)
