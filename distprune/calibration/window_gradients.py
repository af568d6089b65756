"""How far a block is from what the dense stream is behind it, window by window, and in which direction it gets there.

Nouns: a *window* is one calibration sample, by its number among those of all ranks; a *batch* is a few of them. With h
what the block f is given and h_out what the dense stream is behind it, the *error* of a window is ||f(h) - h_out||^2
and its *size* ||h_out - h||^2.

Any number of ranks comes to the same bits. The gradient of each window is computed by itself and rounded to a grid, on
which the float32 sum of a batch is exact, as soon as it is there: those of a batch are never in memory at once. The
grid must be known before: it follows from the largest gradient of the batches before, and has room for 8 times that.
What is larger is clamped to that.

What raises on one rank is kept until ranks tell each other of it (:meth:`WindowGradients.check`): the rounds before
that take place nevertheless, and nobody waits for them on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.calibration.walk import Walk
from distprune.collectives.agree import max_together, sum_together
from distprune.collectives.base import Communicator, as_told, cannot_meet
from distprune.collectives.tensors import placed_like
from distprune.models.evaluating import needing_gradients
from distprune.scores.exact_sum import FloatGrid, grid_scale, on_grid
from distprune.shards.device import fetched, own_settings, plain_attention, row_chunks
from distprune.shards.geometry import Geometry
from distprune.shards.layouts import local_of, local_shard
from distprune.shards.local_shard import cut, flat_chunks

Run = Callable[[int], torch.Tensor]
_ROOM = 8.0  # for larger gradients than there were before
_Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Measured:
    """The errors and the sizes of all windows; the same on every rank."""

    error: float
    size: float

    @property
    def relative_error(self) -> float:
        """||f(h) - h_out|| / ||h_out - h||, Frobenius norms over all windows."""
        return math.sqrt(self.error / self.size)


class WindowGradients:
    """Of block ``index`` of ``walk``, which has a dense stream, by its parameters ``names``.

    There are ``num_windows`` over all ranks; at most ``batch_size`` make a batch. Local.
    """

    def __init__(
        self, comm: Communicator, walk: Walk, index: int, names: Sequence[str], num_windows: int, batch_size: int
    ) -> None:
        self._comm, self._walk, self._index, self.names = comm, walk, index, list(names)
        self._num_windows, self._batch_size = num_windows, batch_size
        self._block_name, self._block = walk.blocks[index]
        parameters = dict(self._block.named_parameters())
        self._shapes = [parameters[name].shape for name in self.names]
        device = parameters[self.names[0]].device
        self._flat = torch.zeros(sum(shape.numel() for shape in self._shapes), dtype=torch.float32, device=device)
        self._largest = torch.zeros(len(self.names), dtype=torch.float32, device=device)  # so far, over all ranks
        self._grid = FloatGrid(self._largest, batch_size)
        self._finite: dict[int, torch.Tensor] = {}  # by the place of a window in all batches so far
        self._windows: list[int] = []  # by place
        self._error: Exception | None = None

    def measure(self) -> tuple[Measured, list[torch.Tensor]]:
        """Return the errors of all windows, and what the block puts out for this rank's samples, padding included.

        Every rank must call it: one round of 16 bytes a window.

        Raises:
            ValueError: on every rank: one is NaN or infinite.
        """
        outputs: list[torch.Tensor] = []
        with self._walk.block(self._index) as run:
            return self._told(lambda: self._errors(run, outputs)), outputs

    def measure_both(self) -> tuple[Measured, list[float]]:
        """Return that, and the mean size of each parameter's elements: root mean square, of 1-D ones mean magnitude.

        Every rank must call it: three rounds, of 16 bytes a window, and twice 8 bytes a parameter.
        """
        with self._walk.block(self._index) as run:
            measured = self._told(lambda: self._errors(run))
            return measured, self._mean_sizes()

    def add_up(self, batch: Sequence[int], scale: float) -> None:
        """Sum the gradients of ``scale`` times the error of each window of a ``batch``, for :meth:`part` to read.

        Every rank must call it: two rounds, of 4 bytes a parameter and 4 bytes for each element of all parameters,
        beside what FSDP2 gathers; the first time one more of 4 bytes a parameter, for the gradient of the first window
        alone. The host waits for none of them where the backend works on the device.
        """
        with self._walk.block(self._index, gradients=True) as run:
            if not self._windows:
                self._look_at(run, batch[:1], scale, adds=False)
                self._comm.reduce_(self._largest, "max")
            with self.keeping_error(), own_settings():
                # Of a parameter that had no gradient yet, such as an expert's, nothing better is known.
                known = torch.where(self._largest > 0, self._largest, self._largest.max())
                self._grid = FloatGrid(_ROOM * known, self._batch_size)
                self._flat.zero_()
            self._look_at(run, batch, scale, adds=True)
        self._windows += batch
        self._comm.reduce_(self._largest, "max")
        self._comm.reduce_(self._flat)

    def part(self, name: str, geometry: Geometry) -> torch.Tensor:
        """Return what :meth:`add_up` came to of the part ``geometry`` of a parameter, float32, new. Local."""
        number = self.names.index(name)
        return cut(self._wholes()[number], geometry) * self._grid.steps[number]

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keep what the body raises, and go on; the first error counts."""
        try:
            yield
        except BaseException as caught:
            error = as_told(caught)
            if cannot_meet(error):
                raise
            self._error = self._error or error

    def check(self) -> None:
        """Raise what a rank has kept. Every rank must call it: one round of 8 bytes for each window of all batches.

        Raises:
            ValueError: on every rank: NaN or Inf in a gradient or in what the block puts out; it names the window.
        """

        def fill(words: torch.Tensor) -> None:
            if self._error is not None:
                raise self._error
            for place, is_finite in zip(self._finite, fetched(list(self._finite.values())), strict=True):
                words[place] = int(not is_finite)

        spoiled = sum_together(self._comm, (len(self._windows),), fill).tolist()
        if any(spoiled):
            window = next(window for window, is_spoiled in zip(self._windows, spoiled, strict=True) if is_spoiled)
            raise ValueError(
                f"block {self._block_name!r}: a gradient, or what it puts out, is NaN or Inf in calibration sample "
                f"{window}, while it is fitted; refit='none' does without"
            )

    def _own(self, windows: Sequence[int], first_place: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield those of this rank: the place, the number, and the number among its own."""
        group = self._walk.sample_group
        for place, window in enumerate(windows, first_place):
            if window % group.num_groups == group.number:
                yield place, window, window // group.num_groups

    def _errors(self, run: Run, outputs: list[torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
        """Return errors and sizes of this rank's windows, (2,) float64. Adds ``outputs`` of all its samples."""
        found: dict[int, torch.Tensor] = {}
        group, hidden = self._walk.sample_group, self._walk.hidden
        for own in range(self._walk.num_batches):
            window = own * group.num_groups + group.number
            if window >= self._num_windows and outputs is None:
                continue
            output = run(own)
            if outputs is not None:
                outputs.append(output.to(hidden[own].device))
            if window >= self._num_windows:
                continue
            given, wanted = (stream[own].to(output.device) for stream in (hidden, self._walk.dense))
            with own_settings():
                changes = (output.float() - wanted.float(), wanted.float() - given.float())
                found[window] = torch.stack([change.square_().sum(dtype=torch.float64) for change in changes])
        return found

    def _told(self, errors: Callable[[], Mapping[int, torch.Tensor]]) -> Measured:
        def fill(words: torch.Tensor) -> None:
            own = errors()
            if self._walk.sample_group.rank == 0:
                for window, of in zip(own, fetched(list(own.values())), strict=True):
                    words[window] = of

        of_windows = sum_together(self._comm, (self._num_windows, 2), fill, torch.float64).tolist()
        for window, numbers in enumerate(of_windows):
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"block {self._block_name!r} puts out NaN or Inf for calibration sample {window}")
        return Measured(*map(math.fsum, zip(*of_windows, strict=True)))

    def _mean_sizes(self) -> list[float]:
        """Return the mean sizes of parameters, which are gathered: those of the first sample group count."""
        owned: dict[int, torch.Tensor] = {}

        def tell_largest(words: torch.Tensor) -> None:
            group, parameters = self._walk.sample_group, dict(self._block.named_parameters())
            for number, name in enumerate(self.names):
                place, is_owned = _place(name, parameters[name])
                own = local_of(parameters[name].detach())
                if group.number == 0 and (is_owned or (place is None and group.rank == 0)) and own.numel():
                    owned[number] = own
            sizes = [_largest(of, of) for of in owned.values()]
            for number, of in zip(owned, fetched(sizes), strict=True):
                words[number] = of.double() if self._is_1d(number) else of.double().square()

        def add(words: torch.Tensor) -> None:
            sums: list[torch.Tensor] = []
            for number, of in owned.items():
                scale = scales[number]
                addends = (chunk.double() for _, chunk in flat_chunks(of))
                some = [
                    on_grid(each.abs_() if self._is_1d(number) else each.square_(), scale).sum() for each in addends
                ]
                sums.append(torch.stack(some).sum())
            for number, total in zip(owned, fetched(sums), strict=True):
                words[number] = total

        num = len(self.names)
        largest = max_together(self._comm, (num,), tell_largest, torch.float64).tolist()
        scales = [grid_scale(shape.numel(), of) for shape, of in zip(self._shapes, largest, strict=True)]
        totals = sum_together(self._comm, (num,), add).tolist()
        means = [
            total * 2.0**-scale / max(shape.numel(), 1)
            for total, scale, shape in zip(totals, scales, self._shapes, strict=True)
        ]
        return [mean if self._is_1d(number) else mean**0.5 for number, mean in enumerate(means)]

    def _is_1d(self, number: int) -> bool:
        return len(self._shapes[number]) == 1

    def _look_at(self, run: Run, windows: Sequence[int], scale: float, *, adds: bool) -> None:
        """Note the largest gradients of this rank's ``windows`` and, if it ``adds``, their sums."""
        group = self._walk.sample_group
        with self.keeping_error(), needing_gradients(self._block, self.names), group.passing():
            of_block = dict(self._block.named_parameters())
            parameters = [of_block[name] for name in self.names]
            places = [_place(name, of) for name, of in zip(self.names, parameters, strict=True)]
            for place, _, own in self._own(windows, len(self._windows)):
                gradients, pull = self._of_window(run, own, parameters, scale)
                with own_settings():
                    sizes = torch.stack([_largest(of, pull) for of in (*gradients, pull)])
                    self._finite[place] = sizes.isfinite().all()
                    torch.maximum(self._largest, sizes[:-1], out=self._largest)
                    for number, (gradient, (geometry, is_owned)) in enumerate(zip(gradients, places, strict=True)):
                        if adds and gradient is not None and (is_owned or (geometry is None and group.rank == 0)):
                            for total, of in _views(self._wholes()[number], gradient, geometry):
                                self._grid.add(total, of, number)

    def _of_window(
        self, run: Run, own: int, parameters: Sequence[nn.Parameter], scale: float
    ) -> tuple[_Gradients, torch.Tensor]:
        """Return the gradients of one window, this rank's parts, and that of what the block puts out.

        ``None``: it does not depend on that parameter.
        """
        with plain_attention(self._flat.device):
            output = run(own)
            wanted = self._walk.dense[own].to(output.device)
            with own_settings():
                pull = ((output.detach().float() - wanted.float()) * (2 * scale)).to(output.dtype)
            try:
                found = torch.autograd.grad(output, parameters, pull, allow_unused=True)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or cannot_meet(error):
                    raise
                raise NotImplementedError(
                    f"block {self._block_name!r} cannot be fitted as a whole; refit='none' does without: {error}"
                ) from error
        # Of a DTensor a gradient may still be a sum over the ranks of the sample group.
        placed = [placed_like(of, like) for of, like in zip(found, parameters, strict=True)]
        return [None if of is None else local_of(of) for of in placed], pull

    def _wholes(self) -> list[torch.Tensor]:
        parts = torch.split(self._flat, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _largest(values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, float32; NaN if there is one."""
    if values is None or not values.numel():
        return like.new_zeros((), dtype=torch.float32)
    return torch.stack(torch.aminmax(values)).abs().amax().float()


def _views(whole: torch.Tensor, part: torch.Tensor, geometry: Geometry | None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield chunks of ``whole`` and those of ``part`` that belong there; ``None``: all of it is here."""
    pairs = [(whole, part)]
    for dim, runs in enumerate(() if geometry is None else geometry.dim_runs):
        starts = [0, *itertools.accumulate(stop - start for start, stop in runs)]
        pairs = [
            (into.narrow(dim, start, stop - start), of.narrow(dim, at, stop - start))
            for into, of in pairs
            for (start, stop), at in zip(runs, starts, strict=False)
        ]
    for into, of in pairs:
        yield from row_chunks(into, of)


def _place(name: str, parameter: torch.Tensor) -> tuple[Geometry | None, bool]:
    """Return which part of a parameter of a gathered block is here, ``None``: all of it; and whether it counts."""
    if not isinstance(parameter, DTensor):
        return None, False
    shard = local_shard(name, parameter)
    return shard.geometry, shard.owned
