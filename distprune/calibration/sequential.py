"""One-shot pruning of a decoder, block after block: Wanda, SparseGPT, magnitude and random."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from distprune.calibration.crew import Axis, Crew, find_crew, shared_axis
from distprune.calibration.data import check_fit, spread
from distprune.calibration.outcome import sum_outcomes
from distprune.calibration.report import BlockReport, MapReport, OneShotReport
from distprune.calibration.rows import whole_rows
from distprune.calibration.sparsegpt import prune_by_sparsegpt
from distprune.calibration.statistics import InputStatistics, Moments, MomentsOf
from distprune.calibration.walk import Walk, catch_inputs
from distprune.calibration.wanda import prune_by_scores
from distprune.collectives import Communicator, Group, communicator, together
from distprune.masks import reset_forward
from distprune.methods.agreement import agree_on, draw_seed, settle_owners
from distprune.methods.amount import check_seed
from distprune.methods.decide import check_replicas
from distprune.models import LinearMap, decoder_blocks, linear_maps
from distprune.selection import Pattern, check_divides, check_pattern
from distprune.shards import LocalShard, find_flat_parts, local_shard

__all__ = ["OneShotMethod", "prune_blocks"]

OneShotMethod = Literal["wanda", "sparsegpt", "magnitude", "random"]
OnBlock = Callable[[int, BlockReport], None]


def prune_blocks(
    model: nn.Module,
    samples: torch.Tensor,
    *,
    method: OneShotMethod,
    pattern: Pattern,
    group: Group = None,
    seed: int | None = None,
    offload: bool = False,
    first_block: int = 0,
    on_block: OnBlock | None = None,
) -> OneShotReport:
    """Prune every linear map in the decoder blocks of ``model`` in place, and return what was done.

    Block by block, as the papers do: the calibration samples run through the block, the statistics of
    what each map is given are summed over the ranks, the block is pruned, and what it then puts out is what
    the next one is given. Embeddings, the output head, norms and biases stay. Each rank runs its part of
    the samples; N ranks come to what one rank with all samples comes to: to the same statistics bit by bit,
    so to the same weights by Wanda, magnitude and random as long as the activations are the same bits, and
    but for rounding by SparseGPT, which hands the error of every weight it prunes on to the rest of its row.
    Tensor parallelism adds up a map's outputs in another order, so activations differ in their last bits.

    Args:
        model: plain, the same on all ranks; FSDP2 or HSDP (``fully_shard`` on each block and the root); tensor
            parallel (``parallelize_module``), alone or under FSDP2. Ranks of one tensor-parallel group run the
            same samples, which is read off the layout, and hidden states are whole on each between blocks.
        samples: token ids, (num_samples, length) int64, the same on every rank.
        method: ``"wanda"`` (arXiv 2306.11695), ``"sparsegpt"`` (arXiv 2301.00774, weights updated), or
            ``"magnitude"`` and ``"random"`` by the same walk.
        pattern: ``Unstructured(amount)``, ``PerRow(amount)``, ``NByM(n, m)`` or, but for SparseGPT,
            ``Block(size, amount)``; see there who competes.
        group: the ranks that take part, as for ``prune_model``; it must span all that hold a part.
        seed: for ``"random"``; ``None``: the first rank draws one from torch's default generator.
        offload: keep activations on the CPU between blocks.
        first_block: blocks before it are run and left as they are: they were pruned by an earlier call.
        on_block: called with the number of a block and its report on every rank after each block, before the
            next one is touched, for instance to write it; the walk has then run it once more, pruned. What it
            raises on one rank is raised on all; one that communicates must see to that itself.

    Every rank of ``group`` must call it, with equal arguments. In memory at a time, beyond the model's
    shards: this rank's share of one block's activations, one block's statistics (and of SparseGPT's factors and
    float32 rows those that this rank works on, at most twice its share) and one block as its forward needs it:
    unsharded by FSDP2, cut by tensor parallelism.
    Rounds: 8 for the whole (4 more where ranks hold different parameters), and those of ``RootParameters`` under
    FSDP2 alone, 3 for each of this rank's samples and each embedding; for a block 3 and those
    of ``InputStatistics.reduce``, of ``prune_by_scores`` or ``prune_by_sparsegpt``, and of ``whole_rows``.
    SparseGPT under tensor parallelism gathers the inputs of row-wise maps, one round a sample each; Wanda does not.

    Raises:
        ValueError: on every rank, nothing changed: arguments out of range or unequal on two ranks; a
            parameter whose inputs ``m`` does not divide; samples that do not fit the model; NaN weights;
            no decoder blocks. On every rank, with the blocks before pruned: NaN or Inf in the activations
            (it names the block and the linear map); with that block's weights changed, too: new weights that
            are not finite (SparseGPT), or what the pruned block then puts out. The last block is not run again:
            there Wanda, magnitude and random have only set weights to zero.
        TypeError: on every rank, nothing changed: an argument of the wrong type.
        NotImplementedError: on every rank, nothing changed: FSDP1; experts that are cut by more than FSDP2;
            expert parallelism; tensor parallelism along several mesh axes; hidden states that are cut between
            blocks. With the blocks before pruned: a linear map whose inputs are cut otherwise than evenly along
            their features.
    """
    comm = communicator(group)
    started, traffic = time.perf_counter(), comm.traffic.copy()
    plan, error = _Plan(), None
    try:
        plan = _plan(model, samples, method, pattern, seed, first_block)
    except Exception as caught:
        error = caught
    facts = {
        "method": repr(method),
        "pattern": repr(pattern),
        "seed": repr(seed),
        "offload": repr(offload),
        "first_block": repr(first_block),
        "samples": plan.digest,
    }
    roster, _ = agree_on(comm, plan.shards, facts, error)
    shards = settle_owners(comm, plan.shards, roster)
    check_replicas(comm, roster, shards, finds_nans=True)
    owned = {shard.name: bool(shard.owned) for shard in shards}
    if seed is None and method == "random":
        seed = draw_seed(comm)

    crew = find_crew(comm, plan.axis)
    device = next((p.device for p in model.parameters()), "cpu")
    mine = spread(samples, crew.number, crew.num_crews, device)
    reports = []
    with _evaluating(model):
        walk = catch_inputs(model, mine.batches, offload=offload, comm=comm)
        with together(comm):
            _check_whole(walk, samples.shape[1])
        for index in range(len(walk.blocks)):
            if index >= first_block:
                work = _Work(comm, crew, walk, index, mine.num_counted, method, pattern, seed or 0, owned)
                reports.append(work.run())
                if on_block is not None:
                    with together(comm):
                        on_block(index, reports[-1])
            elif index + 1 < len(walk.blocks):
                walk.advance(index, comm)
    used = comm.traffic - traffic
    peaks = tuple(int(peak) for peak in comm.gather(_peak_memory()))
    return OneShotReport(
        method,
        repr(pattern),
        seed if method == "random" else None,
        len(samples),
        tuple(reports),
        time.perf_counter() - started,
        used.num_rounds,
        used.num_bytes,
        peaks,
    )


@dataclass
class _Plan:
    shards: list[LocalShard] = field(default_factory=list)
    axis: Axis | None = None
    digest: str = ""


def _plan(
    model: nn.Module, samples: torch.Tensor, method: str, pattern: Pattern, seed: int | None, first_block: int
) -> _Plan:
    """Check the arguments and return every parameter's part on this rank. Changes nothing, communicates nothing."""
    if method not in get_args(OneShotMethod):
        raise ValueError(f"method={method!r} is none of {get_args(OneShotMethod)}")
    check_pattern(pattern)
    check_seed(seed)
    if isinstance(first_block, bool) or not isinstance(first_block, int):
        raise TypeError(f"first_block must be an int, not {first_block!r}")
    if not isinstance(samples, torch.Tensor) or samples.dtype != torch.int64:
        raise TypeError(f"samples must be a tensor of int64 token ids, not {getattr(samples, 'dtype', type(samples))}")
    if samples.ndim != 2 or samples.numel() == 0:
        raise ValueError(f"samples must be (num_samples, length), not {tuple(samples.shape)}")
    check_fit(samples, model)
    if find_flat_parts(model):
        raise NotImplementedError("FSDP1 holds parts of rows; shard the model with fully_shard (FSDP2) instead")
    blocks = decoder_blocks(model)
    if not 0 <= first_block <= len(blocks):
        raise ValueError(f"first_block={first_block} is not between 0 and the number of blocks, {len(blocks)}")
    reset_forward(model)
    shards: dict[str, LocalShard] = {}
    for block_name, block in blocks:
        maps = {f"{block_name}.{name}": linear for name, linear in linear_maps(block).items()}
        if not maps:
            raise ValueError(f"block {block_name!r} holds no linear map")
        for map_name, linear in maps.items():
            check_divides(pattern, map_name, linear.num_out, linear.num_in)
            name = f"{block_name}.{linear.parameter_path}"
            if name not in shards:
                shards[name] = local_shard(name, linear.parameter)
    digest = hashlib.sha256(samples.contiguous().numpy(force=True).tobytes()).hexdigest()
    return _Plan(list(shards.values()), shared_axis(model), digest)


