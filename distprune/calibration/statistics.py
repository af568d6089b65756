"""What the linear layers of one block are given, summed over samples and ranks.

Nouns: the *moments* of an input X (tokens, in) are the sums and the sums of squares of each feature, or all of X^T X.
Layers that are given the very same tensor (q, k and v; gate and up) share theirs.

Ranks that run the same samples (see :mod:`distprune.calibration.sample_group`) take a part each: of ``in`` features,
the sums of theirs, and of X^T X their rows. That is also how tensor parallelism cuts the inputs of a row-wise
layer, whose sums of squares so need no communication; its X^T X needs all of X beside it. (A matrix product of
fewer rows may round otherwise: X^T X of such ranks is that of one but for the last bit.) Where every rank runs its own,
the tokens of routed layers are kept and go to their owner: see :mod:`distprune.calibration.routed_tokens`.

Every sample is one addend, computed from that sample alone and rounded to float32, and added in
float64. Such a sum is exact, whatever the order, as long as the addends of an element lie within a factor
of 2^29 / samples of each other (24 bits of 53 are the addend's own); what little is lost beyond that
the result's own rounding to float32 hides. So N ranks with 1/N of the samples each come to what one
rank comes to, bit by bit.

X^T X about the mean is no difference of X^T X and n mean^2, of which nothing is left where the mean is large: each
sample's products are taken about its own mean, and once the mean m of all is known, n_s (m_s - m) (m_s - m)^T of each
sample s is added, which is again an addend of that sample alone (Chan, Golub, LeVeque 1979).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch

from distprune.calibration.holders import find_holders
from distprune.calibration.listening import first_layers, listening
from distprune.calibration.moments import EVERYWHERE, Moments, MomentsOf
from distprune.calibration.owner_ranks import OwnerRank, SharedInput, find_owners, find_routed_owners
from distprune.calibration.reduction import Reduction
from distprune.calibration.routed_tokens import RoutedTokens
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.shared_inputs import shared_inputs
from distprune.calibration.sums import SHIFT, InputSums
from distprune.calibration.targets import Beside, DenseSample, Targets
from distprune.calibration.walk import Walk
from distprune.collectives.base import Communicator, as_told
from distprune.collectives.communicator import Alone
from distprune.models.linear_layers import LinearLayer
from distprune.shards.device import are_finite, own_settings

FindOwners = Callable[[tuple[tuple[int, int], ...], int], Sequence[OwnerRank]]  # as find_owners

EXPERT_MEMORY = 4 << 30  # bytes of the sums of routed layers that an owner has at a time


class StageDone(Exception):
    """Ends a run of a block when all has been heard that is listened for."""


@dataclass
class InputStatistics:
    """The sums of this rank for the linear layers ``linears`` of one block.

    Use: within :meth:`listening`, :meth:`begin_sample` before every run of the block; then :meth:`reduce`.
    Nothing is communicated while listening, except by a sample group of several ranks for ``"pairs"``: one round for
    each sample and each input that comes in parts, of the input's bytes, counted in the traffic of ``comm``.

    With the ``targets`` of the same samples, the sums towards them are taken, too. A run ends with
    :class:`StageDone` once each module of the layers that are ``awaited`` has been given its input.
    """

    linears: Mapping[str, LinearLayer]
    of: MomentsOf
    sample_group: SampleGroup = field(default_factory=SampleGroup)
    comm: Communicator = field(default_factory=Alone)
    targets: Targets | None = None
    awaited: Collection[str] = ()
    sums: bool = False  # of "pairs": those of features, of their sizes, and about the mean, too
    offload: bool = False  # tokens of routed layers are kept on the CPU
    _awaited: set[str] = field(default_factory=set)  # in this sample
    _dense: DenseSample | None = None  # of this sample
    _inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # of this sample, of layers that add to them
    # By the first layer of those that share an input. Of routed layers there are tokens, and whether these are finite.
    _sums: dict[str, InputSums] = field(default_factory=dict)
    _tokens: dict[str, list[RoutedTokens]] = field(default_factory=dict)
    _finite: dict[str, torch.Tensor] = field(default_factory=dict)
    _num_tokens: Counter[str] = field(default_factory=Counter)  # by the first layer, too
    _first_of: dict[str, str] = field(default_factory=dict)  # layer -> the first of those that share its input
    _num_calls: Counter[str] = field(default_factory=Counter)
    _counts: bool = False
    _num_begun: int = 0  # samples
    _error: Exception | None = None  # kept until reduce: a rank that stopped here would leave the others waiting

    def begin_sample(self, *, counts: bool = True) -> None:
        """Say that a run follows; without ``counts`` of a padding sample: run, not counted."""
        self._counts, self._inputs = counts, {}
        self._dense = self.targets.samples[self._num_begun] if self.targets is not None and counts else None
        self._awaited = {*first_layers({name: self.linears[name] for name in self.awaited})}
        if self.targets is not None:
            self._awaited |= {f"{SHIFT}{name}" for name in self.awaited if name in self.targets.order.adding}
        self._num_begun += 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take in what the layers are given while this lasts.

        What the body raises is kept, for :meth:`reduce` to raise on all ranks.
        """
        try:
            targets = self.targets
            with listening(self.linears, self) if targets is None else targets.listening(self.linears, self):
                yield
        except BaseException as error:
            self._error = self._error or as_told(error)
        finally:
            self._inputs.clear()

    def run(self, walk: Walk, index: int) -> None:
        """Take in what the layers are given while block ``index`` of ``walk`` runs on all samples, as far as awaited.

        Every rank must call it: what the block communicates. What it raises is kept, for :meth:`reduce`.
        """
        with self.listening(), walk.block(index) as run:
            for batch in range(walk.num_batches):
                self.begin_sample(counts=bool(walk.windows[batch]))
                with suppress(StageDone):
                    run(batch)

    @own_settings()
    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:
        """Count the input ``x`` (..., in) of layer ``name``, once for all layers that share it; ``first`` is one."""
        if not self._counts:
            return
        num_in = self.linears[name].num_in
        try:
            self.sample_group.check_cut(x, num_in, f"{name!r} is given")
        except NotImplementedError as error:
            self._error = error
            return
        own = self.sample_group.own_features(x, num_in)
        self._num_calls[name] += 1
        if self._first_of.setdefault(name, first) != first:
            self._error = NotImplementedError(
                f"{name!r} has the input of {self._first_of[name]!r} in one sample and that of {first!r} in another"
            )
            return
        if self._dense is not None and name in self._dense.totals:
            self._inputs[name] = own
        if first != name:
            return
        self._num_tokens[name] += len(own)
        if self.of == "features":
            self._sums_of(name).take(own, own)
            return
        whole = self.sample_group.all_features(self.comm, x, num_in)
        is_shifted = self._dense is not None and self.targets is not None and name in self.targets.order.shifted
        beside = self._dense.beside(name, own, tokens) if is_shifted and self._dense is not None else None
        if name in self._routed:
            self._keep(name, whole, beside)
        else:
            self._sums_of(name).take(whole, own, None if beside is None else beside.shift(own))

    def _sums_of(self, first: str) -> InputSums:
        start, _ = self.sample_group.features(self.linears[first].num_in)
        return self._sums.setdefault(first, InputSums(self.of, start, self.sums))

    def _keep(self, name: str, x: torch.Tensor, beside: Beside | None) -> None:
        finite = are_finite(x)
        self._finite[name] = self._finite[name] & finite if name in self._finite else finite
        kept = x.to("cpu" if self.offload else x.device, copy=True)
        self._tokens.setdefault(name, []).append(RoutedTokens(kept, beside))

    @own_settings()
    def added(self, name: str, total: torch.Tensor) -> None:
        """Count the hidden states ``total`` that the output of layer ``name`` was added to."""
        if self._dense is not None and name in self._inputs:
            x, change = self._inputs.pop(name), self._dense.residual(name, total)
            self._sums_of(self._first_of[name]).add(name, x.float().t() @ change)
        self.passed(f"{SHIFT}{name}")

    def passed(self, name: str) -> None:
        """End the run if ``name`` was the last that is awaited."""
        if name in self._awaited:
            self._awaited.remove(name)
            if not self._awaited:
                raise StageDone

    @cached_property
    def _routed(self) -> dict[str, LinearLayer]:
        """The layers whose tokens are kept, the same on every rank."""
        order = None if self.targets is None else self.targets.order
        routed = {name: linear for name, linear in self.linears.items() if linear.is_routed}
        goes_by_sums = self.of == "features" or self.sample_group.size > 1
        return {} if goes_by_sums or (order is not None and not order.adding.isdisjoint(routed)) else routed

    def reduce(
        self,
        comm: Communicator,
        find_owners: FindOwners = find_owners,
        expert_memory: int = EXPERT_MEMORY,
    ) -> Iterator[list[Moments]]:
        """Yield the moments over all ranks of ``comm``, of each input once; every layer is in one of them.

        First those that are summed where they are; then those of routed layers, as many at a time as ``expert_memory``
        bytes of sums are on an owner. Those of ``"pairs"`` are for their owner alone, unless what that is for is spread
        over all ranks; ``find_owners`` says which, the same on every rank, of all but routed layers: these go to a rank
        that holds their rows.

        Every rank must call it, to its end. Rounds: 2 to agree on which layers share (24 bytes a layer), 1 of 16 bytes
        a routed layer, and those of :class:`Reduction`.

        Raises:
            ValueError: on every rank: a layer was given NaN or Inf; it names the layer.
            NotImplementedError: on every rank: layers share an input on one rank and not on another.
        """
        inputs = self._merge(comm)
        routed = [of for of in inputs if of.names[0] in self._routed]
        others = [of for of in inputs if of.names[0] not in self._routed]
        order = None if self.targets is None else self.targets.order
        about = comm, inputs, self.linears, self.of, self.sample_group, self.sums, order, self.offload
        reduction = Reduction(*about, self._sums, self._tokens, self._finite)
        if others or not routed:
            shapes = tuple((of.num_in, of.num_out) for of in others)
            owners = [EVERYWHERE] * len(others) if self.of == "features" else find_owners(shapes, comm.size)
            yield reduction.in_place(dict(zip(others, owners, strict=True)))
        if routed:
            holders = find_holders(comm, {of.names[0]: self.linears[of.names[0]] for of in routed})
            owners = find_routed_owners(routed, holders, comm.size)
            yield from reduction.waves(dict(zip(routed, owners, strict=True)), expert_memory)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        for name, first in self._first_of.items():
            if self._num_calls[name] != self._num_calls[first]:
                raise NotImplementedError(f"{name!r} has the input of {first!r} in some calls and not in others")

    def _merge(self, comm: Communicator) -> list[SharedInput]:
        """Return the inputs over all ranks, some of which may have seen no token: see :func:`shared_inputs`."""

        def heard() -> tuple[Mapping[str, str], Mapping[str, int]]:
            self._check()
            # All of a sample group saw the same tokens: its first rank counts them.
            return self._first_of, self._num_tokens if self.sample_group.rank == 0 else {}

        inputs = shared_inputs(comm, list(self.linears), heard)
        # From here on an input goes by the first of its layers in their own order, whichever is called first.
        names = {name: of[0] for of in inputs for name in of}
        self._sums = {names[first]: sums for first, sums in self._sums.items()}
        self._tokens = {names[first]: tokens for first, tokens in self._tokens.items()}
        self._finite = {names[first]: finite for first, finite in self._finite.items()}
        return [
            SharedInput(of, self.linears[of[0]].num_in, sum(self.linears[name].num_out for name in of), num_tokens)
            for of, num_tokens in inputs.items()
        ]
