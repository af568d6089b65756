"""What the linear layers of one block are given, summed over samples and ranks.

Layers that are given the very same tensor (q, k and v; gate and up) share its moments. Each sample, a batch of windows,
is one product X^T X in float32, which is added in float64. Sums of all ranks go to the rank that factors them.

Ranks that run the same samples (see :mod:`distprune.calibration.sample_group`) take a part each: of ``in`` features,
the sums of theirs, and of X^T X their rows. That is also how tensor parallelism cuts the inputs of a row-wise
layer, whose sums of squares so need no communication; its X^T X needs all of X beside it. Where every rank runs its
own, the tokens of routed layers are kept and go to their owner: see :mod:`distprune.calibration.routed_tokens`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from distprune.calibration.listening import first_layers, listening
from distprune.calibration.moments import Moments, Needs
from distprune.calibration.owner_ranks import SharedInput, find_holders, share_out
from distprune.calibration.routed_tokens import send_tokens
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.shared_inputs import shared_inputs
from distprune.calibration.sums import DENSE, FEATURES, PRODUCTS, InputSums, product
from distprune.calibration.targets import DenseSample, Targets
from distprune.calibration.walk import Walk
from distprune.collectives.base import Communicator, as_told
from distprune.collectives.communicator import Alone
from distprune.collectives.guarded import guarding
from distprune.models.linear_layers import LinearLayer
from distprune.shards.device import are_finite, batches, fetched, own_settings

EXPERT_MEMORY = 4 << 30  # bytes of the sums of routed layers that an owner has at a time
_SHIFT = "+"  # before the name of a layer that adds to hidden states: when it has

Owners = dict[SharedInput, int]


class StageDone(Exception):
    """Ends a run of a block when all has been heard that is listened for."""


@dataclass
class InputStatistics:
    """The sums of this rank for the linear layers ``linears`` of one block.

    Use: within :meth:`listening`, :meth:`begin_sample` before every run of the block; then :meth:`reduce`.
    Nothing is communicated while listening, except by a sample group of several ranks for ``"products"``: one round for
    each sample and each input that comes in parts, of the input's bytes, counted in the traffic of ``comm``.

    With the ``targets`` of the same samples, the sums towards them are taken, too. A run ends with
    :class:`StageDone` once each module of the layers that are ``awaited`` has been given its input.
    """

    linears: Mapping[str, LinearLayer]
    needs: Needs
    sample_group: SampleGroup = field(default_factory=SampleGroup)
    comm: Communicator = field(default_factory=Alone)
    targets: Targets | None = None
    awaited: Collection[str] = ()
    offload: bool = False  # tokens of routed layers are kept on the CPU
    _awaited: set[str] = field(default_factory=set)  # in this sample
    _dense: DenseSample | None = None  # of this sample
    _inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # of this sample, of layers that add to them
    # By the first layer of those that share an input. Of routed layers tokens are kept, (tokens, in), and beside them
    # what the layer is given in the dense stream, if that is asked for.
    _sums: dict[str, InputSums] = field(default_factory=dict)
    _tokens: dict[str, list[torch.Tensor]] = field(default_factory=dict)
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
            self._awaited |= {f"{_SHIFT}{name}" for name in self.awaited if name in self.targets.order.adding}
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
        sums = self._sums.setdefault(first, InputSums())
        if self.needs == "squares":
            sums.take(own)
            return
        whole = self.sample_group.all_features(self.comm, x, num_in)
        dense = None
        if self._dense is not None and self._is_shifted(name):  # itself, where it is not known
            beside = self._dense.beside(name, own, tokens)
            dense = own if beside is None else beside
        if name in self._routed:
            kept = whole if dense is None else torch.cat([whole, dense], dim=1)
            self._tokens.setdefault(name, []).append(kept.to("cpu" if self.offload else kept.device, copy=True))
        else:
            sums.take(own, whole, dense)

    def _is_shifted(self, name: str) -> bool:
        return self.targets is not None and name in self.targets.order.shifted

    @own_settings()
    def added(self, name: str, total: torch.Tensor) -> None:
        """Count the hidden states ``total`` that the output of layer ``name`` was added to."""
        if self._dense is not None and name in self._inputs:
            x, change = self._inputs.pop(name), self._dense.residual(name, total)
            self._sums[self._first_of[name]].add(name, product(x, change))
        self.passed(f"{_SHIFT}{name}")

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
        goes_by_sums = self.needs == "squares" or self.sample_group.size > 1
        return {} if goes_by_sums or (order is not None and not order.adding.isdisjoint(routed)) else routed

    def reduce(self, comm: Communicator, expert_memory: int = EXPERT_MEMORY) -> Iterator[list[Moments]]:
        """Yield the moments over all ranks of ``comm``, of each input once; every layer is in one of them.

        First those that are summed where they are; then those of routed layers, as many at a time as ``expert_memory``
        bytes of sums are on an owner. Owners take turns, by size; those of routed layers hold these.

        Every rank must call it, to its end. Rounds: 2 to agree on which layers share (24 bytes a layer), 1 of 16 bytes
        a routed layer; each time 1 for the sums of features and 2 more, with ``"products"`` 1 for each sum, and of
        routed layers those of ``send_tokens``; 64 bytes before each.

        Raises:
            ValueError: on every rank: a layer was given NaN or Inf; it names the layer.
            NotImplementedError: on every rank: layers share an input on one rank and not on another.
        """
        inputs = self._merge(comm)
        routed = [shared for shared in inputs if shared.names[0] in self._routed]
        others = [shared for shared in inputs if shared.names[0] not in self._routed]
        if others or not routed:
            owners = share_out([shared.num_in**3 for shared in others], comm.size)
            yield self._moments(comm, dict(zip(others, owners, strict=True))) if others else []
        if routed:
            holders = find_holders(comm, {shared.names[0]: self.linears[shared.names[0]] for shared in routed})
            sizes = [shared.num_in**2 * (shared.num_tokens + shared.num_in) for shared in routed]
            owned = dict(zip(routed, share_out(sizes, comm.size, holders), strict=True))
            for wave in self._waves(owned, expert_memory):
                yield self._moments(comm, wave, are_routed=True)

    def _waves(self, owners: Owners, room: int) -> Iterator[Owners]:
        """Yield routed inputs, as many at a time as an owner has ``room`` for the sums of, in bytes. Or one."""
        waves: list[list[list[SharedInput]]] = []  # by owner
        for rank in sorted(set(owners.values())):
            inputs = [shared for shared, owner in owners.items() if owner == rank]
            sizes = [8 * shared.num_in**2 * (1 + self._is_shifted(shared.names[0])) for shared in inputs]
            waves.append([[inputs[i] for i in some] for some in batches(range(len(inputs)), sizes, room)])
        for wave in itertools.zip_longest(*waves, fillvalue=()):
            yield {shared: owners[shared] for some in wave for shared in some}

    @own_settings()
    def _moments(self, comm: Communicator, owners: Owners, *, are_routed: bool = False) -> list[Moments]:
        """Return the moments of inputs, which are summed over ranks; of ``are_routed`` their owners have all tokens."""
        found: list[Moments] = []
        with guarding(comm) as ranks:
            if are_routed:
                self._take_tokens(ranks, owners)
            sums = {shared: self._sums.pop(shared.names[0], InputSums()) for shared in owners}
            features = torch.cat([self._part(sums[shared], FEATURES, shared, 3) for shared in owners])
            ranks.reduce_(features)
            of_inputs = torch.split(features, [shared.num_in for shared in owners])
            for (shared, owner), of_features in zip(owners.items(), of_inputs, strict=True):
                parts = {}
                for key, width in self._widths(shared).items() if self.needs == "products" else ():
                    if not are_routed or owner == comm.rank:
                        parts[key] = self._part(sums[shared], key, shared, width)
                    if not are_routed:
                        ranks.reduce_(parts[key], "sum", owner)
                found.append(self._moments_of(shared, owner, of_features, parts if owner == comm.rank else {}))
            _check_finite(found)
        return found

    def _moments_of(
        self, shared: SharedInput, owner: int, features: torch.Tensor, parts: dict[str, torch.Tensor]
    ) -> Moments:
        """Return the moments of an input, of sums over all ranks; without tokens as if X^T X were 1."""
        sums, sizes, squares = features.unbind(1)
        products, dense, num = parts.pop(PRODUCTS, None), parts.pop(DENSE, None), shared.num_tokens
        shift = None if dense is None or products is None else dense.sub_(products)
        if not num:
            squares = torch.ones_like(squares)
            products = None if products is None else torch.diag(squares)
        means, has_products = (sums / max(num, 1), sizes / max(num, 1)), self.needs == "products"
        return Moments(shared.names, num, squares, *means, owner, has_products, products, shift, parts)

    def _take_tokens(self, comm: Communicator, owners: Owners) -> None:
        """Sum up, of the routed inputs that this rank owns, the tokens of all ranks."""
        inputs = list(owners)
        device = self.linears[inputs[0].names[0]].parameter.device
        widths = [shared.num_in * (1 + self._is_shifted(shared.names[0])) for shared in inputs]
        kept = [self._tokens.pop(shared.names[0], []) for shared in inputs]
        where = torch.device("cpu") if self.offload else device
        arrived = send_tokens(comm, list(owners.values()), kept, widths, where)
        for i, tokens in arrived.items():
            sums = self._sums[inputs[i].names[0]] = InputSums()
            for some in tokens:
                x, *dense = torch.split(some.to(device), inputs[i].num_in, dim=1)
                sums.take(x, x, *dense)
            tokens.clear()

    def _widths(self, shared: SharedInput) -> dict[str, int]:
        """Return how wide each sum is that leads to X^T X or targets."""
        widths = {PRODUCTS: shared.num_in}
        if self._is_shifted(shared.names[0]):
            widths[DENSE] = shared.num_in
        adding = [] if self.targets is None else [name for name in shared.names if name in self.targets.order.adding]
        return widths | {name: self.linears[name].num_out for name in adding}

    def _part(self, sums: InputSums, key: str, shared: SharedInput, width: int) -> torch.Tensor:
        """Return a sum of this rank's, (in, ``width``), zero where it takes no features or has no tokens."""
        own, num_in = sums.parts.pop(key, None), shared.num_in
        if own is None:
            device = self.linears[shared.names[0]].parameter.device
            return torch.zeros((num_in, width), dtype=torch.float64, device=device)
        if len(own) == num_in:
            return own.contiguous()
        start, stop = self.sample_group.features(num_in)
        return nn.functional.pad(own, (0, 0, start, num_in - stop))

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
        names = {name: layers[0] for layers in inputs for name in layers}
        self._sums = {names[first]: sums for first, sums in self._sums.items()}
        self._tokens = {names[first]: tokens for first, tokens in self._tokens.items()}
        return [SharedInput(layers, self.linears[layers[0]].num_in, num) for layers, num in inputs.items()]


def _check_finite(found: list[Moments]) -> None:
    """Raise a ValueError where something is NaN or infinite: one wait for a device."""
    flags = {}
    for m in found:
        towards = [*m.residuals.values(), *([] if m.shift is None else [m.shift])]
        own = are_finite(m.squares if m.products is None else m.products)
        flags[m.names[0]] = torch.stack([own, *map(are_finite, towards)])
    told = {name: flag.tolist() for name, flag in zip(flags, fetched([*flags.values()]), strict=True)}
    spoiled = [name for name, (is_finite, *_) in told.items() if not is_finite]
    in_dense = [name for name, is_finite in told.items() if not all(is_finite)]
    if names := spoiled or in_dense:
        where = "" if spoiled else " in the dense stream"
        raise ValueError(f"NaN or Inf in the inputs of {', '.join(map(repr, names[:5]))}{where}")