def _check_whole(walk: Walk, length: int) -> None:
    """Refuse hidden states that are cut along the sequence: ranks that share a sample would count tokens twice."""
    shape = tuple(walk.hidden[0].shape)
    if math.prod(shape[:-1]) != length:
        raise NotImplementedError(
            f"hidden states of shape {shape} between blocks, for samples of {length} tokens: a tensor-parallel plan "
            "must leave them whole on every rank (no SequenceParallel across blocks)"
        )


@dataclass
class _Work:
    """One block's turn."""

    comm: Communicator
    crew: Crew
    walk: Walk
    index: int
    num_counted: int
    method: OneShotMethod
    pattern: Pattern
    seed: int
    owned: Mapping[str, bool]  # by parameter
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("forward", "reduce", "factor", "sweep"), 0.0)
    )

    def run(self) -> BlockReport:
        """Prune the block and advance the walk behind it, if another block follows."""
        traffic = self.comm.traffic.copy()
        name, block = self.walk.blocks[self.index]
        maps = linear_maps(block)
        moments = self._moments(name, maps)
        num_tokens = {of_map: m.num_tokens for m in moments for of_map in m.names}
        owned = {path: self.owned[f"{name}.{path}"] for path in {m.parameter_path for m in maps.values()}}
        damping: dict[str, float] = {}
        with whole_rows(self.comm, maps, owned) as rows, torch.no_grad():
            if self.method == "sparsegpt":
                outcomes, damping = prune_by_sparsegpt(self.comm, name, rows, moments, self.pattern, self._clock)
            else:
                with self._clock("sweep"):
                    outcomes = prune_by_scores(self.comm, name, rows, moments, self.method, self.pattern, self.seed)
        del moments
        totals = sum_outcomes(self.comm, outcomes)
        if self.index + 1 < len(self.walk.blocks):
            with self._clock("forward"):
                self.walk.advance(self.index, self.comm)
        used = self.comm.traffic - traffic
        reports = tuple(
            MapReport(
                f"{name}.{of_map}",
                linear.num_out * linear.num_in,
                totals[of_map].num_pruned,
                totals[of_map].num_zeros,
                totals[of_map].relative_error,
                damping.get(of_map),
                num_tokens[of_map],
            )
            for of_map, linear in maps.items()
        )
        return BlockReport(self.index, name, reports, self.seconds, used.num_rounds, used.num_bytes)

    def _moments(self, name: str, maps: Mapping[str, LinearMap]) -> list[Moments]:
        of: MomentsOf = "pairs" if self.method == "sparsegpt" else "features"
        statistics = InputStatistics(maps, of, self.crew, self.comm)
        with self._clock("forward"), statistics.listening(), self.walk.block(self.index) as run:
            for sample in range(self.walk.num_samples):
                statistics.begin_sample(counts=sample < self.num_counted)
                run(sample)
        with self._clock("reduce"):
            try:
                return statistics.reduce(self.comm)
            except (ValueError, NotImplementedError) as error:  # on every rank
                raise type(error)(f"block {name!r}: {error}") from error

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode: dropout would make statistics of noise."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
