"""Training with masks that move at every step: pruned forward and backward, dense weights under the optimizer.

Nouns: the *latent weights* are the dense ones, which the optimizer steps. Between steps the model has what the mask
keeps of them, and what it prunes is *set aside*, so both together are the latent weights, and nothing is stored twice.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from distprune.collectives.agree import max_together, sum_together
from distprune.collectives.communicator import Group, communicator
from distprune.formatting import cut, one_line
from distprune.masks.in_place import bring_back, set_aside
from distprune.models.find_shards import NamePattern
from distprune.patterns.as_pattern import as_pattern, says_how_much
from distprune.patterns.base import Pattern, Ranked
from distprune.pruning.agreement import NamedWeights, agreeing, choose_masks
from distprune.scores.as_score import Magnitude
from distprune.scores.base import LocalScores
from distprune.shards.device import fetched, row_chunks
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import gradient_of, ranges_of
from distprune.training.binding import WatchedWeights, Weak, in_backward
from distprune.training.carried import laid_out, load_in_place
from distprune.training.optimizers import (
    OnSteps,
    Optimizers,
    check_moves,
    inside,
    only_makes_state,
    parameters_of,
    unwrapped,
)

_WHAT = "weights set aside"


@final
class StraightThrough(OnSteps):
    """Train ``model`` with a mask that is chosen anew after every step, from weights that all go on learning (SR-STE).

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> training = StraightThrough(model, optimizer, pattern="2:4")
    >>> model(torch.ones(8)).sum().backward()
    >>> optimizer.step()
    >>> sparsity(model)
    0.5

    Forward and backward see the pruned weights W ⊙ M. Their gradient g(W ⊙ M), dense, goes straight through to the
    latent weights W, also to those that M prunes. These decay by λ, so that they do not come back by chance:
    W ← W - η (g(W ⊙ M) + λ (1 - M) ⊙ W), with the η and the rule of your optimizer; then M is chosen anew from |W|,
    exactly over ranks; a W that is zero is a weight like others. (SR-STE, arXiv 2102.04010, section 3.) The model is
    pruned at once, and between steps, so what is saved, evaluated or exported of it is what the pattern says.

    Args:
        model: in any layout that :func:`distprune.prune_model` takes, wrapped, moved and cast before this.
        optimizer: one, several, a wrapper or a container of some. With several the mask moves after the last one in the
            list that steps a pruned weight.
        pattern: one that says how much is pruned: ``"2:4"``, ``PerRow(0.5)``, ``Unstructured(0.5)``,
            ``Block(16, 0.5)``, ``Channels(0.5)``.
        decay: λ. It is added to the gradient at the step, after clipping. 0: the plain straight-through estimator.
        every: so many steps a mask stays.
        include: as in :func:`distprune.prune_model`, as is ``exclude``.
        group: the ranks that hold parts of the model; all of them step together.

    What is set aside takes a second copy of this rank's part of the weights, and for the checkpoint belongs to
    :meth:`state_dict`. What you write into a pruned weight between steps counts, with a warning. Gradients stay dense,
    so do not hold the same zeros (:func:`distprune.hold_zeros`). A copy (``deepcopy``, pickle) that is made together
    with the model and the optimizer trains the copies; only that of the default group can be pickled.

    Every rank of ``group`` must make it, and step. Rounds of a step: one of 16 bytes, and those of
    :func:`distprune.prune_model` where the mask is chosen, whatever the number of layers. An error within a step leaves
    the model pruned by the mask of before: at once if it is raised here, else at the next forward or ``state_dict``.

    Raises:
        ValueError, TypeError: on every rank, nothing changed, as :func:`distprune.prune_model`; ``decay`` or ``every``
            out of range; a pattern that does not say how much; an optimizer without any of the parameters. At a step:
            weights became NaN; the parameters are laid out otherwise than before; a gradient that is not reduced.
        NotImplementedError: on every rank: an optimizer that wraps another and writes weights itself (Lookahead); at a
            step: one that steps within the backward pass, where ranks are not in step.
    """

    _each_time = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        pattern: Pattern | str = "2:4",
        decay: float = 2e-4,
        every: int = 1,
        include: NamePattern | Sequence[NamePattern] = (),
        exclude: NamePattern | Sequence[NamePattern] = (),
        group: Group = None,
    ) -> None:
        super().__init__()
        self.step = 0  # how many were done
        self._weights = NamedWeights(model, include, exclude)
        self._watched = WatchedWeights(self._weights)
        self._pattern, self._decay, self._every = pattern, decay, every
        self._comm = communicator(group)
        self._aside: dict[str, torch.Tensor] = {}  # by parameter, of local shape
        self._dense: list[LocalShard] | None = None  # what has its latent weights, within a step
        self._was_written = False  # to a pruned weight, on some rank, since the mask was chosen

        def look() -> None:
            self._check_arguments()
            self._optimizers = _that_step(optimizer)
            self._layout = _layout_of(self._watched.find().shards)

        shards, masks = self._choose(look)

        def prepare(moves: torch.Tensor) -> None:
            self._aside = {shard.name: torch.zeros_like(shard.local) for shard in shards}
            moves.copy_(torch.tensor(check_moves(self._optimizers, shards), dtype=torch.int64, device="cpu"))

        moves = max_together(self._comm, (len(self._optimizers),), prepare).tolist()
        self._optimizers = [one for one, moves_some in zip(self._optimizers, moves, strict=True) if moves_some]
        self._attach()
        self._set_aside(shards, masks)  # from here on no rank can fail

    @override
    def _attach(self) -> None:
        super()._attach()
        self._handles += [
            self._weights.model.register_forward_pre_hook(Weak(self._prune_again), prepend=True),
            self._weights.model.register_state_dict_pre_hook(Weak(self._prune_again)),
        ]

    @override
    def __getstate__(self) -> dict[str, Any]:
        self._prune_again()
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps done, and by parameter what is set aside. Local.

        These have their parameters' layout (DTensors, where these are), and are not copied. So
        ``torch.distributed.checkpoint`` saves them beside the model, and loads them in place at another number of
        ranks.

        Raises:
            NotImplementedError: under FSDP1, whose places no checkpoint knows.
        """
        self._prune_again()
        shards = [shard for shard in self._watched.find().shards if shard.name in self._aside]
        return {"step": self.step, "aside": laid_out(shards, lambda shard: self._aside[shard.name], _WHAT)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; weights and optimizer are loaded as ever. Local.

        Raises:
            KeyError, ValueError: nothing changed: it has not what was set aside (to go on from a pruned model alone,
                load that, and make this anew), that of other parameters, or of another rank: DTensors that were not
                loaded in place, as ``torch.distributed.checkpoint`` does it.
        """
        step = int(state_dict["step"])
        load_in_place(self._comm, self.state_dict()["aside"], state_dict["aside"], _WHAT)
        self.step = step

    @override
    def __repr__(self) -> str:
        return one_line(self, f"step {self.step:,}, {cut(repr(self._pattern), 40)}")

    def finish(self) -> None:
        """Leave the model pruned as it is, drop what is set aside, and prune nothing any more. Local."""
        self._prune_again()
        self._detach()
        self._aside = {}

    def _check_arguments(self) -> None:
        says = says_how_much(self._pattern)
        as_pattern(self._pattern, None if says else 0.0)
        if not says:
            raise ValueError(
                f"pattern={self._pattern!r} does not say how much is pruned; pass it as a value, such as PerRow(0.5), "
                "or as N:M"
            )
        if not 0 <= self._decay < math.inf:
            raise ValueError(f"decay={self._decay!r} must be a number from 0 up, such as 2e-4")
        if isinstance(self._every, bool) or not isinstance(self._every, int) or self._every < 1:
            raise ValueError(f"every={self._every!r} must be a number of steps, at least 1")

    def _choose(self, look: Callable[[], object] = lambda: None) -> tuple[list[LocalShard], list[torch.Tensor]]:
        """Return this rank's shards, and the masks that the pattern chooses now. Every rank must call it.

        ``look`` runs first; what it raises on one rank is raised on all.
        """
        with agreeing(self._comm) as agreed:
            look()
            pattern = as_pattern(self._pattern)
            agreed.found = dataclasses.replace(self._weights, model=self._watched.find()).find_for(pattern)
            options = {"decay": repr(self._decay), "every": self._every, "number of optimizers": len(self._optimizers)}
            agreed.facts = {"pattern": repr(pattern), **options, **self._weights.facts}
        agreed.check_found()

        def make_scores() -> list[LocalScores]:  # of latent weights, whose zeros are weights like others
            return [LocalScores(shard, Magnitude()) for shard in agreed.shards()]

        ranked = Ranked(self._comm, agreed.roster, Magnitude(), make_scores, of_left=True)
        masks, _ = choose_masks(ranked, ranked.choose(pattern))
        return ranked.shards(), masks

    def _set_aside(self, shards: Sequence[LocalShard], masks: Sequence[torch.Tensor]) -> None:
        for shard, mask in zip(shards, masks, strict=True):
            set_aside(shard.local, self._aside[shard.name], mask)

    @override
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        """Before a step: give it the latent weights, and their decay."""
        if in_backward():
            raise NotImplementedError(
                "an optimizer that steps within the backward pass cannot train straight through, since the ranks are "
                "not in step there; let it step after the backward pass"
            )
        self._prune_again()  # if a step did not end
        if only_makes_state(self._comm, optimizer):
            return
        gradients: dict[str, torch.Tensor] = {}

        def open_up(num_written: torch.Tensor) -> None:
            shards = self._watched.find().shards
            if _layout_of(shards) != self._layout:
                raise ValueError(
                    "the parameters are laid out otherwise, or are others, than when StraightThrough was made; make it "
                    "after the model is wrapped, moved and cast"
                )
            shards = [shard for shard in shards if shard.name in self._aside]
            gradients.update(_gradients(shards, optimizer))
            nums, self._dense = [], []
            for shard in shards:
                nums.append(bring_back(shard.local, self._aside[shard.name]))
                self._dense.append(shard)
            num_written[0] = sum(map(int, fetched(nums)))

        try:
            num_written = int(sum_together(self._comm, (1,), open_up)[0])
        except Exception:
            self._prune_again()
            raise
        if num_written:
            self._was_written = True
            warnings.warn(
                f"{num_written} pruned weights were written to since the last step, as by a checkpoint that was loaded "
                "without StraightThrough's state_dict: they go on from what they are now",
                stacklevel=3,
            )
        scale = getattr(optimizer, "grad_scale", None)  # what GradScaler leaves to a fused optimizer to divide by
        decay = self._decay if scale is None else self._decay * scale
        for name, gradient in gradients.items() if self._decay else ():
            _add(gradient, self._aside[name], decay)

    @override
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer) -> None:
        if self._dense is None:
            return  # it made its state, or did not call its closure
        is_last = optimizer is self._optimizers[-1]
        self.step += is_last
        try:
            if is_last and (self.step % self._every == 0 or self._was_written):
                self._set_aside(*self._choose())
                self._dense, self._was_written = None, False
        finally:
            self._prune_again()

    @override
    def _before_closure(self, _: Optimizer) -> None:
        self._prune_again()  # it may be called again, on weights that have moved

    def _prune_again(self) -> None:
        """Set aside what is dense, by the mask of before: within a step, or after one that raised. Local."""
        for shard in self._dense or ():
            set_aside(shard.local, self._aside[shard.name])
        self._dense = None


def _that_step(optimizer: Optimizers) -> list[Optimizer]:
    """Return the optimizers that step weights, or raise: wrappers that write weights themselves. Local."""
    optimizers = unwrapped(optimizer)
    for one in optimizers:
        if inside(one) is not None:
            raise NotImplementedError(
                f"{type(one).__name__} wraps an optimizer and writes weights of its own, which would not be the "
                "latent ones; pass the optimizer inside, and do without the wrapper"
            )
    return optimizers


def _gradients(shards: Sequence[LocalShard], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the gradients of what ``optimizer`` steps, by name, as far as there are any. Local.

    Raises:
        ValueError: one is sparse, or not reduced over the ranks.
    """
    gradients = {}
    for shard, where in zip(shards, ranges_of(shards, parameters_of(optimizer)), strict=True):
        if where is None or where.parameter.grad is None:
            continue
        gradient = gradient_of(where)
        if gradient is None:
            raise ValueError(
                f"the gradient of {shard.name!r} is sparse, or not reduced over the ranks, so its pruned weights "
                "cannot decay; leave it out with exclude, or reduce it before the step"
            )
        gradients[shard.name] = gradient
    return gradients


def _layout_of(shards: Sequence[LocalShard]) -> dict[str, object]:
    return {shard.name: (shard.geometry, shard.local.dtype, shard.local.device) for shard in shards}


def _add(gradient: torch.Tensor, values: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Add ``values`` times ``factor``, rounded before the sum, so that no layout has a fused sum. Chunk by chunk."""
    gradient, values = (tensor[None] if tensor.ndim == 0 else tensor for tensor in (gradient, values))
    for into, some in row_chunks(gradient, values):
        into.add_(some * factor)
