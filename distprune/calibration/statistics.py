"""What the linear layers of one block are given, summed over samples and ranks.

Nouns: the *moments* of an input X (tokens, in) are the sum of squares of each feature, the diagonal of
X^T X, or all of X^T X. Layers that are given the very same tensor (q, k and v; gate and up) share theirs.
With the diagonal alone goes a *sketch*: X^T G, of random signs G (tokens, 32), from which ||X d||^2 of any d
is estimated as ||G^T X d||^2 / 32 (Alon, Matias, Szegedy 1996; Achlioptas 2003), so that methods which have no use
for X^T X can tell what they have done to outputs.

Ranks that run the same samples (see :mod:`distprune.calibration.sample_group`) take a part each: of ``in`` features,
the sums of theirs, and of X^T X their rows. That is also how tensor parallelism cuts the inputs of a row-wise
layer, whose sums of squares so need no communication; its X^T X needs all of X beside it. (A matrix product of
fewer rows may round otherwise: X^T X of such ranks is that of one but for the last bit.)

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

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from distprune.calibration.listening import first_layers, listening
from distprune.calibration.moments import EVERYWHERE, Moments, MomentsOf
from distprune.calibration.owner_ranks import OwnerRank, SharedInput, find_owners
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.shared_inputs import shared_inputs
from distprune.calibration.sums import add_products, feature_sums, in_float32, square_sums
from distprune.calibration.targets import DenseSample, Targets
from distprune.calibration.triangle import pack_triangle, triangle_shape, unpack_triangle
from distprune.collectives import Alone, Communicator, max_together, sum_at_owners, sum_together
from distprune.models import LinearLayer
from distprune.shards import all_finite, own_settings

FindOwners = Callable[[tuple[tuple[int, int], ...], int], Sequence[OwnerRank]]  # as find_owners

_PRODUCTS, _SHIFT, _SUMS = "X^T X", "+", "1^T X"  # beside the names of layers
_NUM_PROJECTIONS = 32  # the standard error of ||X W^T||^2 is a quarter of it at most
_ARRIVING = 1 << 23  # float64 numbers at one rank in a round: 64 MiB


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
    _awaited: set[str] = field(default_factory=set)  # in this sample
    _dense: DenseSample | None = None  # of this sample
    _inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # of this sample, of layers that add to them
    # By the first layer of those that share an input, and by what is summed; float64. Of this rank's features: sums of
    # squares and the sketch, or rows of X^T X, whose lower triangle is not all there, and those towards targets.
    _sums: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    # Where ``sums`` are asked for, products are about each sample's own mean until that of all is known. By the first
    # layer: how many tokens and which mean (in,), float64, each sample has; the sums (in, 4) over all ranks.
    _means: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    _totals: dict[str, torch.Tensor] = field(default_factory=dict)
    _num_tokens: Counter[str] = field(default_factory=Counter)  # by the first layer, too
    _first_of: dict[str, str] = field(default_factory=dict)  # layer -> the first of those that share its input
    _num_calls: Counter[str] = field(default_factory=Counter)
    _counts: bool = False
    _num_begun: int = 0  # samples
    _signs: dict[int, torch.Tensor] = field(default_factory=dict)  # of this sample, by the number of tokens
    _error: Exception | None = None  # kept until reduce: a rank that stopped here would leave the others waiting

    def begin_sample(self, *, counts: bool = True) -> None:
        """Say that a run follows; without ``counts`` of a padding sample: run, not counted."""
        self._counts, self._signs, self._inputs = counts, {}, {}
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
        except Exception as error:
            self._error = self._error or error
        finally:
            self._inputs.clear()

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
            squares, sketch = square_sums(own), own.float().t() @ self._signs_of(own)
            self._add(name, _PRODUCTS, torch.cat([squares[:, None], sketch], dim=1))
            return
        whole = self.sample_group.all_features(self.comm, x, num_in)
        sums = self._sums.setdefault(name, {})
        if _PRODUCTS not in sums:
            sums[_PRODUCTS] = torch.zeros((own.shape[1], num_in), dtype=torch.float64, device=own.device)
        start, stop = self.sample_group.features(num_in)
        x = whole.float()
        if self.sums:
            of_sample = feature_sums(whole)
            mean = of_sample[:, 0] / max(len(whole), 1)
            self._means.setdefault(name, []).append((len(whole), mean))
            self._add(name, _SUMS, in_float32(of_sample[start:stop]))
            x = x - mean.float()
        add_products(sums[_PRODUCTS], x, start)
        if self._dense is not None and self.targets is not None and name in self.targets.order.shifted:
            self._add(name, _SHIFT, self._dense.shift(name, own, tokens).t() @ whole.float())

    @own_settings()
    def added(self, name: str, total: torch.Tensor) -> None:
        """Count the hidden states ``total`` that the output of layer ``name`` was added to."""
        if self._dense is not None and name in self._inputs:
            x, change = self._inputs.pop(name), self._dense.residual(name, total)
            self._add(self._first_of[name], name, x.float().t() @ change)
        self.passed(f"{_SHIFT}{name}")

    def passed(self, name: str) -> None:
        """End the run if ``name`` was the last that is awaited."""
        if name in self._awaited:
            self._awaited.remove(name)
            if not self._awaited:
                raise StageDone

    def _add(self, first: str, key: str, addend: torch.Tensor) -> None:
        sums = self._sums.setdefault(first, {})
        if key not in sums:
            sums[key] = torch.zeros_like(addend, dtype=torch.float64)
        sums[key] += addend

    def _signs_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return random signs (tokens, 32), float32: those of this sample, on whichever rank it runs."""
        if len(x) not in self._signs:
            number = self.sample_group.number + self.sample_group.num_groups * (self._num_begun - 1)
            generator = torch.Generator().manual_seed(number)
            bits = torch.randint(0, 2, (len(x), _NUM_PROJECTIONS), generator=generator, device="cpu")
            self._signs[len(x)] = bits.mul_(2).sub_(1).to(x.device, torch.float32)
        return self._signs[len(x)]

    @own_settings()
    def reduce(self, comm: Communicator, find_owners: FindOwners = find_owners) -> list[Moments]:
        """Return the moments over all ranks of ``comm``, those of each input once; every layer is in one of them.

        Those of ``"pairs"`` are for their owner alone, unless what that is for is spread over all ranks;
        ``find_owners`` says which, the same on every rank.

        Every rank must call it. Rounds: 3 of little, to agree on which layers share and on what was found (32 bytes a
        layer), with ``sums`` 1 of 32 bytes a feature, and 1 for all ``"features"`` (264 bytes a feature), or for
        ``"pairs"`` (4 bytes a pair: one triangle, in float64) 1 for all inputs that are spread and 1 for all others,
        more if over 64 MiB would arrive at a rank at once.

        Raises:
            ValueError: on every rank: a layer was given NaN or Inf; it names the layer.
            NotImplementedError: on every rank: layers share an input on one rank and not on another.
        """
        inputs = self._merge(comm)
        shapes = tuple((of.num_in, of.num_out) for of in inputs)
        owners = [EVERYWHERE] * len(inputs) if self.of == "features" else find_owners(shapes, comm.size)
        if self.sums:
            self._sum_features(comm, inputs)
        totals = self._sum(comm, inputs, owners)
        found: list[Moments] = []

        def check(bad: torch.Tensor) -> None:
            for i, (of, owner) in enumerate(zip(inputs, owners, strict=True)):
                found.append(self._moments(of, owner, totals.pop(of.names[0], None)))
                bad[i] = _spoiled(found[-1])

        bad = max_together(comm, (len(inputs),), check).tolist()
        for stream, where in ((2, ""), (1, " in the dense stream")):  # the same on every rank
            if names := [m.names[0] for m, which in zip(found, bad, strict=True) if which == stream]:
                raise ValueError(f"NaN or Inf in the inputs of {', '.join(map(repr, names[:5]))}{where}")
        return found

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        for name, first in self._first_of.items():
            if self._num_calls[name] != self._num_calls[first]:
                raise NotImplementedError(f"{name!r} has the input of {first!r} in some calls and not in others")

    @own_settings()
    def _moments(self, of: SharedInput, owner: OwnerRank, sums: dict[str, torch.Tensor] | None) -> Moments:
        """Return the moments of an input; without the ``sums`` over all ranks, which are on its owner, empty ones."""
        device = self.linears[of.names[0]].parameter.device
        if sums is None:
            nothing = torch.empty((0, of.num_in), dtype=torch.float32, device=device)
            return Moments(of.names, of.num_tokens, nothing, owner=owner)
        products = sums.pop(_PRODUCTS)
        if self.of == "features":
            values = products.float().to(device)
            return Moments(of.names, of.num_tokens, values[:, 0].contiguous(), values[:, 1:].contiguous())
        values = unpack_triangle(products).to(device)
        towards = {key: part.float().to(device) for key, part in sums.items()}
        shift, about_mean = towards.pop(_SHIFT, None), dict[str, torch.Tensor]()
        if self.sums:
            of_features = self._features_of(of).to(device)
            about_mean["sums"] = torch.cat([of_features, values.diagonal()[:, None].double()], dim=1)
            if any(self.linears[name].bias is not None for name in of.names):
                about_mean["centered"] = values
            scaled = (of_features[:, 0] / max(of.num_tokens, 1) ** 0.5).float()  # n mean^2 is its square
            values = torch.addr(values, scaled, scaled)
        return Moments(of.names, of.num_tokens, values, owner=owner, shift=shift, residuals=towards, **about_mean)

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
        self._means = {names[first]: means for first, means in self._means.items()}
        return [
            SharedInput(of, self.linears[of[0]].num_in, sum(self.linears[name].num_out for name in of), num_tokens)
            for of, num_tokens in inputs.items()
        ]

    def _sum_features(self, comm: Communicator, inputs: Sequence[SharedInput]) -> None:
        """Sum over ranks what there is of each feature of ``inputs``: one round."""
        sizes = [4 * of.num_in for of in inputs]

        def fill(words: torch.Tensor) -> None:
            for of, part in zip(inputs, torch.split(words, sizes), strict=True):
                own = self._sums.get(of.names[0], {}).pop(_SUMS, None)
                if own is not None:
                    part.copy_(self._among_all(own.cpu(), of.num_in).flatten())

        total = sum_together(comm, (sum(sizes),), fill, torch.float64)
        parts = zip(inputs, torch.split(total, sizes), strict=True)
        self._totals = {of.names[0]: part.view(of.num_in, 4) for of, part in parts}

    def _features_of(self, of: SharedInput) -> torch.Tensor:
        """Return the sums of an input's features and of their sizes over all ranks, (in, 2) float64. Local."""
        return self._totals[of.names[0]].view(of.num_in, 2, 2).sum(dim=2)

    def _sum(
        self, comm: Communicator, inputs: Sequence[SharedInput], owners: Sequence[OwnerRank]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the sums over all ranks of the inputs that are spread or owned here, by the first layer."""
        totals: dict[str, dict[str, torch.Tensor]] = {}
        spread = [(0, of) for of, owner in zip(inputs, owners, strict=True) if owner.spread]
        for some in self._rounds(spread, math.inf if self.of == "features" else _ARRIVING):
            packed = sum_together(comm, (self._numel(some[0]),), partial(self._pack, some[0]), torch.float64)
            totals |= self._unpacked(some[0], packed)
        owned = [(owner.rank, of) for of, owner in zip(inputs, owners, strict=True) if not owner.spread]
        for of_owner in self._rounds(owned, _ARRIVING // comm.size):
            sizes = [self._numel(of_owner[rank]) if rank in of_owner else 0 for rank in range(comm.size)]
            packed = sum_at_owners(comm, sizes, partial(self._addend, of_owner))
            totals |= self._unpacked(of_owner.get(comm.rank, ()), packed)
        return totals

    def _shapes(self, of: SharedInput) -> dict[str, Sequence[int]]:
        """Return what is summed over ranks: of ``"pairs"`` X^T X, packed, and what leads towards targets."""
        if self.of == "features":
            return {_PRODUCTS: (of.num_in, 1 + _NUM_PROJECTIONS)}
        shapes: dict[str, Sequence[int]] = {_PRODUCTS: triangle_shape(of.num_in)}
        if self.targets is not None:
            if not self.targets.order.shifted.isdisjoint(of.names):
                shapes[_SHIFT] = (of.num_in, of.num_in)
            adding = [name for name in of.names if name in self.targets.order.adding]
            shapes |= {name: (of.num_in, self.linears[name].num_out) for name in adding}
        return shapes

    def _numel(self, inputs: Sequence[SharedInput]) -> int:
        return sum(math.prod(shape) for of in inputs for shape in self._shapes(of).values())

    def _unpacked(self, inputs: Sequence[SharedInput], packed: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """Return views of what is packed of ``inputs``, by the first layer and by what is summed."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for of in inputs:
            shapes = self._shapes(of)
            *parts, packed = torch.split(packed, [*map(math.prod, shapes.values()), packed.numel() - self._numel([of])])
            found[of.names[0]] = {k: part.view(shape) for (k, shape), part in zip(shapes.items(), parts, strict=True)}
        return found

    def _addend(self, of_owner: Mapping[int, Sequence[SharedInput]], rank: int) -> torch.Tensor:
        """Return this rank's addends to what goes to ``rank``, packed."""
        packed = torch.zeros(self._numel(of_owner[rank]), dtype=torch.float64, device="cpu")
        self._pack(of_owner[rank], packed)
        return packed

    @own_settings()
    def _pack(self, inputs: Sequence[SharedInput], packed: torch.Tensor) -> None:
        """Write this rank's addends into ``packed``, which is zero, and let go of what they were made of."""
        for of, (first, parts) in zip(inputs, self._unpacked(inputs, packed).items(), strict=True):
            sums = self._sums.pop(first, {})
            for num, mean in self._means.pop(first, ()):
                change = mean - self._features_of(of)[:, 0].to(mean.device) / of.num_tokens
                scaled = change.mul_(num**0.5).float()
                add_products(sums[_PRODUCTS], scaled[None], self.sample_group.features(of.num_in)[0])
            for key, part in parts.items():
                if key not in sums:
                    continue
                own, is_triangle = sums.pop(key).cpu(), key == _PRODUCTS and self.of == "pairs"
                own = self._among_all(own, of.num_in)
                if is_triangle:
                    pack_triangle(own, out=part)
                else:
                    part.copy_(own)

    def _among_all(self, own: torch.Tensor, num_in: int) -> torch.Tensor:
        """Return ``own``, of this rank's features, (features, ...), as (``num_in``, ...), which is zero elsewhere."""
        if self.sample_group.size == 1:
            return own
        start, stop = self.sample_group.features(num_in)
        return nn.functional.pad(own, (0, 0, start, num_in - stop))

    def _rounds(
        self, inputs: Sequence[tuple[int, SharedInput]], most: float
    ) -> Iterator[Mapping[int, Sequence[SharedInput]]]:
        """Yield for every round which of ``inputs`` go to each rank: no more than ``most`` numbers, or one input."""
        of_rank: dict[int, list[SharedInput]] = {}
        sizes = Counter[int]()
        for rank, of in inputs:
            size = self._numel([of])
            if sizes[rank] and sizes[rank] + size > most:
                yield of_rank
                of_rank, sizes = {}, Counter()
            of_rank.setdefault(rank, []).append(of)
            sizes[rank] += size
        if of_rank:
            yield of_rank


def _spoiled(m: Moments) -> int:
    """Return 0 where all is finite, 2 where X^T X is not, 1 where what leads towards targets alone is not."""
    if not all_finite(m.values):
        return 2
    towards = [*m.residuals.values(), *([] if m.shift is None else [m.shift])]
    return int(not all(map(all_finite, towards)))
