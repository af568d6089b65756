"""What ``--resume`` goes on with, what it begins anew, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune import Unstructured
from distprune.checkpoint.hf_directory import read_weight_file
from distprune.checkpoint.outputs import publish
from distprune.jobs import OneShotJob, run_one_shot_job, unfinished
from distprune.jobs.journal import Journal
from tests.hf_models import make_model, make_tokenizer
from tests.jobs.test_one_shot import NUM_BLOCKS, Killed, run_on_rank
from tests.jobs.test_prune import Heard, contents
from tests.small_job import small_job
from tests.worlds import ProcessPool


@pytest.fixture
def job(job: OneShotJob) -> OneShotJob:
    """The job, with ``resume``."""
    return dataclasses.replace(job, method="wanda", samples=4, sequence_length=16, resume=True)


@pytest.mark.whole
def test_with_nothing_recorded_it_begins_at_the_beginning(job: OneShotJob, tmp_path: Path) -> None:
    run_one_shot_job(dataclasses.replace(job, output=str(tmp_path / "whole"), resume=False))
    folder = tmp_path / "outputs" / ".out.unfinished"
    for left in ("nothing", "an empty folder", "files without a journal"):
        if left != "nothing":
            folder.mkdir(parents=True)
        if left == "files without a journal":
            (folder / "model.safetensors").write_bytes(b"half")
            (folder / "journal.new").write_text('{"blocks_done"')
        heard = Heard()
        run_one_shot_job(job, watcher=heard)
        assert "nothing was recorded yet: starting at the beginning" in heard.said, left
        assert contents(Path(job.output)) == contents(tmp_path / "whole"), left
        shutil.rmtree(job.output)


def test_what_has_finished_is_left_alone(job: OneShotJob, pool: ProcessPool) -> None:
    run_one_shot_job(job)
    before = contents(Path(job.output))
    for error in pool.run(2, run_on_rank, job, None):
        assert error == f"FileExistsError: nothing is left to resume: {job.output} is finished, it holds a report.json"
    assert contents(Path(job.output)) == before


@pytest.mark.parametrize("moment", ["before it is renamed", "after it was renamed"])
@pytest.mark.sampled(1)
def test_killed_while_it_is_renamed(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run_one_shot_job(dataclasses.replace(job, output=str(tmp_path / "whole")))

    def die(*arguments: Any, **more: Any) -> None:
        if moment == "after it was renamed":
            publish(*arguments, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "publish", die)
        with pytest.raises(Killed):
            run_one_shot_job(job)
    assert Path(job.output).exists() == (moment == "after it was renamed")
    if moment == "before it is renamed":
        assert run_one_shot_job(job).work.resumed_at == 2
        assert contents(Path(job.output)) == contents(tmp_path / "whole")
        return
    with pytest.raises(FileExistsError, match="nothing is left to resume"):
        run_one_shot_job(job)
    assert {name: data for name, data in contents(Path(job.output)).items() if name != "journal.jsonl"} == contents(
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
    path.write_text(path.read_text().replace("union", "onion"))


def change_evaluation(job: OneShotJob) -> None:
    Path(job.evaluate_on[0]).write_text("another text than before " * 10)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (change_weights, "model weights: "),
        (change_weights, "weights as read: "),  # a change that the bytes looked at do not show
        (change_evaluation, "evaluation tokens of "),
        (change_config, "model files: "),
        (change_text, "calibration tokens: "),
    ],
)
@pytest.mark.sampled(2)
def test_other_files_are_refused(pool: ProcessPool, tmp_path: Path, job: OneShotJob, change: Any, shown: str) -> None:
    evaluated = shutil.copyfile(job.calibration, tmp_path / "evaluated.txt")
    job = dataclasses.replace(job, evaluate_on=(str(evaluated),), evaluation_length=16, evaluation_tokens=64)
    assert pool.run(2, run_on_rank, job, 1) == ["killed", "killed"]
    before = contents(unfinished_folder(job))
    change(job)
    is_refused(pool, 2, job, shown)
    assert contents(unfinished_folder(job)) == before


def is_refused(pool: ProcessPool, num_ranks: int, job: OneShotJob, shown: str) -> None:
    for error in pool.run(num_ranks, run_on_rank, job, None):
        assert error.startswith("ValueError: ")
        assert "cannot be resumed, the job was another" in error
        assert shown in error


def test_another_job_is_refused(pool: ProcessPool, job: OneShotJob) -> None:
    assert pool.run(2, run_on_rank, job, 1) == ["killed", "killed"]
    before = contents(unfinished_folder(job))
    patterns = ("Unstructured(sparsity=0.5, scope='global')", "Unstructured(sparsity=0.25")
    others: list[tuple[dict[str, Any], str]] = [
        ({"pattern": Unstructured(0.25)}, '--pattern: "{}" then, "{}'.format(*patterns)),
        ({"dtype": torch.bfloat16}, "--dtype: None then, 'torch.bfloat16' now"),
        ({"targets": "dense"}, "--targets: None then, 'dense' now"),
    ]
    for change, shown in others:
        is_refused(pool, 2, dataclasses.replace(job, **change), shown)
    is_refused(pool, 1, job, "ranks: 2 then, 1 now")
    assert contents(unfinished_folder(job)) == before


def unfinished_folder(job: OneShotJob) -> Path:
    return Path(job.output).parent / ".out.unfinished"


def flip_a_bit(job: OneShotJob, tensor: str) -> None:
    """Flip one bit of a tensor in the unfinished job's weight files."""
    (file,) = [
        file for file in unfinished_folder(job).glob("*.safetensors") if tensor.encode() in file.read_bytes()[:20_000]
    ]
    entry = next(entry for entry in read_weight_file(file).tensors if entry.name == tensor)
    data = bytearray(file.read_bytes())
    data[entry.stop - 1] ^= 1
    file.write_bytes(data)


