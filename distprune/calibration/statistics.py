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

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.calibration.crew import Crew
from distprune.calibration.linear_maps import LinearMap, expert_inputs
from distprune.collectives import Alone, Communicator, agree
from distprune.shards import local_of

__all__ = ["InputStatistics", "Moments", "MomentsOf", "pack_triangle", "unpack_triangle"]

MomentsOf = Literal["features", "pairs"]  # the diagonal, for Wanda; all of X^T X, for SparseGPT

_NUM_PROJECTIONS = 32  # the standard error of ||X W^T||^2 is a quarter of it at most
_CHUNK = 1 << 22  # weights whose product with X^T X is in memory at a time
_ROWS = 256  # tokens in float64 at a time
_STRIP = 128  # rows of X^T X that are computed together
_TILE = 64  # rows and columns of a matrix that are mirrored at a time


@dataclass(frozen=True)
class Moments:
    """Of the inputs of ``names``, which are the same, over all ranks' tokens.

    ``values`` (float32) is (in,) for ``"features"`` and (in, in), symmetric, for ``"pairs"``; zeros if
    ``num_tokens`` is 0, as for an expert that nothing was routed to. ``sketch`` (in, 32), float32, comes with
    ``"features"``.
    """

    names: tuple[str, ...]
    num_tokens: int
    values: torch.Tensor
    sketch: torch.Tensor | None = None

    @property
    def square_sums(self) -> torch.Tensor:
        """Sum of squares of each input feature, (in,)."""
        return self.values if self.values.ndim == 1 else self.values.diagonal()

    def squared_output(self, weight: torch.Tensor) -> float:
        """Return ||X W^T||^2 of rows ``weight`` (rows, in), in float32: from X^T X, or estimated by the sketch.

        Without tokens the inputs count as white: X^T X = 1.
        """
        if not self.num_tokens:
            return float(weight.float().square().sum(dtype=torch.float64))
        if self.sketch is not None:
            projected = weight.float() @ self.sketch
            return float(projected.square_().sum(dtype=torch.float64)) / projected.shape[1]
        total = 0.0
        for some in torch.split(weight, max(1, _CHUNK // weight.shape[1])):
            w = some.float()
            total += float(((w @ self.values) * w).sum(dtype=torch.float64))
        return total


@dataclass
class _Sum:
    num_tokens: int = 0
    # float64; of this rank's features (sum of squares, sketch), or rows of X^T X, whose lower triangle is not all there
    values: torch.Tensor | None = None


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
    _error: Exception | None = (
        None  # raised by all ranks together: one that stopped here would leave the others waiting
    )

    def begin_sample(self, *, counts: bool = True) -> None:
        """Say that a run follows; with ``counts`` False one that only keeps the other ranks company."""
        self._seen, self._counts, self._signs = [], counts, {}
        self._num_begun += 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take in what the maps are given while this lasts, through forward pre-hooks on their modules."""
        with ExitStack() as stack:
            stack.callback(self._seen.clear)
            for module, names in _by_module(self.maps).items():
                # A linear's first of all hooks: those of tensor parallelism wrap the input anew for every map.
                # The experts' last: theirs needs the weights, which a hook of FSDP2 may have yet to gather.
                is_linear = self.maps[names[0]].expert is None
                on_call = self._on_linear(names[0]) if is_linear else self._on_experts(names)
                handle = module.register_forward_pre_hook(on_call, prepend=is_linear, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _on_linear(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._counts:
                self._take(name, args[0] if args else kwargs["input"])

        return hook

    def _on_experts(self, names: list[str]) -> Callable[..., None]:
        prefix = names[0].removesuffix(f"{self.maps[names[0]].parameter_name}.{self.maps[names[0]].expert}")

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._counts:
                # The signature of every experts module of transformers 5.
                given = {**dict(zip(("hidden_states", "top_k_index"), args, strict=False)), **kwargs}
                hidden, expert_of_token = given["hidden_states"], given["top_k_index"]
                inputs = expert_inputs(module, hidden.reshape(-1, hidden.shape[-1]), expert_of_token)
                for name, routed in inputs.items():
                    self._take(prefix + name, routed)

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
        total = self._sums.setdefault(name, _Sum())
        total.num_tokens += len(x)
        width = 1 + _NUM_PROJECTIONS if self.of == "features" else num_in
        if total.values is None:
            total.values = torch.zeros((stop - start, width), dtype=torch.float64, device=x.device)
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

    def reduce(self, comm: Communicator) -> list[Moments]:
        """Return the moments over all ranks of ``comm``, those of each input once; every map is in one of them.

        Every rank must call it. Rounds: 4 of little, to agree on which maps share and on how many tokens,
        and 1 for all ``"features"`` (264 bytes a feature), or 1 for each input of ``"pairs"`` (about 4 bytes a
        pair: one triangle).

        Raises:
            ValueError: on every rank: a map was given NaN or Inf; it names the map.
            NotImplementedError: on every rank: maps share an input on one rank and not on another.
        """
        for name, first in self._first_of.items():
            if self._num_calls[name] != self._num_calls[first]:
                self._error = NotImplementedError(
                    f"{name!r} has the input of {first!r} in some calls and not in others"
                )
        agree(comm, {}, self._error)
        shared = self._merge(comm)
        firsts = {first: [name for name in self.maps if shared[name] == first] for first in shared.values()}
        num_tokens = comm.sum(torch.tensor([self._num_tokens(first) for first in firsts], dtype=torch.int64))
        if self.of == "features":
            sizes = [self.maps[first].num_in for first in firsts]
            width = 1 + _NUM_PROJECTIONS
            packed = torch.cat([self._values(first, (size, width)) for first, size in zip(firsts, sizes, strict=True)])
            totals = iter(torch.split(comm.sum(packed), sizes))
        else:
            totals = (
                unpack_triangle(comm.sum(pack_triangle(self._values(f, (self.maps[f].num_in,) * 2)))) for f in firsts
            )
        found = []
        for (first, names), count in zip(firsts.items(), num_tokens.tolist(), strict=True):
            device = self.maps[first].parameter.device
            total = next(totals).float().to(device)
            if self.of == "features":
                moments = Moments(tuple(names), count, total[:, 0].contiguous(), total[:, 1:].contiguous())
            else:
                moments = Moments(tuple(names), count, total)
            self._sums.pop(first, None)  # one block's sums are large: let go of each as it is done with
            found.append(moments)
        bad = [m.names[0] for m in found if not bool(torch.isfinite(m.values).all())]  # the same on every rank
        if bad:
            raise ValueError(f"NaN or Inf in the inputs of {', '.join(map(repr, bad[:5]))}")
        return found

    def _merge(self, comm: Communicator) -> dict[str, str]:
        """Return for each map the first of those it shares with, over all ranks: some may have seen no token."""
        shared: dict[str, str] = {}
        for of_rank in comm.gather(self._first_of):  # the same on every rank, so all of them raise
            for name, first in of_rank.items():
                if shared.setdefault(name, first) != first:
                    raise NotImplementedError(f"{name!r} has the input of other maps on one rank than on another")
        return {name: shared.get(name, name) for name in self.maps}

    def _num_tokens(self, first: str) -> int:
        # All of a crew saw the same tokens: its first rank counts them.
        return self._sums[first].num_tokens if first in self._sums and self.crew.place == 0 else 0

    def _values(self, first: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's addend to all of the sums, zero but for its own features or rows."""
        values = self._sums[first].values if first in self._sums else None
        if values is not None and values.shape == shape:
            return values.cpu()
        whole = torch.zeros(shape, dtype=torch.float64)
        if values is not None:
            start, stop = self.crew.features(shape[0])
            whole[start:stop] = values
        return whole


def _by_module(maps: Mapping[str, LinearMap]) -> dict[nn.Module, list[str]]:
    found: dict[nn.Module, list[str]] = {}
    for name, linear in maps.items():
        found.setdefault(linear.module, []).append(name)
    return found


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


def pack_triangle(symmetric: torch.Tensor) -> torch.Tensor:
    """Return the upper triangle of (d, d) as (d // 2 + 1, d): the lower rows' part fills the upper rows' corner.

    What is below the diagonal is not looked at.
    """
    num_rows = symmetric.shape[0] // 2 + 1
    packed = symmetric[:num_rows].clone()
    rest = symmetric[num_rows:, num_rows:]
    corner = packed[1 : 1 + len(rest), : len(rest)]
    corner.copy_(corner.triu(1) + rest.triu().t())
    return packed


def unpack_triangle(packed: torch.Tensor) -> torch.Tensor:
    """Return, rounded to float32, the symmetric matrix (d, d) that :func:`pack_triangle` packed."""
    num_rows, size = packed.shape
    num_rest = size - num_rows
    whole = torch.empty(size, size, device=packed.device)
    whole[:num_rows] = packed
    whole[num_rows:, num_rows:] = packed[1 : 1 + num_rest, :num_rest].t()
    # Tile by tile, the lower triangle from the upper: transposing all at once is ten times slower on a CPU.
    for start in range(0, size, _TILE):
        stop = start + _TILE
        tile = whole[start:stop, start:stop]
        mirrored = tile.triu(1).t()
        tile.triu_().add_(mirrored)
        whole[stop:, start:stop] = whole[start:stop, stop:].t()
    return whole
