"""What ranks have written together is on the disk before it is published."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distprune.jobs import PruneJob, StreamedJob, run_prune_job, run_streamed_job, unfinished
from distprune.jobs.journal import JOURNAL_NAME
from tests.sampling import only_whole
from tests.worlds import run_threads

OWN = {"config.json", "generation_config.json", "model.safetensors.index.json", "report.json", "README.md"}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was synced, by name."""
    found: Counter[str] = Counter()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        found[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def weights_of(model: Path) -> list[str]:
    return [path.name for path in model.glob("*.safetensors")]


@pytest.mark.parametrize(("kind", "num_ranks"), [("loaded", 1), ("streamed", 3), only_whole("loaded", 2)])
def test_every_rank_syncs_what_it_wrote(
    split_model: Path, tmp_path: Path, kind: str, num_ranks: int, synced: Counter[str]
) -> None:
    def on_rank(_: int) -> Any:
        asked: dict[str, Any] = {"model": str(split_model), "output": str(tmp_path / "out"), "pattern": "2:4"}
        return run_streamed_job(StreamedJob(**asked)) if kind == "streamed" else run_prune_job(PruneJob(**asked))

    run_threads(num_ranks, on_rank)
    del synced[JOURNAL_NAME]
    folders = {name for name in synced if name.startswith(".out")} | {tmp_path.name}
    assert len(weights_of(split_model)) > 2
    assert {name: synced.pop(name) for name in OWN | folders} == dict.fromkeys(OWN | folders, 1)
    assert {*synced} == {*weights_of(split_model)}
    assert set(synced.values()) <= {*range(num_ranks + 1)}


def test_what_a_job_has_not_synced_is_synced_when_it_goes_on(
    split_model: Path, tmp_path: Path, synced: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = StreamedJob(model=str(split_model), output=str(tmp_path / "out"), pattern="2:4", sync_files=False)
    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "publish", Mock(side_effect=OSError("the disk is gone")))
        with pytest.raises(OSError, match="the disk is gone"):
            run_streamed_job(job)
    assert not synced
    run_streamed_job(dataclasses.replace(job, sync_files=True, resume=True))
    assert all(synced[name] == 1 for name in weights_of(split_model))
