"""The job that prunes a checkpoint without its model: one file in, one file out, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from typing_extensions import override

from distprune.checkpoint.disk import check_room, partial_of, sync_file
from distprune.checkpoint.hf_directory import CONFIG_NAME, HfDirectory, read_json, sample_together
from distprune.checkpoint.hf_save import write_small_files
from distprune.checkpoint.naming import different_values
from distprune.checkpoint.regions import Region
from distprune.checkpoint.stored_parameters import StoredParameters, find_stored
from distprune.checkpoint.stored_slices import chunks_of, write_chunk
from distprune.checkpoint.weight_file import (
    TensorEntry,
    WeightFile,
    begin_file,
    mapped_tensors,
    planned,
    read_weight_file,
)
from distprune.collectives.agree import sum_together, together
from distprune.collectives.slow import work_together
from distprune.jobs.options import FILES, METHOD, ask, asked
from distprune.jobs.prune import PruneJob
from distprune.jobs.report import JobReport
from distprune.jobs.run import JobFiles, Run, open_job
from distprune.jobs.watcher import Watcher
from distprune.oneshot.report import clock
from distprune.pruning.agreement import NamedWeights
from distprune.pruning.prune_model import Request
from distprune.pruning.report import PruneReport
from distprune.pruning.streamed import StreamedPruning
from distprune.selection.radix import raise_nans
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, cut
from distprune.shards.pieces import pieces_of, share_of, within

_Piece: TypeAlias = tuple[TensorEntry, Region, str | None, Geometry]  # of a parameter (None: it is not pruned)

_COPY_NUMEL = 4 << 20
_MAX_THREADS = 8  # each has some 10 MiB


@asked
class StreamedJob(PruneJob):
    """:class:`PruneJob` for a checkpoint that may be larger than memory: the same bytes, and no model.

    Nothing is evaluated, and dtypes stay as they are stored.

    Args:
        streamed: Build no model: stream the weights from file to file, whatever their size.
        sync_files: Wait until the output is on the disk; without, as after cp.
    """

    streamed: bool = ask(default=True, panel=METHOD)
    # As torch.distributed.checkpoint.FileSystemWriter has it; a killed job can go on with either.
    sync_files: bool = ask(default=True, decides=False, panel=FILES)

    @override
    def check_asked(self) -> None:
        if self.evaluate_on or self.tasks:
            raise ValueError("--streamed builds no model that --eval or --tasks could run; evaluate the output")
        if self.dtype is not None:
            raise ValueError("--streamed leaves weights in the dtype they are stored in; leave out dtype (--dtype)")
        super().check_asked()


def run_streamed_job(
    job: StreamedJob, *, group: dist.ProcessGroup | None = None, watcher: Watcher | None = None
) -> JobReport[PruneReport]:
    """Run the job and return its report. The output is written whole, or not at all.

    The files are read once where groups (N:M) and rows are decided by themselves; else first to choose, as
    ``StreamedPruning`` says, and then to prune and write. They are mapped, and each thread of a rank, of which it
    has as many as torch (at most 8), has a piece of the rank's share in memory.
    Where transformers knows the architecture the output is that of :func:`run_prune_job`, byte for byte; where it does
    not, names decide what is pruned (see ``find_stored``), and ``include`` and ``exclude`` say it better.

    The ranks write one file after the other, each its share of it. A job that was killed goes on with ``resume`` behind
    the last file that is whole, on any number of ranks; what is pruned is chosen again.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same job.
    Communicates what the choice does, and for each file four rounds and the wait for the disk.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job or
            the model; the message says which.
        FileExistsError: on every rank: an unfinished job is there without ``resume``, or with it a finished one.
    """
    with open_job(job, group, "cpu", watcher) as run:
        run.read["model weights"] = sample_together(run.comm, run.directory)  # as load_model looks at them
        with together(run.comm):
            tensors = mapped_tensors(run.directory.weight_files)
            stored = find_stored(run.directory, job.include, job.exclude)
            values = stored.values(tensors)
            if stored.by_names:
                kind = read_json(run.directory.path / CONFIG_NAME).get("model_type")
                run.reporter.say(f"transformers has no model of type {kind!r} for these tensors: their names decide")
        files = run.begin(sync=job.sync_files)
        run.reporter.say("choosing what is pruned")
        with clock(run.seconds, "choose"):
            asked = (job.sparsity, job.method, job.pattern, job.scope, job.seed)
            pruning = StreamedPruning(run.comm, Request(NamedWeights(stored.found), *asked), values)
        with clock(run.seconds, "write"):
            counts = _write(run, files, FileWriter(files, run.directory, stored, pruning, tensors))
        return run.report({}, {}, pruning.report([counts[name] for name in pruning.names]))


def _write(run: Run, files: JobFiles, writer: FileWriter) -> dict[str, list[int]]:
    """Write the files that are not there yet; return by parameter how many zeros it has, and had. Every rank."""
    sources, target = run.directory.weight_files, files.result
    with together(run.comm):
        plans = [writer.plan(source, target / source.path.name) for source in sources]
        sizes = [sum(entry.stop - entry.start for entry in plan.tensors) for plan in plans]
    # Not their bytes: to read them all takes as long as to prune them. Nodes may have copies of their own.
    stamps = run.comm.broadcast(run.directory.stamps)
    with together(run.comm):
        written = [_is_written(plan, files.known(plan.path.name), stamps) for plan in plans]
    left = [i for i, is_written in enumerate(run.comm.broadcast(written)) if not is_written]
    for name in (plans[i].path.name for i in left):
        if files.known(name) is not None:
            run.reporter.say(f"{name} is damaged, or other weights were pruned into it: it is pruned again")
    if len(left) < len(plans):
        run.reporter.say(f"going on after {len(plans) - len(left)} of {len(plans)} files")
    with together(run.comm):
        if run.comm.rank == 0:
            check_room(target, sum(sizes[i] for i in left))
    with run.reporter.stage("pruning", "bytes") as progress:
        for i in left:
            counts = writer.write(plans[i], partial(_tell, progress, sum(sizes[:i]), sizes[i], sum(sizes)))
            with together(run.comm):
                files.record(plans[i].path.name, {"source": stamps, "counts": counts})
                run.reporter.check_here()
    with together(run.comm):
        if run.comm.rank == 0:
            write_small_files(run.directory, plans, target)
    return {name: counts for plan in plans for name, counts in files.known(plan.path.name)["counts"].items()}


def _is_written(file: WeightFile, record: Mapping[str, Any] | None, stamps: object) -> bool:
    """Return whether ``file`` is recorded and there, and was pruned of weight files with these ``stamps``. Local."""
    if record is None or record["source"] != stamps:
        return False
    try:
        return read_weight_file(file.path) == file
    except (OSError, ValueError):
        return False


def _tell(progress: Callable[[int, int], None], before: int, size: int, total: int, share: float) -> None:
    progress(before + round(size * share), total)


@dataclass(frozen=True)
class FileWriter:
    """Writes what ``pruning`` leaves of ``values``, all tensors of ``source`` by name, a file at a time."""

    files: JobFiles
    source: HfDirectory
    stored: StoredParameters
    pruning: StreamedPruning
    values: Mapping[str, torch.Tensor]

    def plan(self, file: WeightFile, path: Path) -> WeightFile:
        """Return what is written to ``path`` of a ``file`` of the source. Local."""
        names = [entry.name for entry in file.tensors if entry.name in self.stored.parts]
        return planned(path, [(name, self.values[name].dtype, self.values[name].shape) for name in names])

    def write(self, file: WeightFile, tell: Callable[[float], None]) -> dict[str, list[int]]:
        """Write ``file``, whole or not at all; return by parameter how many zeros are in it, and were.

        ``tell`` is called with the share of it that is done. Of tied weights the first that is stored counts.

        Every rank must call it: three rounds, 24 bytes a parameter in one of them, and the wait for the disk as
        :func:`work_together`.

        Raises:
            OSError: on every rank: the disk is full or not writable, or a file of the source was changed meanwhile.
            ValueError: on every rank: weights are NaN, or tied ones are stored with different values.
        """
        comm, beside = self.files.comm, replace(file, path=partial_of(file.path))
        with together(comm):
            there = {entry.name for entry in file.tensors}
            counts = {name: [0, 0, 0] for name, copies in self.stored.stored.items() if copies[0].stored in there}
            if comm.rank == 0:
                begin_file(beside)

        def fill(sums: torch.Tensor) -> None:
            work, num_threads = [*self.work(file)], min(torch.get_num_threads(), _MAX_THREADS)
            with beside.path.open("r+b", buffering=0) as opened, ThreadPoolExecutor(num_threads) as pool:
                each: Callable[..., Iterator[Any]] = pool.map if num_threads > 1 else map
                for number, (name, counted) in enumerate(each(partial(self._write, opened.fileno()), work), 1):
                    if name is not None:
                        counts[name] = [num + more for num, more in zip(counts[name], counted, strict=True)]
                    tell(number / len(work))
            self.source.check_unchanged()
            sums.copy_(torch.tensor([*counts.values()], dtype=torch.int64, device="cpu").view(-1, 3))

        totals: list[list[int]] = sum_together(comm, (len(counts), 3), fill).tolist()
        if any(num_nans for _, _, num_nans in totals):
            raise_nans(comm, {name: num_nans for name, (_, _, num_nans) in counts.items()})
        if self.files.sync:
            work_together(comm, lambda: sync_file(beside.path))
        with together(comm):
            if comm.rank == 0:
                beside.path.replace(file.path)
        return {name: [pruned, before] for name, (pruned, before, _) in zip(counts, totals, strict=True)}

    def work(self, file: WeightFile) -> Iterator[_Piece]:
        """Yield this rank's pieces of ``file``: of the parameters that are pruned, and of what is copied. Local."""
        comm = self.files.comm
        for entry in file.tensors:
            parts = self.stored.parts[entry.name]
            if all(parameter is None for _, parameter in parts):  # whole, however the model splits it
                parts = [(Region.whole(entry.name, entry.name, entry.shape), None)]
            shape = entry.shape or (1,)
            grain = (1,) * len(shape)
            share = share_of(shape, grain, comm.rank, comm.size)
            for region, parameter in parts:
                if parameter is None:
                    pieces = pieces_of(within(share, region.stored_bounds or ((0, 1),)), grain, _COPY_NUMEL)
                else:
                    pieces = self.pruning.pieces(parameter)
                yield from ((entry, region, parameter, piece) for piece in pieces)

    def _write(self, descriptor: int, work: _Piece) -> tuple[str | None, list[int]]:
        """Write what is left of a piece; return its parameter, how much is pruned, was before, and is NaN.

        The parameter is ``None`` where nothing counts: of what is copied, and of tied weights after the first.
        """
        entry, region, parameter, piece = work
        name, counts = parameter, [0, 0, 0]
        if parameter is None:
            shard = LocalShard(entry.name, _cut(self.values[entry.name], piece), piece)
        else:
            left, counts = self.pruning.prune(parameter, piece)
            shard = _as_stored(region, entry, left, piece)
            first = self.stored.stored[parameter][0].stored
            if entry.name != first:
                name, before = None, _as_stored(region, entry, self.pruning.values(parameter, piece), piece)
                if not torch.equal(before.local, _cut(self.values[entry.name], before.geometry)):
                    raise different_values(self.source.path, first, entry.name)
        for chunk, places in chunks_of(shard):
            write_chunk(descriptor, entry, chunk, places)
        return name, counts


def _as_stored(region: Region, entry: TensorEntry, values: torch.Tensor, piece: Geometry) -> LocalShard:
    """Return ``values``, a piece of the parameter in ``region`` or of it as one line, as a shard of the stored one."""
    shard = LocalShard(entry.name, values, piece)
    if len(piece.global_shape) == len(region.bounds):
        return region.part_of(shard, entry.shape)
    start = sum(place * math.prod(entry.shape[dim + 1 :]) for dim, place in enumerate(region.stored_start))
    runs = tuple((low + start, high + start) for low, high in piece.dim_runs[0])
    return replace(shard, geometry=Geometry((math.prod(entry.shape),), (runs,)))


def _cut(values: torch.Tensor, piece: Geometry) -> torch.Tensor:
    """Return a piece of a whole tensor, or of it as one line."""
    return cut(values.reshape(piece.global_shape), piece)
