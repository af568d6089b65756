"""A pruned block fitted as a whole to what the dense model puts out behind it: the masks stay, what is kept moves.

Minimised is ||f(h) - h_out||^2 / ||h_out - h||^2 over all windows, h what the pruned model gives block f and h_out what
the dense one is behind it, over the kept weights of pruned layers and over 1-D parameters: gains and biases. By Adam
(arXiv 1412.6980), each of whose operations is rounded by itself, so that no layout changes a bit. On a device fused
attention has other bits in each pass backward: torch's plain one stands in for it. Of kernels that a model brings
along, and of experts' sums there, nothing is promised.

Experts are fitted with the rest; matrices that no layer of the walk reads (routers, convolutions) are not.

A batch has as many windows on any number of ranks, 4, or of many a 32nd: more sample groups than that do not make a fit
faster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from distprune.calibration.walk import Walk
from distprune.calibration.window_gradients import WindowGradients
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.oneshot.block_layers import num_places
from distprune.shards.device import on_host, own_settings, row_chunks
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard

_LEAST_BATCH, _MOST_BATCHES = 4, 32  # windows; of all windows
NUM_EPOCHS = 2  # passes over all of them
_BETAS, _EPSILON = (0.9, 0.95), 1e-8
_STEP, _USUAL_RMS = 1e-3, 0.1  # the first step, of a matrix whose root mean square is so large
_WARM_UP, _LEAST = 0.1, 0.1  # of all steps; of the learning rate, at the end


@dataclass(frozen=True)
class BlockFit:
    """Relative errors before and after, see ``Measured.relative_error``; the weights are those with the smaller one."""

    before: float
    after: float


def fit_block(
    comm: Communicator, walk: Walk, index: int, matrices: Collection[str], num_windows: int, seed: int, advances: bool
) -> BlockFit | None:
    """Fit block ``index`` of ``walk`` in place: its parameters ``matrices``, and all 1-D ones, but none it shares.

    ``walk`` is before the block, its dense stream behind it; if it ``advances``, it is behind the block afterwards.
    Weights of ``matrices`` that are 0 stay so, and no other becomes 0. ``None``: there is nothing to fit. The order
    of batches, each of consecutive windows, which ranks share alike, follows from ``seed``, the block and the epoch.
    Beyond what a run of the block takes, a rank needs memory for what autograd keeps of one window, for the gradients
    of that, for those of a batch in float32, and of its own shards for 3 times float32 and a copy. The pruned stream is
    there twice for a while.

    Every rank must call it. Rounds: 6 of at most 16 bytes for each window or parameter, 3 of 64 bytes, and for each of
    ``num_steps`` 2, see :meth:`WindowGradients.add_up`; FSDP2 gathers the block once more for each.

    Raises:
        ValueError, NotImplementedError: on every rank: NaN or Inf; a block that torch finds no gradients of. As with
            all that is raised, the block's weights are those from before.
    """
    block = walk.blocks[index][1]
    with together(comm):
        numel = walk.dense[0].numel()
        of_others = _shared(walk.model, block)
        fitted = {name: of for name, of in block.named_parameters() if name in matrices or _is_vector(of)}
        names = [name for name, of in fitted.items() if id(of) not in of_others]
        gradients = WindowGradients(comm, walk, index, names, num_windows, batch_size(num_windows)) if names else None
    before, sizes = (None, []) if gradients is None else gradients.measure_both()
    if gradients is None or before is None or not before.error or not before.size:
        if advances:
            walk.advance(index, comm)
        return None
    rates = _rates(names, sizes, matrices)
    shards: list[_FittedShard] = []
    with together(comm):
        for name, rate in zip(names, rates, strict=True):
            shard = local_shard(name, block.get_parameter(name))
            shards.append(_FittedShard(shard, rate, holds=name in matrices))
    try:
        scale = numel * num_windows / before.size  # gradients do not depend on the unit of h
        batches = list(_batches(num_windows, index, seed))
        for step, batch in enumerate(batches):
            gradients.add_up(batch, scale)
            with gradients.keeping_error(), own_settings(), torch.no_grad():
                for of in shards:
                    of.step(gradients.part(of.shard.name, of.shard.geometry), step, len(batches))
        gradients.check()
        after, outputs = gradients.measure()
    except Exception:
        _go_back(shards)
        raise
    if after.error > before.error:
        _go_back(shards)
        after = before
        del outputs
        if advances:
            walk.advance(index, comm)
    elif advances:
        with together(comm):
            walk.go_on(outputs)
    return BlockFit(before.relative_error, after.relative_error)


def batch_size(num_windows: int) -> int:
    """Return of how many windows each step's gradient is."""
    return max(_LEAST_BATCH, -(-num_windows // _MOST_BATCHES))


def num_steps(num_windows: int) -> int:
    """Return how many steps a fit takes."""
    return NUM_EPOCHS * -(-num_windows // batch_size(num_windows))


def _shared(model: nn.Module, block: nn.Module) -> set[int]:
    """Return the ids of parameters of ``block`` that ``model`` has elsewhere, too."""
    everywhere, own = num_places(model), num_places(block)
    return {which for which, num in own.items() if everywhere[which] > num}


def _is_vector(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 and parameter.is_floating_point()


def _batches(num_windows: int, index: int, seed: int) -> Iterator[list[int]]:
    """Yield the windows of each step: batches of consecutive ones, in another order in each epoch."""
    size = batch_size(num_windows)
    for epoch in range(NUM_EPOCHS):
        starts = list(range(0, num_windows, size))
        random.Random(f"{seed}:{index}:{epoch}").shuffle(starts)
        for start in starts:
            yield list(range(start, min(start + size, num_windows)))


def _rates(names: list[str], sizes: list[float], matrices: Collection[str]) -> list[float]:
    """Return the learning rate of each parameter by the mean size of its elements. A bias has that of its weight."""
    rates = {
        name: _STEP * (size / _USUAL_RMS if name in matrices else size) for name, size in zip(names, sizes, strict=True)
    }
    weights = {name: f"{name.removesuffix('bias')}weight" for name in names if name.rpartition(".")[2] == "bias"}
    return [rates.get(weights.get(name, name), rates[name]) for name in names]


def _schedule(step: int, num: int) -> float:
    """Return the learning rate at ``step`` of ``num``, as a share: warm-up, then a cosine."""
    warm_up = max(1, round(_WARM_UP * num))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up + 1) / (num - warm_up)
    return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * done)) / 2


class _FittedShard:
    """One parameter's ``shard``, its values in float32, and Adam's two averages. ``holds``: zeros stay."""

    def __init__(self, shard: LocalShard, rate: float, *, holds: bool) -> None:
        self.shard, self._rate, self._holds = shard, rate, holds
        local = shard.local
        self.before = local.clone()
        self._values = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
        self._first, self._second = torch.zeros_like(self._values), torch.zeros_like(self._values)

    def step(self, gradient: torch.Tensor, step: int, num: int) -> None:
        """Take one step along ``gradient``, of the shard's shape. Local, chunk by chunk."""
        of_first, of_second = (1 - beta ** (step + 1) for beta in _BETAS)
        rate = self._rate * _schedule(step, num) * of_second**0.5 / of_first
        epsilon = _EPSILON * of_second**0.5
        tensors = self.shard.local, self.before, self._values, self._first, self._second, gradient
        for local, before, values, first, second, of in row_chunks(*tensors):
            kept = before != 0 if self._holds else None
            if kept is not None:
                of.mul_(kept)
            first.mul_(_BETAS[0]).add_(of * (1 - _BETAS[0]))
            second.mul_(_BETAS[1]).add_(of.mul_(of).mul_(1 - _BETAS[1]))
            values.sub_(first.div(_square_root(second).add_(epsilon)).mul_(rate))
            new = values.to(local.dtype)
            local.copy_(new if kept is None else torch.where(kept & (new != 0), new, local))

    def go_back(self) -> None:
        self.shard.local.copy_(self.before)


def _square_root(values: torch.Tensor) -> torch.Tensor:
    """Return the square root, rounded correctly: torch's is not on the host."""
    return torch.from_numpy(np.sqrt(values.numpy())) if on_host(values.device) else values.sqrt()


def _go_back(shards: list[_FittedShard]) -> None:
    with torch.no_grad():
        for of in shards:
            of.go_back()
