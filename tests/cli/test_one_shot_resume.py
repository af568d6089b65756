"""What ``--resume`` goes on with, what it begins anew, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune import Unstructured
from distprune.checkpoint import unfinished
from distprune.checkpoint.output_directory import publish
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.cli.one_shot_job import OneShotJob, run_one_shot_job
from distprune.collectives import communicator
from tests.cli.test_one_shot_job import Killed, run_alone, run_on_rank
from tests.cli.test_prune_job import contents
from tests.worlds import ProcessPool


@pytest.fixture
def job(job: OneShotJob) -> OneShotJob:
    """The job, with ``resume``."""
    return dataclasses.replace(job, method="wanda", samples=4, sequence_length=16, resume=True)


def run_aloud(job: OneShotJob) -> None:
    run_one_shot_job(job, Ranks(communicator(), torch.device("cpu"), None), Display(visible=True))


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "files without a journal"])
def test_with_nothing_recorded_it_begins_at_the_beginning(
    job: OneShotJob, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    run_alone(dataclasses.replace(job, output=str(tmp_path / "whole"), resume=False))
    folder = tmp_path / "outputs" / ".out.unfinished"
    if left != "nothing":
        folder.mkdir(parents=True)
    if left == "files without a journal":
        (folder / "model.safetensors").write_bytes(b"half")
        (folder / "journal.new").write_text('{"blocks_done"')
    run_aloud(job)
    assert "nothing was recorded yet: starting at the first block\n" in capsys.readouterr().err
    assert contents(Path(job.output)) == contents(tmp_path / "whole")


def test_what_has_finished_is_left_alone(job: OneShotJob, pool: ProcessPool) -> None:
    run_alone(job)
    before = contents(Path(job.output))
    for error in pool.run(2, run_on_rank, 2, job, None):
        assert error == f"FileExistsError: nothing is left to resume: {job.output} is finished, it holds a report.json"
    assert contents(Path(job.output)) == before


@pytest.mark.parametrize("moment", ["before it is renamed", "after it was renamed"])
def test_killed_while_it_is_renamed(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run_alone(dataclasses.replace(job, output=str(tmp_path / "whole")))

    def die(*arguments: Any, **more: Any) -> None:
        if moment == "after it was renamed":
            publish(*arguments, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "publish", die)
        with pytest.raises(Killed):
            run_alone(job)
    assert Path(job.output).exists() == (moment == "after it was renamed")
    if moment == "before it is renamed":
        assert run_alone(job)["pruning"]["resumed_at"] == 2
        assert contents(Path(job.output)) == contents(tmp_path / "whole")
        return
    with pytest.raises(FileExistsError, match="nothing is left to resume"):
        run_alone(job)
    assert {name: data for name, data in contents(Path(job.output)).items() if name != "journal.json"} == contents(
        tmp_path / "whole"
    )


def change_weights(job: OneShotJob) -> None:
    path = Path(job.model) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(job: OneShotJob) -> None:
    path = Path(job.model) / "config.json"
    path.write_text(path.read_text() + "\n")


def change_text(job: OneShotJob) -> None:
    path = Path(job.calibration)
    path.write_text(path.read_text().replace("union", "onion", 1))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (change_weights, "model weights: "),
        (change_config, "model files: "),
        (change_text, "calibration tokens: "),
        (
            {"pattern": Unstructured(0.25)},
            "--pattern: 'Unstructured(amount=0.5)' then, 'Unstructured(amount=0.25)' now",
        ),
        ({"dtype": torch.bfloat16}, "--dtype: None then, 'torch.bfloat16' now"),
        ({"offload": True}, "--offload: False then, True now"),
        ("ranks", "ranks: 2 then, 1 now"),
    ],
)
def test_another_job_is_refused(pool: ProcessPool, job: OneShotJob, change: Any, shown: str) -> None:
    assert pool.run(2, run_on_rank, 2, job, 1) == ["killed", "killed"]
    before = contents(Path(job.output).parent / ".out.unfinished")
    other, num_ranks = job, 2
    if isinstance(change, dict):
        other = dataclasses.replace(job, **change)
    elif change == "ranks":
        num_ranks = 1
    else:
        change(job)
    for error in pool.run(num_ranks, run_on_rank, num_ranks, other, None):
        assert error.startswith("ValueError: ")
        assert "cannot be resumed, the job was another" in error
        assert shown in error
    assert contents(Path(job.output).parent / ".out.unfinished") == before
