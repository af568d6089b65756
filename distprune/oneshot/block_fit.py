"""A pruned block fitted as a whole to what the dense model puts out behind it: the masks stay, what is kept moves.

Minimised is ||f(h) - h_out||^2 / ||h_out - h||^2 over all windows, h what the pruned model gives block f and h_out what
the dense one is behind it, over the kept weights of pruned layers and over 1-D parameters: gains and biases. By Adam
(arXiv 1412.6980), in float32, but for products of gradients: see :func:`half_products`. The same command comes to the
same bits on the same hardware: see :func:`ordered_attention`.

Experts are fitted with the rest; matrices that no layer of the walk reads (routers, convolutions) are not.

What raises on one rank within a step is kept until all steps are done: the rounds of each step take place nevertheless.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.calibration.walk import Batch, Walk, named
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator, as_met, cannot_meet
from distprune.collectives.tensors import placed_like
from distprune.models.evaluating import needing_gradients
from distprune.oneshot.block_layers import num_places
from distprune.oneshot.estimate import is_out_of_memory
from distprune.shards.device import fetched, half_products, ordered_attention, own_settings
from distprune.shards.geometry import Geometry
from distprune.shards.layouts import local_of, local_shard
from distprune.shards.local_shard import LocalShard, cut

_LEAST_BATCH, _MOST_BATCHES = 4, 32  # windows; of all windows
_BETAS = (0.9, 0.95)
_STEP, _USUAL_RMS = 2e-3, 0.1  # the first step, of a matrix whose root mean square is so large
_WARM_UP, _LEAST = 0.1, 0.1  # of all steps; of the learning rate, at the end


@dataclass(frozen=True)
class BlockFit:
    """||f(h) - h_out|| / ||h_out - h|| before and after; the weights are those with the smaller one."""

    before: float
    after: float


def fit_block(
    comm: Communicator, walk: Walk, index: int, matrices: Collection[str], seed: int, epochs: int, advances: bool
) -> BlockFit | None:
    """Fit block ``index`` of ``walk`` in place: its parameters ``matrices``, and all 1-D ones, but none it shares.

    ``walk`` is before the block, its dense stream behind it; if it ``advances``, it is behind the block afterwards.
    Weights of ``matrices`` that are 0 stay so, and no other becomes 0. ``None``: there is nothing to fit. All
    windows are gone through ``epochs`` times, in the steps of ``walk.steps``, whose order follows from ``seed``, the
    block and the epoch. Beyond what a run of the block takes, a rank needs memory for what autograd keeps of the
    windows of one step, for the gradients of all parameters, twice, one of them in float32, and of its own shards for 3
    times float32 and a copy. The pruned stream is there twice for a while.

    Every rank must call it. Rounds: 2 of 24 bytes, 1 of 16 bytes a parameter, 4 of 64 bytes, and for each step 1 of 4
    bytes for each element of all parameters; FSDP2 gathers the block once more for each.

    Raises:
        ValueError, NotImplementedError: on every rank: NaN or Inf; a block that torch finds no gradients of. As with
            all that is raised, the block's weights are those from before.
    """
    block = walk.blocks[index][1]
    with together(comm):
        places, here = num_places(walk.model), num_places(block)
        shards = [
            local_shard(name, parameter)
            for name, parameter in block.named_parameters()
            if places[id(parameter)] == here[id(parameter)]  # it is in no other block, too
            and (name in matrices or (parameter.ndim == 1 and parameter.is_floating_point()))
        ]
    error, size, num_elements = _measured(comm, walk, index)[0]  # what it puts out is not kept
    if not shards or not error or not size:
        if advances:
            walk.advance(index, comm)
        return None
    rates = _rates(comm, shards, matrices)
    with together(comm):
        fit = _Fit(walk, index, shards, rates, matrices, num_elements / size)
        steps = [part for epoch in range(epochs) for part in _shuffled(walk.steps, f"{seed}:{index}:{epoch}")]
    try:
        for step, part in enumerate(steps):
            with walk.block(index, gradients=True), fit.keeping_error():
                fit.take_gradients(part)
            comm.reduce_(fit.flat)
            with fit.keeping_error():
                fit.step(_schedule(step, len(steps)))
        with together(comm):
            fit.finish(steps)
        (error_after, *_), outputs = _measured(comm, walk, index)
    except Exception:
        fit.go_back()
        raise
    if error_after > error:
        fit.go_back()
        outputs.clear()
    if advances and outputs and not walk.hands_on:
        with together(comm):
            walk.go_on(outputs)
    elif advances:
        walk.advance(index, comm)
    return BlockFit(math.sqrt(error / size), math.sqrt(min(error, error_after) / size))


def batch_size(num_windows: int) -> int:
    """Return of how many windows each step's gradient is."""
    return max(_LEAST_BATCH, -(-num_windows // _MOST_BATCHES))


def _measured(comm: Communicator, walk: Walk, index: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return sums over all windows, the same on every rank, and what block ``index`` puts out for this rank's batches.

    The sums are those of the squares of f(h) - h_out and of h_out - h, and how many elements there are. Every rank must
    call it: one round of 24 bytes.

    Raises:
        ValueError: on every rank: NaN or Inf.
    """
    outputs: list[torch.Tensor] = []
    sums: dict[int, torch.Tensor] = {}  # by batch

    def fill(words: torch.Tensor) -> None:
        for batch in range(walk.num_batches):
            output = run(batch)
            outputs.append(output.to(walk.hidden[batch].device))
            if walk.batches[batch].windows and walk.sample_group.rank == 0:
                given, wanted = (stream[batch].to(output.device).float() for stream in (walk.hidden, walk.dense))
                with own_settings():
                    changes = output - wanted, wanted - given
                    sums[batch] = torch.stack([change.square_().sum(dtype=torch.float64) for change in changes])
        for batch, of_batch in zip(sums, fetched([*sums.values()]), strict=True):
            if not of_batch.isfinite().all():
                where = f"block {walk.blocks[index][0]!r} puts out NaN or Inf for calibration samples"
                raise ValueError(f"{where} {named(walk.batches[batch].windows)}")
            words[:2] += of_batch
            words[2] += walk.hidden[batch].numel()

    with walk.block(index) as run:
        return sum_together(comm, (3,), fill, torch.float64).tolist(), outputs


def _shuffled(parts: Sequence[Batch], seed: str) -> list[Batch]:
    order = list(parts)
    random.Random(seed).shuffle(order)
    return order


def _rates(comm: Communicator, shards: Sequence[LocalShard], matrices: Collection[str]) -> list[float]:
    """Return the learning rate of each parameter by the mean size of its elements: root mean square, of 1-D ones mean
    magnitude. A bias has that of its weight. Every rank must call it: one round of 16 bytes a parameter.
    """
    powers = [1 if shard.local.ndim == 1 else 2 for shard in shards]

    def fill(words: torch.Tensor) -> None:
        norms = [
            torch.linalg.vector_norm(shard.local, power, dtype=torch.float64)
            for shard, power in zip(shards, powers, strict=True)
        ]
        for i, (shard, norm) in enumerate(zip(shards, fetched(norms), strict=True)):
            words[i, 0] = norm ** powers[i]
            words[i, 1] = shard.local.numel()  # replicas count in both

    rates: dict[str, float] = {}
    totals = sum_together(comm, (len(shards), 2), fill, torch.float64).tolist()
    for shard, power, (total, num) in zip(shards, powers, totals, strict=True):
        size = (total / max(num, 1)) ** (1 / power)
        rates[shard.name] = _STEP * (size / _USUAL_RMS if shard.name in matrices else size)
    weights = {name: f"{name.removesuffix('bias')}weight" for name in rates if name.rpartition(".")[2] == "bias"}
    return [rates.get(weights.get(name, name), rate) for name, rate in rates.items()]


def _schedule(step: int, num: int) -> float:
    """Return the learning rate at ``step`` of ``num``, as a share: warm-up, then a cosine."""
    warm_up = max(1, round(_WARM_UP * num))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up + 1) / (num - warm_up)
    return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * done)) / 2


class _Fit:
    """The parameters ``shards`` of block ``index`` while they move, by the gradients of ``scale`` times the error."""

    def __init__(
        self,
        walk: Walk,
        index: int,
        shards: Sequence[LocalShard],
        rates: Sequence[float],
        matrices: Collection[str],
        scale: float,
    ) -> None:
        self._walk, self._index, self._shards, self._rates, self._scale = walk, index, shards, rates, scale
        self._name, self._block = walk.blocks[index]
        self._locals = [shard.local for shard in shards]
        self._before = [local.clone() for local in self._locals]
        # Adam's steps are as long whatever a gradient's size: of values divided by their rates one rate serves all.
        # Contiguous, as their gradients: torch's fused Adam takes that for granted.
        self._values = [
            local.to(torch.promote_types(local.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
            for local in self._locals
        ]
        torch._foreach_div_(self._values, [rate or 1.0 for rate in rates])
        # Weights of matrices are held where they are 0.
        self._kept = [(shard.local != 0) | (shard.name not in matrices) for shard in shards]
        device = self._locals[0].device
        is_fused = device.type in ("cpu", "cuda")
        self._adam = torch.optim.Adam(self._values, betas=_BETAS, fused=is_fused, foreach=not is_fused)
        shapes = [shard.geometry.global_shape for shard in shards]
        numels = [math.prod(shape) for shape in shapes]
        self.flat = torch.zeros(sum(numels), dtype=torch.float32, device=device)  # gradients of whole parameters
        parts = torch.split(self.flat, numels)
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._totals: list[torch.Tensor] = []  # of the gradients of each step: finite if all are
        self._error: Exception | None = None

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keep what the body raises, for :meth:`finish`, and go on; the first error counts."""
        try:
            yield
        except BaseException as caught:
            error = as_met(caught)
            self._error = self._error or error

    def take_gradients(self, part: Batch) -> None:
        """Fill ``flat`` with what this rank's windows of ``part`` add to it. Local, while the block is gathered."""
        names, group = [shard.name for shard in self._shards], self._walk.sample_group
        self.flat.zero_()
        with needing_gradients(self._block, names), group.passing():
            parameters = [self._block.get_parameter(name) for name in names]
            gradients = self._gradients_of(part, parameters)
            for name, parameter, gradient, whole in zip(names, parameters, gradients, self._gradients, strict=True):
                counts, place = group.rank == 0, Geometry.whole(whole.shape)
                if isinstance(parameter, DTensor):
                    shard = local_shard(name, parameter)
                    counts, place = shard.owned, shard.geometry
                if gradient is not None and counts and part.windows:
                    cut(whole, place).copy_(local_of(gradient))

    def _gradients_of(self, part: Batch, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
        """Return the gradients by ``parameters``, placed as these; ``None``: the error does not depend on it."""
        given, wanted = (self._walk.rows(part, dense=dense).to(self.flat.device) for dense in (False, True))
        with torch.enable_grad(), ordered_attention(self.flat.device), half_products(self.flat.device):
            output = part.calls[self._index].run(self._block, given)
            with own_settings():
                pull = (output.detach().float() - wanted.float()).to(output.dtype)
            try:
                # In autograd's thread, where cuBLAS warns if it comes first.
                output.register_hook(lambda pull: pull * (2 * self._scale))  # type: ignore[no-untyped-call]
                gradients = torch.autograd.grad(output, parameters, pull, allow_unused=True)
            except RuntimeError as error:
                if is_out_of_memory(error) or cannot_meet(error):
                    raise
                raise NotImplementedError(
                    f"block {self._name!r} cannot be fitted as a whole; refit='none' does without: {error}"
                ) from error
        # Of a DTensor a gradient may still be a sum over the ranks of the sample group.
        return [placed_like(of, like) for of, like in zip(gradients, parameters, strict=True)]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move the values along the gradients in ``flat``, which are those of all ranks now. Local."""
        with own_settings():
            self._totals.append(self.flat.sum())
            for whole, shard, value, kept in zip(self._gradients, self._shards, self._values, self._kept, strict=True):
                value.grad = cut(whole, shard.geometry).mul_(kept).to(value.dtype).contiguous()
            self._adam.param_groups[0]["lr"] = rate
            self._adam.step()
            for value, its_rate, local in zip(self._values, self._rates, self._locals, strict=True):
                if its_rate:  # else it does not move
                    torch.mul(value, its_rate, out=local)

    @torch.no_grad()
    def finish(self, steps: Sequence[Batch]) -> None:
        """Let no weight that is kept be 0, and raise what was kept. Local.

        Raises:
            ValueError: NaN or Inf in a gradient or in what the block puts out; it names the windows.
        """
        if self._error is not None:
            raise self._error
        for windows, total in zip(steps, fetched(self._totals), strict=True):
            if not total.isfinite():
                raise ValueError(
                    f"block {self._name!r}: a gradient, or what it puts out, is NaN or Inf in calibration samples "
                    f"{named(windows.of_all)}, while it is fitted; refit='none' does without"
                )
        for local, before, kept in zip(self._locals, self._before, self._kept, strict=True):
            local.copy_(torch.where(kept & (local == 0), before, local))

    def go_back(self) -> None:
        torch._foreach_copy_(self._locals, self._before)
