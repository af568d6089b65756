"""Hold the zeros of a model while any optimizer trains it.

The hooks live on the optimizer, so they work whatever wraps the model: before a step the gradients, and the optimizer's
moments if the mask has changed, become zero where weights are held; after it the weights do. A step with a closure has
its gradients once the closure was called. A hook on each parameter masks its gradient as soon as it is there, so that
clipping sees the norm of what is kept; FSDP1 has no place for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.formatting import one_line
from distprune.masks.in_place import make_zeros_positive, zero_all_where_pruned
from distprune.models.find_shards import NamePattern
from distprune.models.runnable import check_not_offloaded
from distprune.patterns.base import Pattern
from distprune.pruning.agreement import NamedWeights, sum_zeros
from distprune.shards.local_shard import bits_of
from distprune.training.binding import Binding
from distprune.training.held import Held, HeldTogether, check_zeros
from distprune.training.optimizers import (
    OnSteps,
    Optimizers,
    check_moves,
    inside,
    outside_dynamo,
    parameters_of,
    state_of,
    unwrapped,
)
from distprune.training.regrowth import Counts, GrowBy, regrow


def hold_zeros(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> Hold:
    """Keep every weight that is zero at zero, from here on, through the steps of ``optimizer``.

    >>> model = torch.nn.Linear(8, 8)
    >>> hold = hold_zeros(model, torch.optim.AdamW(model.parameters()))

    The zeros are the mask: what is pruned later, or comes with a checkpoint, is held from the next step on. Nothing is
    stored with the model; names, ``state_dict`` and forward stay as they are. Zeros of both signs are held that are
    there at the call, or come with a ``load_state_dict`` of other zeros: a product with a mask leaves both.
    (``torch.distributed.checkpoint.load`` in place, without one, is a write like any other.) From then on a kept weight
    that becomes zero is written as -0.0, the same number; :meth:`Hold.finish` turns it into 0.0. It may be called
    before or after the model and the optimizer are wrapped or loaded. Weights are read again when torch has counted a
    write to them, and on a CPU before every step. Torch does not count what is written through ``data``: on a device,
    write to the parameter or the gradient itself, within ``torch.no_grad()``. -0.0 counts as kept where you write it
    later: ``weight.mul_(mask)`` leaves it where weights were negative; ``weight.masked_fill_(~mask, 0)`` does not. And
    every +0.0 that you write is held for good, pruned or not, as by ``weight.clamp_(min=0)``.

    Zeros that are there by nature are held, too, and never learn: leave them out with ``exclude``. A warning names
    matrices of them by one sign: all their other weights are the same number, as ``eye_`` and ``dirac_`` leave them.

    If a parameter loses nearly all of its zeros, between steps or before :meth:`Hold.finish`, they were overwritten: by
    a dense checkpoint, a merged adapter, or an optimizer that writes weights it has kept. Their places stay held as of
    the last step, and a warning names the parameter; each rank judges its own part.

    Args:
        model: in any layout that :func:`distprune.prune_model` takes, wrapped or not.
        optimizer: one, several, a wrapper or a container of some (Accelerate, SAM, Lookahead, PostLocalSGD, torchtitan,
            layer-wise GaLore). ``None``: whichever steps a parameter, as long as a part of the model lives. It may be
            given new parameters.
        include: as in :func:`distprune.prune_model`, as is ``exclude``.
        group: the ranks that hold parts of the model.

    Every rank of ``group`` must call it: three rounds, two of 64 bytes and one of 8 a parameter; one more of 16 where
    some are mostly zeros; on pipelines up to four more. A rank keeps one byte a local weight. Steps do not communicate:
    an error within a step or a hook of the backward pass on one rank is raised there alone, and the others wait in the
    next collective of the model until its process ends.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: a parameter that is all zeros, which could never
            learn; no optimizer, or one without any of the parameters, or these are frozen (PEFT); arguments that differ
            between ranks; a name pattern that matches nothing; a ``Partial`` placement.
    """
    return Hold(NamedWeights(model, include, exclude), optimizer, group)


@final
class Hold(OnSteps):
    """The zeros of a model that stay zero. :func:`hold_zeros` makes it.

    >>> hold_zeros(torch.nn.Linear(8, 8))
    <Hold: zeros of 1 parameters>

    A copy (``deepcopy``, pickle) that is made together with the model and the optimizers holds the copies; only that of
    the default group can be pickled.
    """

    def __init__(
        self,
        weights: NamedWeights,
        optimizer: Optimizers,
        group: Group,
        *,
        listener: Callable[[Optimizer], None] | None = None,
        checks: bool = True,
    ) -> None:
        """``checks``: for dead weights.

        ``listener``: called before each step of the first optimizer, and before it is read what is held. Then nothing
        is held before :meth:`begin`, and what is loaded is trusted.
        """
        super().__init__(of_all=optimizer is None)
        self._weights, self._comm, self._listener = weights, communicator(group), listener
        self.leaves_gradients_dense = False  # until the step, which masks them
        self._stepping: dict[int, HeldTogether] = {}  # by optimizer, as what follows by its id
        self._to_skip: set[int] = set()
        self._put_away: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}  # gradients, during such a step
        self._binding = Binding(weights, self._at_forward, self._at_gradient, trusts_loaded=listener is not None)

        def look() -> None:
            check_not_offloaded(weights.model)
            self._optimizers = [] if optimizer is None else unwrapped(optimizer)

        try:
            agreed = weights.agree(self._comm, look)
            if checks:
                check_zeros(self._comm, agreed.roster, agreed.shards)
            with together(self._comm):
                self._binding.take(agreed.found.shards)
                check_moves(self._optimizers, self._binding.shards)
                if listener is None:
                    self._binding.begin(trusts_signs=False)
                    self._binding.together.read(at_step=True)
                self._attach()
        except Exception:
            self.remove()
            raise

    @override
    def __repr__(self) -> str:
        return one_line(self, f"zeros of {len(self._binding.shards)} parameters{'' if self._handles else ', no more'}")

    def begin(self, *, trusts_signs: bool) -> None:
        """Hold from here on. ``trusts_signs``: the weights are from a training like this one. Local."""
        self._binding.begin(trusts_signs=trusts_signs)

    def end(self) -> None:
        """Hold nothing until :meth:`begin`. Local."""
        self._binding.end()

    @override
    def _attach(self) -> None:
        self._binding.attach(self if self._of_all else None)  # no optimizer keeps it
        super()._attach()
        for optimizer in self._optimizers:
            if "_optimizer_load_state_dict_post_hooks" in vars(optimizer):  # Lookahead's wrapper has none
                self._handles.append(optimizer.register_load_state_dict_post_hook(self._state_loaded))

    @override
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        if self._listener is not None and optimizer is self._optimizers[0]:
            if not self.leaves_gradients_dense and self._binding.has_flat:
                for other in self._optimizers:  # no hook has masked them: what grows has no gradient yet
                    self._mask_gradients(other)
            self._to_skip.clear()
            self._listener(optimizer)
        self._before_closure(optimizer)
        if id(optimizer) in self._to_skip:
            self._to_skip.remove(id(optimizer))
            parameters = parameters_of(optimizer)
            self._put_away[id(optimizer)] = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _mask_gradients(self, optimizer: Optimizer) -> HeldTogether:
        """Read what is held of what ``optimizer`` moves, and mask its gradients."""
        moved = self._binding.moved_by(optimizer)
        moved.read(at_step=True)
        moved.mask_gradients()
        return moved

    @override
    @torch.no_grad()
    def _before_closure(self, optimizer: Optimizer) -> None:
        """Write zeros into gradients and moments where weights are held now."""
        if not self._binding.has_begun:
            return
        moved = self._stepping[id(optimizer)] = self._mask_gradients(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and any(held.is_new for held in moved.held):
            for state in optimizer.state.values():
                state["n_iter"] = 0  # a history over all parameters at once: it starts anew
        moved.clean(partial(state_of, optimizer))

    @override
    def _after_step(self, optimizer: Optimizer) -> None:
        moved = self._stepping.pop(id(optimizer), None)
        if moved is not None:
            moved.write_zeros()
        for parameter, gradient in self._put_away.pop(id(optimizer), ()):
            parameter.grad = gradient

    def _state_loaded(self, _: Optimizer) -> None:
        for held in self._binding.held:
            held.is_new = True

    def _at_forward(self) -> None:
        self._binding.follow()
        if not self._stepping and torch.is_grad_enabled():
            self._binding.together.read()  # here, as the backward pass needs the weights as they are

    @outside_dynamo  # type: ignore[untyped-decorator]
    def _at_gradient(self, held: Held) -> None:
        if self.leaves_gradients_dense:
            return
        if not self._stepping and held.is_written():  # within a step, for a closure, weights are on their way
            HeldTogether([held]).read()
        held.mask_gradient()

    def remove(self) -> None:
        """Hold nothing any more: the hooks are gone, and the zeros stay until a step changes them. Local."""
        self._binding.remove()
        self._detach()

    def finish(self) -> None:
        """Turn every -0.0 into 0.0, and hold nothing any more. Local.

        Zeros that were overwritten since the last step are written again, with a warning.
        """
        if self._handles:
            self._binding.renew()
            self._binding.together.read(at_step=True)
            self._binding.together.write_zeros()
        self.remove()
        make_zeros_positive([shard.local for shard in self._binding.find()])

    def expect_others(self) -> None:
        """Hold the zeros that are there at the next step in the place of those now, however few they are. Local."""
        for held in self._binding.held:
            held.expects_others, held.version = True, None

    def counts(self) -> Counts:
        """Return how many weights are held, over all ranks. Every rank must call it: as :meth:`counts_by_name`."""
        counts = self.counts_by_name().values()
        return Counts(sum(count.num_held for count in counts), sum(count.num_elements for count in counts))

    def counts_by_name(self) -> dict[str, Counts]:
        """Return how many weights of each parameter are held, over all ranks.

        Every rank must call it: two rounds, of 64 bytes and of 8 a parameter; on pipelines up to four more.
        """
        agreed = self._weights.agree(self._comm)

        def owned() -> dict[str, torch.Tensor]:
            self._binding.together.take_over()
            shards = agreed.shards() if self._binding.has_begun else ()
            return {shard.name: bits_of(shard.local) for shard in shards if shard.owned}

        num_held = sum_zeros(self._comm, agreed.roster, owned)
        return {m.name: Counts(num_held[m.name], math.prod(m.global_shape)) for m in agreed.roster.members}

    def apply_to(self, other: nn.Module) -> None:
        """Write zeros into ``other`` where weights are held, as of the last step: an average of weights, for example.

        ``other`` has the parameters of this model under the same names, in the same layout, or is an ``AveragedModel``
        of it. Every rank must call it: one round.

        Raises:
            ValueError: on every rank, nothing changed: a parameter is missing, or laid out differently.
        """
        work: list[tuple[torch.Tensor, torch.Tensor]] = []
        with together(self._comm):
            bare = other.module if isinstance(other, AveragedModel) else other
            there = {shard.name: shard for shard in self._binding.find(bare)}
            for held in self._binding.held:
                shard = there.get(held.shard.name)
                if shard is None or shard.geometry != held.shard.geometry:
                    raise ValueError(
                        f"{held.shard.name!r} is missing, or laid out differently; pass a copy of the held model"
                    )
                work.append((shard.local, held.zeros.to(shard.local.device)))
        zero_all_where_pruned(work, where=True)

    def regrow(
        self, share: float, pattern: Pattern | str = "unstructured", *, by: GrowBy = "random", seed: int | None = None
    ) -> Counts:
        """Move ``share`` of the kept weights of each parameter within ``pattern``. Every rank must call it.

        ``pattern``: what the zeros follow, as :func:`distprune.prune_model` takes it. See :class:`Regrow`. What was
        dropped and grows again keeps its value. Without a ``seed`` each call draws one. By gradient: compute the
        gradients within :meth:`dense_gradients`, and take no step with them. What grew is zero until it is trained, and
        to :func:`distprune.prune_model` as good as pruned.
        Rounds: twice those of the pattern, and one of 16 bytes.

        Raises:
            ValueError: on every rank, nothing changed: no gradient, NaN gradients, arguments that differ, or a
                parameter that is frozen, or that the pattern does not fit.
            NotImplementedError: on every rank: a pattern of your own that has no ``regrowth``.
        """

        def look() -> None:
            self._binding.renew()
            self._binding.together.take_over()  # what grows is written as -0.0

        moved = regrow(self._comm, self._weights, share, pattern, by=by, seed=seed, look=look)
        self.expect_others()
        return moved

    def skip_step(self) -> None:
        """Let each optimizer that was given leave out its next step: it finds no gradients, which are there again after
        it. What has a closure calls it once. What only wraps another has no step of its own. Local."""
        self._to_skip.update(id(optimizer) for optimizer in self._optimizers if inside(optimizer) is None)

    @contextmanager
    def dense_gradients(self) -> Iterator[None]:
        """Leave the gradients that are computed within as they are, also where weights are held. Local.

        The next step masks them. (Those of FSDP1 are dense until the step in any case.)
        """
        before, self.leaves_gradients_dense = self.leaves_gradients_dense, True
        try:
            yield
        finally:
            self.leaves_gradients_dense = before
