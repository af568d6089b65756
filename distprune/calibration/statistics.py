"""What the linear maps of one block are given, summed over samples and ranks.

Nouns: the *moments* of an input X (tokens, in) are the sum of squares of each feature, the diagonal of
X^T X, or all of X^T X. Maps that are given the very same tensor (q, k and v; gate and up) share theirs.
With the diagonal alone goes a *sketch*: X^T G, of random signs G (tokens, 32), from which ||X d||^2 of any d
is estimated as ||G^T X d||^2 / 32 (Alon, Matias, Szegedy 1996; Achlioptas 2003), so that methods which have no use
for X^T X can tell what they have done to outputs.

Ranks that run the same samples (see :mod:`distprune.calibration.crew`) take a part each: of ``in`` features,
the sums of theirs, and of X^T X their rows. That is also how tensor parallelism cuts the inputs of a row-wise
map, whose sums of squares so need no communication; its X^T X needs all of X beside it. (A matrix product of
fewer rows may round otherwise: X^T X of such ranks is that of one but for the last bit.)

Every sample is one addend, computed from that sample alone and rounded to float32, and added in
float64. Such a sum is exact, whatever the order, as long as the addends of an element lie within a factor
of 2^29 / samples of each other (24 bits of 53 are the addend's own); what little is lost beyond that
the result's own rounding to float32 hides. So N ranks with 1/N of the samples each come to what one
rank comes to, bit by bit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.calibration.crew import Crew
from distprune.calibration.homes import Home, SharedInput, find_homes
from distprune.calibration.moments import EVERYWHERE, Moments, MomentsOf
from distprune.calibration.triangle import pack_triangle, unpack_triangle
from distprune.collectives import Alone, Communicator, max_together, sum_together, swap_together
from distprune.models import LinearMap, expert_inputs
from distprune.shards import local_of

__all__ = ["InputStatistics"]

FindHomes = Callable[[Sequence[SharedInput], int], Sequence[Home]]  # of inputs, among so many ranks

_NUM_PROJECTIONS = 32  # the standard error of ||X W^T||^2 is a quarter of it at most
_ROWS = 256  # tokens in float64 at a time
_STRIP = 128  # rows of X^T X that are computed together
_ARRIVING = 1 << 23  # float64 numbers at one rank in a round


@dataclass
class _Sum:
    # float64; of this rank's features (sum of squares, sketch), or rows of X^T X, whose lower triangle is not all there
    values: torch.Tensor
    num_tokens: int = 0


@dataclass
class InputStatistics:
    """The sums of this rank for the linear maps ``maps`` of one block.

    Use: within :meth:`listening`, :meth:`begin_sample` before every run of the block; then :meth:`reduce`.
    Nothing is communicated while listening, except by a crew of several ranks for ``"pairs"``: one round for
    each sample and each input that comes in parts, of the input's bytes, counted in the traffic of ``comm``.
    """

    maps: Mapping[str, LinearMap]
    of: MomentsOf
    crew: Crew = field(default_factory=Crew)
    comm: Communicator = field(default_factory=Alone)
    _sums: dict[str, _Sum] = field(default_factory=dict)  # by the first map of those that share
    _first_of: dict[str, str] = field(default_factory=dict)  # map -> the first of those that share its input
    _seen: list[tuple[str, weakref.ref[torch.Tensor], int]] = field(default_factory=list)  # in this sample
    _num_calls: dict[str, int] = field(default_factory=dict)
    _counts: bool = False
    _num_begun: int = 0  # samples
    _signs: dict[int, torch.Tensor] = field(default_factory=dict)  # of this sample, by the number of tokens
    _error: Exception | None = None  # kept until reduce: a rank that stopped here would leave the others waiting

    def begin_sample(self, *, counts: bool = True) -> None:
        """Say that a run follows; with ``counts`` False one that only keeps the other ranks company."""
        self._seen, self._counts, self._signs = [], counts, {}
        self._num_begun += 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take in what the maps are given while this lasts, through forward pre-hooks on their modules.

        What the body raises is kept, for :meth:`reduce` to raise on all ranks.
        """
        with ExitStack() as stack:
            stack.callback(self._seen.clear)
            for module, name in {linear.module: name for name, linear in self.maps.items()}.items():
                # A linear's first of all hooks: those of tensor parallelism wrap the input anew for every map.
                # The experts' last: theirs needs the weights, which a hook of FSDP2 may have yet to gather.
                hook, is_linear = self._hook(name), self.maps[name].expert is None
                handle = module.register_forward_pre_hook(hook, prepend=is_linear, with_kwargs=True)
                stack.callback(handle.remove)
            try:
                yield
            except Exception as error:
                self._error = self._error or error

    def _hook(self, name: str) -> Callable[..., None]:
        """Return the hook of the module that holds map ``name``."""
        linear = self.maps[name]
        prefix = name.removesuffix(f"{linear.parameter_name}.{linear.expert}")

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._counts:
                return
            if linear.expert is None:
                self._take(name, args[0] if args else kwargs["input"])
                return
            # The signature of every experts module of transformers 5.
            given = {**dict(zip(("hidden_states", "top_k_index"), args, strict=False)), **kwargs}
            hidden = given["hidden_states"]
            inputs = expert_inputs(module, hidden.reshape(-1, hidden.shape[-1]), given["top_k_index"])
            for of_expert, routed in inputs.items():
                self._take(prefix + of_expert, routed)

        return hook

    def _take(self, name: str, x: torch.Tensor) -> None:
        """Count the input ``x`` (..., in) of map ``name``, once for all maps that share it."""
        version = 0 if x.is_inference() else x._version  # written to in between, it is another input
        first = next((other for other, ref, v in self._seen if ref() is x and v == version), name)
        num_in = self.maps[name].num_in
        start, stop = self.crew.features(num_in)
        is_cut = _width(x) != num_in
        if is_cut and (self.crew.size == 1 or _width(x) != stop - start):
            layout = f" laid out as {x.placements}" if isinstance(x, DTensor) else ""
            self._error = NotImplementedError(
                f"{name!r} is given {type(x).__name__} {tuple(x.shape)}{layout} where {num_in} features were expected, "
                f"or, of ranks that share a sample, {stop - start}; inputs cut in another way are not supported"
            )
            return
        self._num_calls[name] = self._num_calls.get(name, 0) + 1
        if self._first_of.setdefault(name, first) != first:
            self._error = NotImplementedError(
                f"{name!r} has the input of {self._first_of[name]!r} in one sample and that of {first!r} in another"
            )
            return
        if first != name:
            return
        self._seen.append((name, weakref.ref(x), version))
        x = local_of(x.detach())
        x = x.reshape(-1, x.shape[-1])
        if name not in self._sums:
            width = 1 + _NUM_PROJECTIONS if self.of == "features" else num_in
            self._sums[name] = _Sum(torch.zeros((stop - start, width), dtype=torch.float64, device=x.device))
        total = self._sums[name]
        total.num_tokens += len(x)
        if self.of == "features":
            own = x if is_cut else x[:, start:stop]
            total.values += torch.cat([_square_sums(own)[:, None], own.float().t() @ self._signs_of(x)], dim=1)
        else:
            _add_products(total.values, self.crew.gather(self.comm, x, num_in) if is_cut else x, start)

    def _signs_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return random signs (tokens, 32), float32: those of this sample, on whichever rank it runs."""
        if len(x) not in self._signs:
            number = self.crew.number + self.crew.num_crews * (self._num_begun - 1)
            generator = torch.Generator().manual_seed(number)
            bits = torch.randint(0, 2, (len(x), _NUM_PROJECTIONS), generator=generator)
            self._signs[len(x)] = bits.mul_(2).sub_(1).to(x.device, torch.float32)
        return self._signs[len(x)]

    def reduce(self, comm: Communicator, find_homes: FindHomes = find_homes) -> list[Moments]:
        """Return the moments over all ranks of ``comm``, those of each input once; every map is in one of them.

        Those of ``"pairs"`` are for their home alone, unless what that is for is spread over all ranks;
        ``find_homes`` says which, the same on every rank.

        Every rank must call it. Rounds: 4 of little, to agree on which maps share and on what was found, and 1 for
        all ``"features"`` (264 bytes a feature), or for ``"pairs"`` (4 bytes a pair: one triangle, in float64) 1
        for each input that is spread and 1 for all others, more if over 64 MiB would arrive at a rank at once.

        Raises:
            ValueError: on every rank: a map was given NaN or Inf; it names the map.
            NotImplementedError: on every rank: maps share an input on one rank and not on another.
        """
        max_together(comm, (0,), lambda _: self._check())
        inputs = self._merge(comm)
        homes = [EVERYWHERE] * len(inputs) if self.of == "features" else find_homes(inputs, comm.size)
        totals = self._sum_features(comm, inputs) if self.of == "features" else self._sum_pairs(comm, inputs, homes)
        self._sums.clear()
        found: list[Moments] = []

        def check(bad: torch.Tensor) -> None:
            for i, (of, home) in enumerate(zip(inputs, homes, strict=True)):
                found.append(self._moments(of, home, totals.pop(of.names[0], None)))
                bad[i] = not bool(torch.isfinite(found[-1].values).all())

        bad = max_together(comm, (len(inputs),), check).tolist()
        if any(bad):  # the same on every rank
            names = [m.names[0] for m, is_bad in zip(found, bad, strict=True) if is_bad]
            raise ValueError(f"NaN or Inf in the inputs of {', '.join(map(repr, names[:5]))}")
        return found

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        for name, first in self._first_of.items():
            if self._num_calls[name] != self._num_calls[first]:
                raise NotImplementedError(f"{name!r} has the input of {first!r} in some calls and not in others")

    def _moments(self, of: SharedInput, home: Home, total: torch.Tensor | None) -> Moments:
        """Return the moments of an input; without the ``total`` over all ranks, which is on its home, empty ones."""
        device = self.maps[of.names[0]].parameter.device
        if self.of == "pairs":
            values = torch.empty((0, of.num_in)) if total is None else unpack_triangle(total)
            return Moments(of.names, of.num_tokens, values.to(device), home=home)
        assert total is not None
        total = total.float().to(device)
        return Moments(of.names, of.num_tokens, total[:, 0].contiguous(), total[:, 1:].contiguous())

    def _merge(self, comm: Communicator) -> list[SharedInput]:
        """Return the inputs over all ranks, some of which may have seen no token; two rounds."""
        shared: dict[str, str] = {}
        num_tokens: dict[str, int] = {}
        # All of a crew saw the same tokens: its first rank counts them.
        counted = {first: total.num_tokens for first, total in self._sums.items() if self.crew.place == 0}
        for first_of, num_of_rank in comm.gather([self._first_of, counted]):  # the same on every rank, so all raise
            for name, first in first_of.items():
                if shared.setdefault(name, first) != first:
                    raise NotImplementedError(f"{name!r} has the input of other maps on one rank than on another")
            for first, num in num_of_rank.items():
                num_tokens[first] = num_tokens.get(first, 0) + num
        names: dict[str, list[str]] = {}
        for name in self.maps:
            names.setdefault(shared.get(name, name), []).append(name)
        # From here on an input goes by the first of its maps in their own order, whichever is called first.
        self._sums = {names[first][0]: total for first, total in self._sums.items()}
        num_out = {first: sum(self.maps[name].num_out for name in of) for first, of in names.items()}
        return [
            SharedInput(tuple(of), self.maps[first].num_in, num_out[first], num_tokens.get(first, 0))
            for first, of in names.items()
        ]

    def _sum_features(self, comm: Communicator, inputs: Sequence[SharedInput]) -> dict[str, torch.Tensor]:
        """Return the sums over all ranks by the first map of each input; one round."""
        sizes = [of.num_in for of in inputs]

        def fill(packed: torch.Tensor) -> None:
            for of, part in zip(inputs, torch.split(packed, sizes), strict=True):
                part.copy_(self._values(of.names[0], (of.num_in, 1 + _NUM_PROJECTIONS)))

        packed = sum_together(comm, (sum(sizes), 1 + _NUM_PROJECTIONS), fill, torch.float64)
        return dict(zip([of.names[0] for of in inputs], torch.split(packed, sizes), strict=True))

    def _sum_pairs(
        self, comm: Communicator, inputs: Sequence[SharedInput], homes: Sequence[Home]
    ) -> dict[str, torch.Tensor]:
        """Return the sums over all ranks, packed, of the inputs that are spread or at home here, by the first map."""
        totals: dict[str, torch.Tensor] = {}
        for of in (of for of, home in zip(inputs, homes, strict=True) if home.spread):

            def fill(total: torch.Tensor, of: SharedInput = of) -> None:
                total.copy_(self._triangle(of))

            totals[of.names[0]] = sum_together(comm, _packed_shape(of), fill, torch.float64)
        for of_home in _rounds_of(inputs, homes, comm.size):
            totals.update(self._sum_at_homes(comm, of_home))
        return totals

    def _sum_at_homes(self, comm: Communicator, of_home: Sequence[list[SharedInput]]) -> dict[str, torch.Tensor]:
        """Return the sums over all ranks, packed, of ``of_home[this rank]``, by the first map; one round."""
        own: dict[str, torch.Tensor] = {}

        def make() -> list[torch.Tensor]:
            own.update({of.names[0]: self._triangle(of) for of in of_home[comm.rank]})
            pieces = [torch.empty(0, dtype=torch.float64) for _ in of_home]
            for rank, inputs in enumerate(of_home):
                if inputs and rank != comm.rank:
                    pieces[rank] = torch.cat([self._triangle(of).view(-1) for of in inputs])
            return [piece.view(torch.uint8) for piece in pieces]

        sizes = [8 * sum(math.prod(_packed_shape(of)) for of in inputs) for inputs in of_home]
        sent = [size if rank != comm.rank else 0 for rank, size in enumerate(sizes)]
        coming = [sizes[comm.rank] if rank != comm.rank else 0 for rank in range(comm.size)]
        for received in filter(len, swap_together(comm, make, (sent, coming))):
            addends = torch.split(received.view(torch.float64), [total.numel() for total in own.values()])
            for total, addend in zip(own.values(), addends, strict=True):
                total += addend.view(total.shape)
        return own

    def _triangle(self, of: SharedInput) -> torch.Tensor:
        """Return this rank's addend to X^T X, packed, and let go of what it was made of."""
        packed = pack_triangle(self._values(of.names[0], (of.num_in, of.num_in)))
        self._sums.pop(of.names[0], None)
        return packed

    def _values(self, first: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's addend to all of the sums, zero but for its own features or rows."""
        if first in self._sums and self.crew.size == 1:
            return self._sums[first].values.cpu()
        whole = torch.zeros(shape, dtype=torch.float64)
        if first in self._sums:
            start, stop = self.crew.features(shape[0])
            whole[start:stop] = self._sums[first].values
        return whole


def _packed_shape(of: SharedInput) -> tuple[int, int]:
    return of.num_in // 2 + 1, of.num_in


def _rounds_of(
    inputs: Sequence[SharedInput], homes: Sequence[Home], num_ranks: int
) -> Iterator[list[list[SharedInput]]]:
    """Yield for every round what goes to each rank: no more than about 64 MiB arrive there, or one input."""
    of_home: list[list[SharedInput]] = [[] for _ in range(num_ranks)]
    for of, home in zip(inputs, homes, strict=True):
        if home.spread:
            continue
        num_numbers = sum(other.num_in**2 for other in [*of_home[home.rank], of]) // 2 * num_ranks
        if of_home[home.rank] and num_numbers > _ARRIVING:
            yield of_home
            of_home = [[] for _ in range(num_ranks)]
        of_home[home.rank].append(of)
    if any(of_home):
        yield of_home


def _square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of every column of ``x`` (tokens, columns), summed in float64, as float32."""
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for rows in torch.split(x, _ROWS):
        total += rows.double().square().sum(dim=0)
    return total.float()


def _add_products(total: torch.Tensor, x: torch.Tensor, start: int) -> None:
    """Add to ``total``, rows ``start`` on of X^T X, those of ``x`` (tokens, in), computed in float32.

    Only those on and above the diagonal, and what of the strips' corners is below it: the rest is their mirror image.
    """
    x = x.float()
    for strip in torch.split(total, _STRIP):
        stop = start + len(strip)
        strip[:, start:] += x[:, start:stop].t() @ x[:, start:]
        start = stop


def _width(x: torch.Tensor) -> int | None:
    """Return how many features ``x`` (..., in) has on this rank, ``None`` if it is not there for all tokens."""
    if not isinstance(x, DTensor):
        return x.shape[-1]
    layouts = [p for axis, p in enumerate(x.placements) if x.device_mesh.size(axis) > 1]
    if any(not p.is_replicate() and not p.is_shard(x.ndim - 1) for p in layouts):
        return None
    return x.to_local().shape[-1]
