"""What one-shot pruning did, and took, in numbers."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.formatting import count, cut, one_line, share, took, worst, zeros
from distprune.oneshot.block_fit import BlockFit
from distprune.totals import Counted, Totals


@contextmanager
def clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time the body takes to ``seconds[stage]``."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, repr=False)
class LayerReport(Counted):
    """One linear layer, counted over all ranks, replicas once.

    ``relative_error`` is ||X (W - W')^T|| / ||X W^T|| (Frobenius norms, X the inputs before this layer, or its block,
    is pruned, W the weights, moved towards their target where they have one, W' the new ones): from all of X^T X with
    SparseGPT, ADMM and dense targets; otherwise as if features were independent but for their means (see
    ``Moments.squared_output``). ``None``: the layer puts out nothing but zeros. Without tokens (an expert that nothing
    was routed to) inputs count as white. ``damping`` is the fraction of the mean diagonal that was added to it
    (SparseGPT; more than 0.01 says that it had to be raised), or to a diagonal of ones (ADMM).
    """

    name: str  # in the model
    num_elements: int
    num_pruned: int
    num_zeros: int  # those, and weights that are zero besides
    relative_error: float | None
    damping: float | None
    num_tokens: int


@dataclass(frozen=True)
class BlockReport:
    """One decoder block: the same on every rank, but for ``seconds``, which are this rank's by stage.

    Stages: ``forward`` (all runs of the block), ``reduce`` (statistics over ranks), ``target`` (moving weights to their
    targets), ``factor`` (Cholesky, and handing factors around), ``sweep`` (scores, selection, new weights), ``fit``
    (the block as a whole).
    """

    index: int
    name: str
    layers: tuple[LayerReport, ...]
    dense: dict[str, str]  # other weights, by name: why they are left as they are (a router, a gate)
    residual: tuple[str, ...]  # layers that have hidden states as their target: their outputs are added as they are
    seconds: dict[str, float]
    num_rounds: int
    num_bytes: int
    fit: BlockFit | None = None  # as a whole; None: it was not asked for, or there was nothing to fit

    @property
    def unseen(self) -> tuple[str, ...]:
        """The layers that no token reached: pruned as if their inputs were white."""
        return tuple(layer.name for layer in self.layers if layer.num_tokens == 0)

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{len(self.layers)} layers of {self.name}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        layers = [{**dataclasses.asdict(layer), "sparsity": layer.sparsity} for layer in self.layers]
        return {**dataclasses.asdict(self), "layers": layers, "unseen": list(self.unseen)}


@dataclass(frozen=True)
class OneShotReport(Totals):
    """The same on every rank, but for seconds.

    >>> report = prune_blocks(llama, samples, 0.5, method="wanda")
    >>> report.method, report.sparsity, report.blocks[0].layers[0].name
    ('wanda', 0.5, 'model.layers.0.self_attn.q_proj')

    ``num_rounds`` and ``num_bytes`` are of one rank's messages, without what FSDP2 gathers; ``peak_memory``
    is the highest resident size of each rank's process so far, in bytes (0 on Windows). ``other_blocks`` are lists of
    blocks that were left as they are, such as an encoder. ``num_parameters``: elements of the whole model.
    """

    method: str
    pattern: str
    sequential: str
    target_share: float  # of the way to dense targets; 0: each layer's own output is its target
    refit: str  # "block": each was fitted as a whole behind its layers; "none"
    seed: int | None
    num_samples: int
    blocks: tuple[BlockReport, ...]
    other_blocks: tuple[str, ...]
    seconds: float
    num_rounds: int
    num_bytes: int
    peak_memory: tuple[int, ...]
    num_parameters: int | None = None  # None: blocks are missing here that were restored, or not asked for
    permute: str = "none"  # "channels": those of each block changed places before it was pruned

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        """All layers, in the order of the blocks."""
        return tuple(layer for block in self.blocks for layer in block.layers)

    @property
    @override
    def counted(self) -> tuple[LayerReport, ...]:
        """The layers that were pruned."""
        return self.layers

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.sparsity)} of {count(self.num_elements)} weights zero by {self.method}")

    @override
    def __str__(self) -> str:
        """Return what was done, in at most 11 lines; all of it is in :meth:`to_dict`."""
        layers, dense = self.layers, [name for block in self.blocks for name in block.dense]
        left = [f"  left dense: {len(dense)} weights, such as {cut(dense[0], 60)}"] if dense else []
        memory = f"at most {count(max(self.peak_memory, default=0) / 2**20)} MiB in a process"
        lines = [
            cut(f"{self.method}, {self.pattern}"),
            f"  sparsity: {zeros(self.num_zeros, self.num_elements, self.num_parameters)}",
            f"  {len(self.blocks)} blocks, {len(layers)} layers, {self.num_samples} samples",
            *left,
            *worst(
                "highest relative errors", layers, lambda of: of.name, lambda of: of.relative_error, "{:.4f}".format
            ),
            f"  {took(self.seconds, self.num_rounds, self.num_bytes)}, {memory}",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return {**dataclasses.asdict(self), "blocks": [block.to_dict() for block in self.blocks]}


class Meter:
    """Measures time and traffic from where it is made."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self._started, self._traffic = comm, time.perf_counter(), comm.traffic.copy()

    def read(self) -> dict[str, Any]:
        """Return what it took so far, as the report says it. Every rank must call it: one round of 8 bytes a rank."""
        used, seconds = self.comm.traffic - self._traffic, time.perf_counter() - self._started
        traffic = {"num_rounds": used.num_rounds, "num_bytes": used.num_bytes}
        return {"seconds": seconds, **traffic, "peak_memory": peak_memory(self.comm)}


def _resident_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory(comm: Communicator, of_rank: Callable[[], int] = _resident_peak) -> tuple[int, ...]:
    """Return ``of_rank()`` of each rank: by default the highest resident size of its process so far, in bytes.

    Every rank must call it: one round of 8 bytes a rank.
    """
    return tuple(sum_together(comm, (comm.size,), lambda of: of[comm.rank].fill_(of_rank())).tolist())
