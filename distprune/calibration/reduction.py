"""The sums of all ranks: X^T X of each input at its owner, or everywhere; of routed layers made there of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distprune.calibration.moments import Moments, MomentsOf
from distprune.calibration.order import BlockOrder
from distprune.calibration.owner_ranks import OwnerRank, SharedInput
from distprune.calibration.routed_tokens import RoutedTokens, send_tokens
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.sums import PRODUCTS, SHIFT, SUMS, InputSums
from distprune.calibration.triangle import pack_triangle, triangle_shape, unpack_triangle
from distprune.collectives.agree import max_together, sum_together, together
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer
from distprune.shards.device import are_finite, batches, fetched, own_settings

MESSAGE = 1 << 23  # float64 numbers that are packed at a time: 64 MiB
_IN_DENSE, _ANYWHERE = 1, 2  # where something is NaN or infinite: in the dense stream alone, or in the pruned one

Parts = dict[str, torch.Tensor]
Owners = Mapping[SharedInput, OwnerRank]


@dataclass
class Reduction:
    """``sums`` of this rank, and the ``tokens`` it keeps, by the first layer of each of the ``inputs``; used up.

    ``finite``: of the tokens that are kept, whether all of an input are finite, bool, on their device.
    """

    comm: Communicator
    inputs: Sequence[SharedInput]
    linears: Mapping[str, LinearLayer]
    of: MomentsOf
    sample_group: SampleGroup
    about_mean: bool
    order: BlockOrder | None  # with targets
    offload: bool  # tokens are kept on the CPU
    sums: dict[str, InputSums]
    tokens: dict[str, list[RoutedTokens]]
    finite: dict[str, torch.Tensor]

    def in_place(self, owners: Owners) -> list[Moments]:
        """Return the moments of inputs whose sums are added up: at their ``owners``, or everywhere.

        Every rank must call it. Rounds: with ``about_mean`` 1 of 32 bytes a feature; for every 64 MiB of sums 1 of 64
        bytes and 1 for each rank that they go to; and 1 of 8 bytes for each of all inputs.
        """
        totals = self._sums_of_features(owners) if self.about_mean else {}
        found: dict[SharedInput, Parts] = {}
        for of_rank in self._messages(owners):
            with together(self.comm):
                packed = {rank: self._packed(some, totals) for rank, some in of_rank.items()}
            for rank, some in of_rank.items():
                self.comm.reduce_(packed[rank], "sum", rank)
                if rank in (None, self.comm.rank):
                    found |= zip(some, self._unpacked(some, packed[rank]), strict=True)
        for of, parts in found.items():
            parts |= {SUMS: totals[of]} if self.about_mean else {}
        return self._checked(owners, lambda of: found.pop(of, None))

    def waves(self, owners: Owners, room: int) -> Iterator[list[Moments]]:
        """Yield the moments of routed inputs, as many at a time as an owner has ``room`` for the sums of, in bytes.

        Or one. Every rank must call it: for each wave the rounds of :func:`send_tokens`, and 1 of 8 bytes for each of
        all inputs.
        """
        of_owner: dict[int, list[SharedInput]] = {}
        for of, owner in owners.items():
            of_owner.setdefault(owner.rank, []).append(of)
        parts = []  # by owner
        for inputs in of_owner.values():
            sizes = [8 * of.num_in**2 * (1 + (SHIFT in self._shapes(of))) for of in inputs]
            parts.append([[inputs[i] for i in which] for which in batches(range(len(inputs)), sizes, room)])
        for wave in itertools.zip_longest(*parts, fillvalue=()):
            yield self._wave({of: owners[of] for part in wave for of in part})

    def _wave(self, owners: Owners) -> list[Moments]:
        kept = [self.tokens.pop(of.names[0], []) for of in owners]
        here = [of for of, owner in owners.items() if owner.rank == self.comm.rank]
        sums = {of: InputSums("pairs", about_mean=self.about_mean) for of in here}

        @own_settings()
        def take(number: int, tokens: RoutedTokens) -> None:
            of = here[number]
            x = tokens.x.to(self._device(of))
            sums[of].take(x, x, None if tokens.beside is None else tokens.beside.shift(x))

        device = torch.device("cpu") if self.offload else self._device(next(iter(owners)))
        take_last = send_tokens(self.comm, [owner.rank for owner in owners.values()], kept, take, device)

        def make(of: SharedInput) -> Parts | None:
            take_last()  # all that there is, the first time
            return self._whole(of, sums.pop(of)) if of in sums else None

        return self._checked(owners, make)

    @own_settings()
    def _whole(self, of: SharedInput, own: InputSums) -> Parts:
        """Return the parts of sums of all tokens."""
        found: Parts = {}
        if self.about_mean:
            nothing = torch.zeros((of.num_in, 4), dtype=torch.float64, device=self._device(of))
            found[SUMS] = own.parts.pop(SUMS, nothing)
            own.center(_of_features(found[SUMS])[:, 0] / max(of.num_tokens, 1))
        (parts,) = self._unpacked([of], self._pack([of], {of: own}))
        return found | parts

    def _checked(self, owners: Owners, make: Callable[[SharedInput], Parts | None]) -> list[Moments]:
        """Return the moments of what ``make`` returns, which is called for each input in turn.

        Raises:
            ValueError: on every rank: something is NaN or infinite, in tokens that are kept, too; it names the layers.
        """
        found: list[Moments] = []

        def check(spoiled: torch.Tensor) -> None:
            found.extend(self._moments(of, owner, make(of)) for of, owner in owners.items())
            flags = {m.names[0]: _spoiled(m) for m in found}
            flags |= {name: _ANYWHERE * ~finite for name, finite in self.finite.items() if name not in flags}
            where = dict(zip(flags, fetched([*flags.values()]), strict=True))
            told = [int(where.get(of.names[0], 0)) for of in self.inputs]
            spoiled.copy_(torch.tensor(told, dtype=torch.int64, device="cpu"))

        spoiled = max_together(self.comm, (len(self.inputs),), check).tolist()
        self.finite.clear()
        for stream, where in ((_ANYWHERE, ""), (_IN_DENSE, " in the dense stream")):  # the same on every rank
            if names := [of.names[0] for of, which in zip(self.inputs, spoiled, strict=True) if which == stream]:
                raise ValueError(f"NaN or Inf in the inputs of {', '.join(map(repr, names[:5]))}{where}")
        return found

    @own_settings()
    def _moments(self, of: SharedInput, owner: OwnerRank, parts: Parts | None) -> Moments:
        """Return the moments of an input; without the ``parts`` over all ranks, which are on its owner, empty ones."""
        device = self._device(of)
        if parts is None:
            nothing = torch.empty((0, of.num_in), dtype=torch.float32, device=device)
            return Moments(of.names, of.num_tokens, nothing, owner=owner)
        products = parts.pop(PRODUCTS)
        if self.of == "features":
            sums, squares = products.float().t().contiguous()
            return Moments(of.names, of.num_tokens, squares, sums)
        values, sums, centered = unpack_triangle(products), None, None
        if self.about_mean:
            of_features = _of_features(parts.pop(SUMS).to(device))
            sums = torch.cat([of_features, values.diagonal()[:, None].double()], dim=1)
            if any(self.linears[name].bias is not None for name in of.names):
                centered = values
            scaled = (of_features[:, 0] / max(of.num_tokens, 1) ** 0.5).float()  # n mean^2 is its square
            values = torch.addr(values, scaled, scaled)
        towards = {key: part.float() for key, part in parts.items()}
        shift = towards.pop(SHIFT, None)
        return Moments(of.names, of.num_tokens, values, None, owner, shift, towards, sums, centered)

    def _sums_of_features(self, inputs: Owners) -> dict[SharedInput, torch.Tensor]:
        """Return the sums over ranks of what there is of each feature of ``inputs``, (in, 4): one round."""
        sizes = [4 * of.num_in for of in inputs]

        def fill(words: torch.Tensor) -> None:
            for of, part in zip(inputs, torch.split(words, sizes), strict=True):
                own = self._sums_of(of).parts.pop(SUMS, None)
                if own is not None:
                    part.copy_(self._among_all(own.cpu(), of.num_in).flatten())

        total = sum_together(self.comm, (sum(sizes),), fill, torch.float64)
        return {of: part.view(of.num_in, 4) for of, part in zip(inputs, torch.split(total, sizes), strict=True)}

    def _messages(self, owners: Owners) -> Iterator[dict[int | None, list[SharedInput]]]:
        """Yield the inputs whose sums are packed at once, by the rank that they go to; ``None``: to all."""
        inputs = list(owners)
        for which in batches(range(len(inputs)), [self._numel([of]) for of in inputs], MESSAGE):
            of_rank: dict[int | None, list[SharedInput]] = {}
            for of in (inputs[i] for i in which):
                of_rank.setdefault(None if owners[of].spread else owners[of].rank, []).append(of)
            yield of_rank

    @own_settings()
    def _packed(self, inputs: Sequence[SharedInput], totals: Mapping[SharedInput, torch.Tensor]) -> torch.Tensor:
        """Return this rank's addends, packed; what they were made of is let go of."""
        own = {of: self._sums_of(of) for of in inputs}
        for of in inputs:
            if of in totals:
                own[of].center(_of_features(totals[of])[:, 0] / max(of.num_tokens, 1))
            self.sums.pop(of.names[0], None)
        return self._pack(inputs, own)

    def _pack(self, inputs: Sequence[SharedInput], sums: Mapping[SharedInput, InputSums]) -> torch.Tensor:
        """Return what there is of ``inputs`` in one tensor, float64, on their device: 0 where there is nothing."""
        packed = torch.zeros(self._numel(inputs), dtype=torch.float64, device=self._device(inputs[0]))
        for of, parts in zip(inputs, self._unpacked(inputs, packed), strict=True):
            for key, part in parts.items():
                own = sums[of].parts.pop(key, None)
                if own is not None and key == PRODUCTS and self.of == "pairs":
                    pack_triangle(self._among_all(own, of.num_in), out=part)
                elif own is not None:
                    part.copy_(self._among_all(own, of.num_in))
        return packed

    def _unpacked(self, inputs: Sequence[SharedInput], packed: torch.Tensor) -> list[Parts]:
        """Return views of what is packed of ``inputs``, by what is summed."""
        found: list[Parts] = []
        for of in inputs:
            shapes = self._shapes(of)
            *parts, packed = torch.split(packed, [*map(math.prod, shapes.values()), packed.numel() - self._numel([of])])
            found.append({key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)})
        return found

    def _shapes(self, of: SharedInput) -> dict[str, Sequence[int]]:
        """Return what is summed: of ``"pairs"`` X^T X, packed, and what leads towards targets."""
        if self.of == "features":
            return {PRODUCTS: (of.num_in, 2)}
        shapes: dict[str, Sequence[int]] = {PRODUCTS: triangle_shape(of.num_in)}
        if self.order is not None:
            if not self.order.shifted.isdisjoint(of.names):
                shapes[SHIFT] = (of.num_in, of.num_in)
            adding = [name for name in of.names if name in self.order.adding]
            shapes |= {name: (of.num_in, self.linears[name].num_out) for name in adding}
        return shapes

    def _numel(self, inputs: Sequence[SharedInput]) -> int:
        return sum(math.prod(shape) for of in inputs for shape in self._shapes(of).values())

    def _among_all(self, own: torch.Tensor, num_in: int) -> torch.Tensor:
        """Return ``own``, of this rank's features, (features, ...), as (``num_in``, ...), which is zero elsewhere."""
        if len(own) == num_in:
            return own
        start, stop = self.sample_group.features(num_in)
        return nn.functional.pad(own, (0, 0, start, num_in - stop))

    def _sums_of(self, of: SharedInput) -> InputSums:
        return self.sums.setdefault(of.names[0], InputSums(self.of))

    def _device(self, of: SharedInput) -> torch.device:
        return self.linears[of.names[0]].parameter.device


def _of_features(totals: torch.Tensor) -> torch.Tensor:
    """Return the sums of features and of their sizes, (in, 2), of ``totals`` in pairs of float32 numbers, (in, 4)."""
    return totals.view(-1, 2, 2).sum(dim=2)


def _spoiled(m: Moments) -> torch.Tensor:
    """Return 0 where all is finite, 2 where X^T X is not, 1 where what leads towards targets alone is not; int64."""
    towards = [*m.residuals.values(), *([] if m.shift is None else [m.shift])]
    spoiled = [~are_finite(values) for values in (m.values, *towards)]
    return torch.stack([_ANYWHERE * spoiled[0], *(_IN_DENSE * each for each in spoiled[1:])]).max()
