"""What the linear layers of one block are given, summed over samples and ranks.

Layers that are given the very same tensor (q, k and v; gate and up) share its moments. Each sample, a batch of windows,
is one product X^T X in float32, which is added in float64. Sums of all ranks go to the rank that factors them.

Ranks that run the same samples (see :mod:`distprune.calibration.sample_group`) take a part each: of ``in`` features,
the sums of theirs, and of X^T X their rows. That is also how tensor parallelism cuts the inputs of a row-wise
layer, whose sums of squares so need no communication; its X^T X needs all of X beside it. Where every rank runs its
own, the tokens of routed layers are kept and go to their owner: see :mod:`distprune.calibration.shared_inputs`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch

from distprune.calibration.listening import first_layers, listening
from distprune.calibration.moments import Moments, Needs, adds_in_float32, column_norms
from distprune.calibration.shared_inputs import SharedInput, send_tokens, shared_inputs
from distprune.calibration.targets import Targets
from distprune.calibration.walk import Walk
from distprune.collectives.base import Communicator, as_told, cannot_meet, out_of_step
from distprune.collectives.guarded import guarding
from distprune.models.linear_layers import LinearLayer
from distprune.shards.device import are_finite, batches, fetched, own_settings, row_chunks

EXPERT_MEMORY = 4 << 30  # bytes of the sums of routed layers that an owner has at a time
_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
_FEATURES, _PRODUCTS, _DENSE = "1^T X", "X^T X", "X_dense^T X"  # beside the names of layers


class StageDone(Exception):
    """Ends a run of a block when all has been heard that is listened for."""


@dataclass
class InputStatistics:
    """The sums of this rank for the linear layers ``linears`` of one block of ``walk``.

    Use: :meth:`run`, then :meth:`reduce`. Nothing is communicated in a run but by the block itself, and by a sample
    group of several ranks for ``"products"``: one round for each sample and each input that comes in parts, of the
    input's bytes, counted in the traffic of ``comm``.

    With the ``targets`` of the same samples, the sums towards them are taken, too. If it ``stops``, a run of a sample
    ends once each module of the layers has been given its input: each must run once.
    """

    comm: Communicator
    walk: Walk
    linears: Mapping[str, LinearLayer]
    needs: Needs
    targets: Targets | None = None
    stops: bool = False
    # Of this sample:
    _counts: bool = True  # it is not padding
    _inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # of layers that add to hidden states
    _num_awaited: int = 0
    # By the first layer of those that share an input: by what is summed, float64, (this rank's features, ...). Of x,
    # |x| and x^2, (features, 3); rows of X^T X and X_dense^T X, (features, in); by the name of a layer
    # x^T (total_dense - total), (features, out). Of routed layers tokens are kept, (tokens, in), and beside them
    # what the layer is given in the dense stream, if that is asked for.
    _sums: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    _tokens: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    # By layer:
    _num_tokens: Counter[str] = field(default_factory=Counter)
    _first_of: dict[str, str] = field(default_factory=dict)  # the first of those that share its input
    _error: Exception | None = None  # kept until reduce: a rank that stopped here would leave the others waiting

    def run(self, index: int) -> None:
        """Take in what the layers are given while block ``index`` runs on all samples.

        Every rank must call it: what the block communicates. What it raises is kept, for :meth:`reduce`, but for what
        the other ranks cannot be told: that is raised at once, or the error before it, of which it may come.
        """
        walk, targets = self.walk, self.targets
        adding = {} if targets is None else targets.adding
        num_awaited = len(first_layers(self.linears)) + len(adding.keys() & self.linears.keys())
        try:
            with listening(walk, self.linears, self, adding), walk.block(index) as run:
                for batch in range(walk.num_batches):
                    self._counts = bool(walk.batches[batch].windows)
                    self._num_awaited = num_awaited
                    self._inputs.clear()
                    with suppress(StageDone):
                        run(batch)
        except BaseException as caught:
            error = as_told(caught)
            if cannot_meet(error):
                with out_of_step():
                    raise self._error or error from caught
            self._error = self._error or error
        finally:
            self._inputs.clear()

    @own_settings()
    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:
        """Count the input ``x`` (..., in) of layer ``name``, once for all layers that share it; ``first`` is one."""
        if not self._counts:
            return
        group, num_in = self.walk.sample_group, self.linears[name].num_in
        try:
            group.check_cut(x, num_in, f"{name!r} is given")
        except NotImplementedError as error:  # this run goes on, whose layers may communicate
            self._error = error
            return
        own = group.own_features(x, num_in)
        self._num_tokens[name] += len(own)
        if self._first_of.setdefault(name, first) != first:
            raise NotImplementedError(
                f"{name!r} has the input of {self._first_of[name]!r} in one sample and that of {first!r} in another"
            )
        if self.targets is not None and name in self.targets.totals[self.walk.running]:
            self._inputs[name] = own
        if first != name:
            return
        whole = group.all_features(self.comm, x, num_in) if self.needs == "products" else None
        shifted = None if self.targets is None or name not in self.targets.order.shifted else self.targets
        dense = None if shifted is None else shifted.beside(name, own, tokens)
        if name in self._routed:
            kept = own if dense is None else torch.cat([own, dense], dim=1)
            self._tokens.setdefault(name, []).append(self.walk.kept(kept))
        else:
            self._take(name, own, whole, dense)

    @own_settings()
    def added(self, name: str, total: torch.Tensor) -> None:
        """Count the hidden states ``total`` that the output of layer ``name`` was added to."""
        if self.targets is not None and name in self._inputs:
            change = self.targets.residual(name, total)
            self._add(self._first_of[name], name, product(self._inputs.pop(name), change))
        if name in self.linears:
            self.passed(name)

    def passed(self, name: str) -> None:  # noqa: ARG002
        """End the run if nothing else is awaited."""
        self._num_awaited -= 1
        if self.stops and not self._num_awaited:
            raise StageDone

    def _take(
        self, first: str, own: torch.Tensor, whole: torch.Tensor | None, dense: torch.Tensor | None = None
    ) -> None:
        """Add tokens: ``own`` (tokens, features) of the ``whole`` (tokens, in), ``dense`` as ``own``."""
        if adds_in_float32(own):
            total = own.sum(dim=0, dtype=torch.float32).double()
            columns = [total, column_norms(own, 1), column_norms(own, 2).square()]
            self._add(first, _FEATURES, torch.stack(columns, dim=1))
        else:
            for (part,) in row_chunks(own):
                wide = part.to(torch.float64, copy=True)  # in place: a fifth of the time on a CPU
                columns = [wide.sum(dim=0), wide.abs_().sum(dim=0), wide.square_().sum(dim=0)]
                self._add(first, _FEATURES, torch.stack(columns, dim=1))
        if whole is not None:
            self._add(first, _PRODUCTS, product(own, whole))
        if whole is not None and dense is not None:
            self._add(first, _DENSE, product(dense, whole))

    def _add(self, first: str, key: str, addend: torch.Tensor) -> None:
        sums = self._sums.setdefault(first, {})
        if key in sums:
            sums[key] += addend
        else:
            sums[key] = addend.double()

    def _is_shifted(self, name: str) -> bool:
        return self.targets is not None and name in self.targets.order.shifted

    @cached_property
    def _routed(self) -> frozenset[str]:
        """The layers whose tokens are kept, the same on every rank."""
        routed = frozenset(name for name, linear in self.linears.items() if linear.is_routed)
        adding = frozenset[str]() if self.targets is None else self.targets.order.adding
        goes_by_sums = self.needs == "squares" or self.walk.sample_group.size > 1 or adding & routed
        return frozenset() if goes_by_sums else routed

    def reduce(self, expert_memory: int = EXPERT_MEMORY) -> Iterator[list[Moments]]:
        """Yield the moments over all ranks, of each input once; every layer is in one of them.

        First those that are summed where they are; then those of routed layers, as many at a time as ``expert_memory``
        bytes of sums are on an owner.

        Every rank must call it, to its end. Rounds: 1 to agree on which layers share (24 bytes a layer, 16 more a
        routed one); each time 1 for the sums of features, with ``"products"`` 1 for each sum, and of routed
        layers those of ``send_tokens``; 64 bytes before each.

        Raises:
            ValueError: on every rank: a layer was given NaN or Inf; it names the layer.
            NotImplementedError: on every rank: layers share an input on one rank and not on another.
        """
        inputs = shared_inputs(self.comm, self.linears, self._routed, self._heard)
        # From here on an input goes by the first of its layers in their own order, whichever is called first.
        names = {name: shared.names[0] for shared in inputs for name in shared.names}
        self._sums = {names[first]: sums for first, sums in self._sums.items()}
        self._tokens = {names[first]: tokens for first, tokens in self._tokens.items()}
        at_once = [shared for shared in inputs if shared.names[0] not in self._routed]
        by_tokens = inputs[len(at_once) :]
        if at_once or not by_tokens:
            yield self._moments(at_once) if at_once else []
        for wave in self._waves(by_tokens, expert_memory):
            yield self._moments(wave, by_tokens=True)

    def _heard(self) -> tuple[Mapping[str, str], Mapping[str, int]]:
        """Return of each layer the first that has its input, and the tokens that this rank is to count."""
        if self._error is not None:
            raise self._error
        for name, first in self._first_of.items():
            if self._num_tokens[name] != self._num_tokens[first]:
                raise NotImplementedError(f"{name!r} has the input of {first!r} in some calls and not in others")
        # All of a sample group saw the same tokens: its first rank counts them.
        return self._first_of, self._num_tokens if self.walk.sample_group.rank == 0 else {}

    def _waves(self, inputs: Sequence[SharedInput], room: int) -> Iterator[list[SharedInput]]:
        """Yield routed inputs, as many at a time as an owner has ``room`` for the sums of, in bytes. Or one."""
        waves = []  # by owner
        for owner in sorted({shared.owner for shared in inputs}):
            mine = [shared for shared in inputs if shared.owner == owner]
            sizes = [8 * shared.num_in**2 * (1 + self._is_shifted(shared.names[0])) for shared in mine]
            waves.append([*batches(zip(mine, sizes, strict=True), room)])
        for wave in itertools.zip_longest(*waves, fillvalue=()):
            yield [shared for some in wave for shared in some]

    @own_settings()
    def _moments(self, inputs: Sequence[SharedInput], *, by_tokens: bool = False) -> list[Moments]:
        """Return the moments of ``inputs`` over all ranks; ``by_tokens``: their owners are sent those."""
        moments: list[Moments] = []
        with guarding(self.comm) as ranks:
            if by_tokens:
                self._take_tokens(ranks, inputs)
            sums = [self._sums.pop(shared.names[0], {}) for shared in inputs]
            features = [self._whole(own, _FEATURES, shared, 3) for own, shared in zip(sums, inputs, strict=True)]
            ranks.reduce_(joined := torch.cat(features))
            of_inputs = torch.split(joined, [shared.num_in for shared in inputs])
            for shared, own, of_features in zip(inputs, sums, of_inputs, strict=True):
                parts: dict[str, torch.Tensor] = {}
                is_owner = shared.owner == ranks.rank
                for key, width in self._widths(shared).items() if is_owner or not by_tokens else ():
                    parts[key] = self._whole(own, key, shared, width)
                    if not by_tokens:
                        ranks.reduce_(parts[key], "sum", shared.owner)
                moments.append(self._moments_of(shared, of_features, parts if is_owner else {}))
            _check_finite(moments)
        return moments

    def _take_tokens(self, comm: Communicator, inputs: Sequence[SharedInput]) -> None:
        """Sum up, of the routed ``inputs`` that this rank owns, the tokens of all ranks."""
        device = self.linears[inputs[0].names[0]].parameter.device
        widths = [shared.num_in * (1 + self._is_shifted(shared.names[0])) for shared in inputs]
        kept = [self._tokens.pop(shared.names[0], []) for shared in inputs]
        arrived = send_tokens(comm, inputs, kept, widths, torch.device("cpu") if self.walk.offload else device)
        for shared, parts in zip(inputs, arrived, strict=True):
            for part in parts:
                x, *dense = torch.split(part.to(device), shared.num_in, dim=1)
                self._take(shared.names[0], x, x, *dense)
            parts.clear()

    def _widths(self, shared: SharedInput) -> dict[str, int]:
        """Return how wide each sum is that leads to X^T X or targets."""
        if self.needs == "squares":
            return {}
        keys = [_PRODUCTS, _DENSE] if self._is_shifted(shared.names[0]) else [_PRODUCTS]
        adding = [] if self.targets is None else [name for name in shared.names if name in self.targets.order.adding]
        return dict.fromkeys(keys, shared.num_in) | {name: self.linears[name].num_out for name in adding}

    def _whole(self, sums: dict[str, torch.Tensor], key: str, shared: SharedInput, width: int) -> torch.Tensor:
        """Return a sum of this rank's, (in, ``width``), zero where it takes no features or has no tokens."""
        own, num_in = sums.pop(key, None), shared.num_in
        if own is not None and len(own) == num_in:
            return own
        device = self.linears[shared.names[0]].parameter.device
        whole = torch.zeros((num_in, width), dtype=torch.float64, device=device)
        if own is not None:
            whole[slice(*self.walk.sample_group.features(num_in))] = own
        return whole

    def _moments_of(self, shared: SharedInput, features: torch.Tensor, parts: dict[str, torch.Tensor]) -> Moments:
        """Return the moments of an input, of sums over all ranks; without tokens as if X^T X were 1."""
        sums, sizes, squares = features.unbind(1)
        products, dense, num = parts.pop(_PRODUCTS, None), parts.pop(_DENSE, None), shared.num_tokens
        shift = None if dense is None or products is None else dense.sub_(products)
        if not num:
            squares = torch.ones_like(squares)
            products = None if products is None else torch.diag(squares)
        known = sums / max(num, 1), sizes / max(num, 1), shared.owner, shared.is_alone, self.needs == "products"
        return Moments(shared.names, num, squares, *known, products, shift, parts)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x^T y of (tokens, n) and (tokens, m), float32, in which products of 16-bit numbers are exact. Local."""
    if x.is_cuda and len(x) and _HAS_OUT_DTYPE:
        if x.dtype == y.dtype and x.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(x.t(), y, out_dtype=torch.float32)
        if (x.dtype, y.dtype) == (torch.bfloat16, torch.float32):  # a difference of two such: as two, to 16 bits
            high = y.bfloat16()
            return product(x, high).add_(product(x, (y - high).bfloat16()))
    return x.float().t() @ y.float()


def _check_finite(moments: Sequence[Moments]) -> None:
    """Raise a ValueError where something is NaN or infinite: one wait for a device."""
    flags = []
    for m in moments:
        towards = [*m.residuals.values(), *([] if m.shift is None else [m.shift])]
        own = m.squares if m.products is None else m.products
        flags.append(torch.stack([are_finite(values) for values in (own, *towards)]))
    told = {m.names[0]: flag.tolist() for m, flag in zip(moments, fetched(flags), strict=True)}
    spoiled = [name for name, (is_finite, *_) in told.items() if not is_finite]
    in_dense = [name for name, is_finite in told.items() if not all(is_finite)]
    if names := spoiled or in_dense:
        where = "" if spoiled else " in the dense stream"
        raise ValueError(f"NaN or Inf in the inputs of {', '.join(map(repr, names[:5]))}{where}")
