"""A stretch takes from several files, and whoever writes is in another one of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from distprune.jobs import StreamedJob, run_streamed_job, stretches
from distprune.jobs.stretches import StretchWriter, apart
from distprune.pruning import streamed
from tests.hf_models import make_model
from tests.worlds import run_threads


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 8)])
@pytest.mark.parametrize("num", [0, 1, 5, 96, 101])
def test_workers_are_apart(num: int, num_ranks: int, num_threads: int) -> None:
    orders = [apart(num, rank, num_ranks, num_threads) for rank in range(num_ranks)]
    assert all(sorted(order) == [*range(num)] for order in orders)
    for step in range(num // num_threads):
        workers = sorted(number for order in orders for number in order[step * num_threads :][:num_threads])
        gaps = [after - before for before, after in itertools.pairwise([*workers, workers[0] + num])]
        assert min(gaps) >= num // (num_ranks * num_threads) - 1


def test_ranks_write_different_files_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_PIECE_NUMEL", 100)
    monkeypatch.setattr(stretches, "_COPY_NUMEL", 100)
    monkeypatch.setattr(stretches, "_STRETCH_BYTES", 5000)
    make_model(tmp_path / "model", dtype=torch.bfloat16, max_shard_size="5KB")
    written: dict[int, list[str]] = {0: [], 1: []}
    write_piece, summed = StretchWriter._write, StretchWriter._summed
    num_stretches = []

    def watched(self: StretchWriter, *arguments: Any) -> Any:
        written[self._comm.rank].append(arguments[2].path.name)
        return write_piece(self, *arguments)

    def counted(self: StretchWriter, *arguments: Any) -> Any:
        num_stretches.append(self._comm.rank)
        return summed(self, *arguments)

    monkeypatch.setattr(StretchWriter, "_write", watched)
    monkeypatch.setattr(StretchWriter, "_summed", counted)
    job = StreamedJob(model=str(tmp_path / "model"), output=str(tmp_path / "out"), pattern="2:4")
    run_threads(2, lambda _: run_streamed_job(job))
    assert len(num_stretches) > 2
    steps = [*zip(*written.values(), strict=False)]
    assert len(steps) > 20
    assert sum(one != other for one, other in steps) > 0.8 * len(steps)
