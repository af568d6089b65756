"""One block's turn: what its linear layers are given, their new weights, and what it then puts out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from distprune.calibration import Crew, InputStatistics, Walk
from distprune.collectives import Communicator
from distprune.models import dense_weights, linear_maps
from distprune.oneshot.driver import prune_rows
from distprune.oneshot.report import BlockReport, MapReport
from distprune.oneshot.rows import whole_rows
from distprune.oneshot.solver import Solver
from distprune.patterns import Pattern

__all__ = ["prune_block"]


def prune_block(
    comm: Communicator,
    crew: Crew,
    walk: Walk,
    index: int,
    num_counted: int,
    solver: Solver,
    pattern: Pattern,
    owned: Mapping[str, bool],
) -> BlockReport:
    """Prune block ``index`` and advance the walk behind it, if another block follows. Every rank must call it.

    ``owned`` says by parameter whether this rank counts its part; only the first ``num_counted`` samples count.
    """
    traffic = comm.traffic.copy()
    seconds = dict.fromkeys(("forward", "reduce", "factor", "sweep"), 0.0)
    clock = partial(_clock, seconds)
    name, block = walk.blocks[index]
    maps = linear_maps(block)
    statistics = InputStatistics(maps, solver.needs, crew, comm)
    with clock("forward"), statistics.listening(), walk.block(index) as run:
        for sample in range(walk.num_samples):
            statistics.begin_sample(counts=sample < num_counted)
            run(sample)
    with clock("reduce"):
        try:
            moments = statistics.reduce(comm)
        except (ValueError, NotImplementedError) as error:  # on every rank
            raise type(error)(f"block {name!r}: {error}") from error
    num_tokens = {of_map: m.num_tokens for m in moments for of_map in m.names}
    owned_here = {path: owned[f"{name}.{path}"] for path in {linear.parameter_path for linear in maps.values()}}
    with whole_rows(comm, maps, owned_here, f"{name}.") as rows, torch.no_grad():
        totals = prune_rows(comm, rows, moments, solver, pattern, clock)
    if index + 1 < len(walk.blocks):
        with clock("forward"):
            walk.advance(index, comm)
    used = comm.traffic - traffic
    reports = []
    for of_map, linear in maps.items():
        of, numel = totals[of_map], linear.num_out * linear.num_in
        counts = (numel, of.num_pruned, of.num_zeros, of.relative_error, of.damping or None, num_tokens[of_map])
        reports.append(MapReport(f"{name}.{of_map}", *counts))
    dense = {f"{name}.{path}": reason for path, reason in dense_weights(block).items()}
    return BlockReport(index, name, tuple(reports), dense, seconds, used.num_rounds, used.num_bytes)


@contextmanager
def _clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - started