def cut_weights(job: OneShotJob) -> None:
    for file in unfinished_folder(job).glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)


def lengthen_weights(job: OneShotJob) -> None:
    for file in unfinished_folder(job).glob("*.safetensors"):
        file.write_bytes(file.read_bytes() + b"more")


def remove_weights(job: OneShotJob) -> None:
    for file in unfinished_folder(job).glob("*.safetensors"):
        file.unlink()


def spoil_headers(job: OneShotJob) -> None:
    for file in unfinished_folder(job).glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[:40] = b"x" * 40
        file.write_bytes(data)


def remove_small_files(job: OneShotJob) -> None:
    for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
        (unfinished_folder(job) / name).unlink()


@pytest.fixture(scope="module")
def killed(pool: ProcessPool, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[OneShotJob, Path]:
    """Return a job that died when its blocks were done, with two streams, and the output of one that did not."""
    folder = tmp_path_factory.mktemp("killed")
    model = make_model(folder / "model", max_shard_size="12KB")
    make_tokenizer(model)
    job = small_job(model, text_file, folder / "outputs")
    job = dataclasses.replace(job, method="admm", samples=4, sequence_length=16, resume=True)
    whole = dataclasses.replace(job, output=str(folder / "whole"))
    assert pool.run(2, run_on_rank, whole, None) == ["", ""]
    assert pool.run(2, run_on_rank, job, NUM_BLOCKS) == ["killed", "killed"]
    return job, folder / "whole"


@pytest.mark.parametrize(
    ("damage", "first_block"),
    [
        (partial(flip_a_bit, tensor="model.layers.0.mlp.up_proj.weight"), 0),
        (partial(flip_a_bit, tensor="model.layers.1.self_attn.q_proj.weight"), 1),
        (partial(flip_a_bit, tensor="model.layers.1.input_layernorm.weight"), 1),
        (partial(flip_a_bit, tensor="model.embed_tokens.weight"), 2),  # is not finished yet
        (cut_weights, 0),
        (lengthen_weights, 2),
        (remove_weights, 0),
        (spoil_headers, 2),
        (remove_small_files, 2),
    ],
)
@pytest.mark.sampled(2)
def test_what_is_damaged_is_made_again(
    pool: ProcessPool, tmp_path: Path, killed: tuple[OneShotJob, Path], damage: Any, first_block: int
) -> None:
    job, whole = killed
    output, left = Path(job.output), shutil.copytree(unfinished_folder(job), tmp_path / "left")
    try:
        damage(job)
        assert pool.run(2, run_on_rank, job, None) == ["", ""]
        report = json.loads((output / "report.json").read_text())
        assert report["pruning"]["resumed_at"] == first_block
        assert contents(output) == contents(whole)
        assert not unfinished_folder(job).exists()
    finally:
        for folder in (output, unfinished_folder(job)):
            shutil.rmtree(folder, ignore_errors=True)
        left.rename(unfinished_folder(job))


def killed_with_one_block(job: OneShotJob) -> Path:
    assert run_on_rank(0, job, 1) == "killed"
    return unfinished_folder(job)


def test_a_damaged_block_is_named(job: OneShotJob) -> None:
    assert run_on_rank(0, job, NUM_BLOCKS) == "killed"
    flip_a_bit(job, "model.layers.1.mlp.up_proj.weight")
    heard = Heard()
    run_one_shot_job(job, watcher=heard)
    assert "model.layers.1 is not on the disk as it was written: it is pruned again" in heard.said
    assert "going on at block 1 of 2" in heard.said
    assert heard.num_blocks == [2]


def test_what_this_job_has_not_written_is_refused(job: OneShotJob, tmp_path: Path) -> None:
    folder = killed_with_one_block(job)
    weights, notes, smaller = folder / "model.safetensors", folder / "notes.txt", folder / "smaller"

    def is_refused(path: Path) -> None:
        with pytest.raises(ValueError, match=f"{path.name} is not from this job; take it away"):
            run_one_shot_job(job)
        assert folder.exists()

    notes.write_text("mine")
    is_refused(notes)
    notes.unlink()
    smaller.mkdir()
    (smaller / "notes.txt").write_text("mine")
    is_refused(smaller)
    shutil.rmtree(smaller)
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    is_refused(weights)


def test_a_damaged_journal_is_refused(job: OneShotJob) -> None:
    journal = killed_with_one_block(job) / "journal.jsonl"
    text = journal.read_text()
    for spoiled, message in (
        ("[" * 100_000 + "\n", "is damaged: line 1 is not what was written"),
        (text.replace("model.layers.0.mlp", "model.layers.0.mlq", 1), "is damaged: line 4"),
        (text.replace('"num_zeros": ', '"num_zeros": 1', 1), "is damaged: line 4"),
        ("".join(text.splitlines(keepends=True)[::3]), "is damaged: line 2"),
    ):
        journal.write_text(spoiled)
        with pytest.raises(ValueError, match=message):
            run_one_shot_job(job)


def test_a_line_that_was_not_finished_is_ignored(job: OneShotJob, tmp_path: Path) -> None:
    run_one_shot_job(dataclasses.replace(job, output=str(tmp_path / "whole")))
    folder = killed_with_one_block(job)
    journal, killed = folder / "journal.jsonl", shutil.copytree(folder, tmp_path / "killed")
    text = journal.read_text()
    for left in (0.1, 0.9, 1.1):
        shutil.copytree(killed, folder, dirs_exist_ok=True)
        journal.write_text((text + text)[: int(len(text) * left)])
        assert run_on_rank(0, job, NUM_BLOCKS) == "killed"
        assert [item.value["index"] for item in Journal(journal, {}).items if item.kind == "block"] == [0, 1], left
        assert run_one_shot_job(job).work.resumed_at == NUM_BLOCKS
        assert contents(Path(job.output)) == contents(tmp_path / "whole"), left
        shutil.rmtree(job.output)
