"""What decides the weights that a walk over the blocks comes to, and what each choice is where nothing is said."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch

from distprune.checkpoint.optional_packages import import_extra
from distprune.oneshot.admm import ADMM
from distprune.oneshot.solver import Scored, Solver
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.patterns.as_pattern import as_pattern
from distprune.patterns.base import Pattern
from distprune.patterns.n_by_m import NByM
from distprune.pruning.agreement import check_seed, with_seed
from distprune.scores.as_score import Magnitude, Wanda
from distprune.scores.base import Score
from distprune.scores.random import Random

OneShotMethod = Literal["admm", "sparsegpt", "wanda", "magnitude", "random"]
Sequential = Literal["block", "layer"]
TargetsOf = Literal["own", "dense"]
BlockRefit = Literal["block", "none"]
Permute = Literal["channels", "none"]

EPOCHS = 4  # each takes three forwards of a block; more come nearer to the dense model
_TARGET_SHARE = 0.5  # of the way to dense targets
_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True)
class Recipe:
    """The arguments of ``prune_blocks`` that decide its result. ``None``: what goes with the others."""

    method: OneShotMethod | Score | Solver = "admm"
    pattern: Pattern | str = "unstructured"
    sparsity: float | Mapping[str, float] | None = None
    seed: int | None = 0
    sequential: Sequential | None = None
    targets: TargetsOf | None = None
    target_share: float | None = None
    refit: BlockRefit | None = None
    permute: Permute | None = None
    epochs: int | None = None

    def resolved(self) -> Recipe:
        """Return the recipe with every choice made and checked: its ``pattern`` is a :class:`Pattern`. Local.

        Raises:
            ValueError, TypeError: a choice that there is not, or that does not go with another.
            NotImplementedError: a pattern that the solver cannot prune by.
            ImportError: scipy is not installed, and channels would change places.
        """
        check_seed(self.seed)
        pattern = as_pattern(self.pattern, self.sparsity)
        pattern = pattern.within("tensor") if pattern.has_scope else pattern
        self.solver.check(pattern)
        is_admm = self.method == "admm" or isinstance(self.method, ADMM)
        targets = chosen("targets", self.targets or ("dense" if is_admm else "own"), TargetsOf)
        share = share_of_targets(targets, self.target_share)
        refit = self.refit or ("block" if fits_by_default(targets) else "none")
        permute = self.permute or ("channels" if isinstance(pattern, NByM) and targets == "dense" else "none")
        if chosen("refit", refit, BlockRefit) == "block":
            check_can_fit(targets)
        if self.epochs is not None and (refit != "block" or type(self.epochs) is not int or self.epochs < 1):
            raise ValueError(f"epochs={self.epochs!r}: passes over all samples, 1 or more, where refit='block'")
        if chosen("permute", permute, Permute) == "channels":
            if not isinstance(pattern, NByM):
                raise ValueError(
                    f"{permute=} is for patterns such as '2:4', in whose groups channels meet, not {pattern!r}"
                )
            import_extra("scipy", "hf")
        return replace(
            self,
            pattern=pattern,
            sparsity=None,
            sequential=chosen("sequential", self.sequential or ("layer" if is_admm else "block"), Sequential),
            targets=targets,
            target_share=share,
            refit=refit,
            permute=permute,
        )

    @property
    def solver(self) -> Solver:
        """What ``method`` stands for."""
        if isinstance(self.method, Solver):
            return self.method
        if isinstance(self.method, Score):
            return Scored(with_seed(self.method, self.seed))
        solvers: dict[str, Solver] = {
            "admm": ADMM(),
            "wanda": Scored(Wanda(), by_row=True),
            "sparsegpt": SparseGPT(),
            "magnitude": Scored(Magnitude()),
            "random": Scored(with_seed(Random(), self.seed)),
        }
        if self.method not in solvers:
            raise ValueError(f"method={self.method!r} is none of {', '.join(solvers)}, a Score or a Solver")
        return solvers[self.method]

    @property
    def has_targets(self) -> bool:
        """Whether layers are moved towards the dense model's outputs; of a recipe that is :meth:`resolved`."""
        return bool(self.target_share)

    @property
    def method_name(self) -> str:
        """The method as reports say it."""
        return self.method if isinstance(self.method, str) else type(self.method).__name__

    @property
    def permutes(self) -> NByM | None:
        """For which pattern channels change places before a block is pruned; of a recipe that is :meth:`resolved`."""
        return self.pattern if isinstance(self.pattern, NByM) and self.permute == "channels" else None

    @property
    def updates_weights(self) -> bool:
        """Whether weights that stay are changed, too; of a recipe that is :meth:`resolved`."""
        return self.has_targets or not isinstance(self.solver, Scored)


def chosen(name: str, choice: _Choice, choices: Any) -> _Choice:
    """Return ``choice``, of the argument ``name``, if it is one of ``choices``, a Literal; else raise a ValueError."""
    if choice not in get_args(choices):
        raise ValueError(f"{name}={choice!r} is none of {', '.join(get_args(choices))}")
    return choice


def fits_by_default(targets: TargetsOf) -> bool:
    """Return whether blocks are fitted as a whole where nothing is said: wherever ``targets`` are dense. Local.

    Not in torch's inference mode, of which it warns.
    """
    can_fit = not torch.is_inference_mode_enabled()
    if targets == "dense" and not can_fit:
        warnings.warn("blocks are not fitted as a whole: in inference mode nothing can be", stacklevel=2)
    return targets == "dense" and can_fit


def check_can_fit(targets: TargetsOf) -> None:
    """Raise a ValueError unless blocks can be fitted as a whole. Local."""
    if targets != "dense":
        raise ValueError(f"refit='block' fits blocks to the dense model's: it needs targets='dense', not {targets!r}")
    if torch.is_inference_mode_enabled():
        raise ValueError("refit='block' needs gradients: call it outside of torch.inference_mode()")


def share_of_targets(targets: TargetsOf, target_share: float | None) -> float:
    """Return the share of the way to ``targets``, 0 where they are layers' own.

    Raises:
        ValueError, TypeError: no such targets, no share, or one that says nothing.
    """
    chosen("targets", targets, TargetsOf)
    if target_share is None:
        return _TARGET_SHARE if targets == "dense" else 0.0
    if isinstance(target_share, bool) or not isinstance(target_share, int | float):
        raise TypeError(f"target_share must be a number, not {target_share!r}")
    if not 0 < target_share <= 1:
        raise ValueError(f"{target_share=} is not in (0, 1]; without targets say targets='own'")
    if targets == "own":
        raise ValueError(f"{target_share=} is of the way to targets='dense', and the targets are 'own'")
    return float(target_share)
