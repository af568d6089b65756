"""What a user sees first: reports in a few lines, everything else in one."""

from __future__ import annotations

import doctest
import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn

import distprune
from distprune import (
    ADMM,
    Block,
    Geometry,
    LocalShard,
    Ownership,
    Random,
    Regrow,
    Shrunk,
    SparseGPT,
    SparseTraining,
    StraightThrough,
    brief,
    compute_masks,
    constant,
    cubic,
    hints,
    prune_blocks,
    prune_model,
    prune_shards,
    shrink_model,
)
from distprune.calibration import token_ids
from distprune.jobs import PruneJob
from distprune.jobs.report import Evaluation, JobReport, PrunedBlocks, SmallerModel
from distprune.oneshot.report import BlockReport, LayerReport, OneShotReport
from distprune.version import __version__
from tests.architectures import samples, tiny_model
from tests.hf_models import make_model
from tests.worlds import run_threads


def test_version() -> None:
    root = Path(__file__).parent.parent
    stated = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert distprune.__version__ == __version__ == stated
    assert f"\nversion: {stated}\n" in (root / "CITATION.cff").read_text()
    assert f"version = {{{stated}}}" in (root / "README.md").read_text()
    assert re.findall(r"^## (\S+) ", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == stated


def test_examples(tmp_path: Path) -> None:
    """Of all that is public: ``llama``, ``samples``, ``tokenizer`` and what is in ``folder`` are small."""
    public = {name: getattr(distprune, name) for name in distprune.__all__ if not name.startswith("__")}
    assert [name for name, of in public.items() if ">>>" not in of.__doc__] == []
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    for name, of in public.items():
        for example in finder.find(of, name, globs={**public, "torch": torch}):
            if "(llama" in (example.docstring or ""):
                example.globs.update(llama=tiny_model("llama"), samples=samples(4))
            example.globs["tokenizer"] = lambda text, **_: {"input_ids": [ord(character) for character in text]}
            if "folder" in (example.docstring or ""):
                make_model(tmp_path / "model", num_hidden_layers=1)
                example.globs["folder"] = tmp_path
            runner.run(example)
    assert runner.tries > 150
    assert runner.failures == 0
    assert sum(doctest.testmod(module).failed for module in (brief, hints, token_ids)) == 0


@pytest.mark.parametrize(
    ("call", "keywords", "message"),
    [
        (prune_model, {"amount": 0.3}, r"takes no 'amount'; say sparsity=0.3: the share of zeros a call ends with"),
        (compute_masks, {"method": "l1"}, r'takes no \'method\'; say score="magnitude"; methods .* of prune_blocks'),
        (prune_shards, {"n": 2, "m": 4}, r'prune_shards\(\) takes no \'n\'; say pattern="2:4"'),
        (prune_model, {"include_names": "*"}, r"takes no 'include_names'; did you mean 'include'\?"),
        (prune_blocks, {"sparsity_ratio": 0.5}, "say sparsity=0.5"),
        (prune_blocks, {"score": "wanda"}, r'say method="admm", "sparsegpt" or "wanda"'),
        (prune_blocks, {"include": "*q_proj"}, r"prune_blocks\(\) takes no 'include'; say sparsity={NAME: share, ...}"),
        (shrink_model, {"prune_ratio": 0.5}, "say what stays: mlp=0.75"),
        (
            SparseTraining.__init__,
            {"amount": 0.3},
            r"SparseTraining\(\) takes no 'amount'; say schedule=constant\(0.3\)",
        ),
        (SparseTraining.__init__, {"epochs": 9}, r"it takes model, optimizer, schedule"),
        (cubic, {"steps": 9}, r"cubic\(\) takes no 'steps'; did you mean 'stop'\?"),
    ],
)
def test_keywords_from_elsewhere(call: Callable[..., object], keywords: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(nn.Linear(2, 2), **keywords)
    assert isinstance(call, FunctionType)
    assert not any(of.kind is inspect.Parameter.VAR_KEYWORD for of in inspect.signature(call).parameters.values())


def test_who_knows_the_whole_model() -> None:
    """All ranks that have parts of each parameter, and no stage of a pipeline."""

    def on_rank(rank: int) -> tuple[int | None, int | None]:
        whole, stage = nn.Linear(2, 2), nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
        nn.init.ones_(whole.weight)
        return prune_model(whole, 0.5).num_parameters, prune_model(stage, 0.5).num_parameters

    assert run_threads(2, on_rank, draws=True) == [(6, None)] * 2


def test_everything_is_shown_in_a_line_and_reports_in_fifteen() -> None:
    layer = nn.Linear(16, 16)
    pruning = prune_model(layer, {"weight": 0.5})
    layers = tuple(LayerReport(f"{name}_proj" * 20, 100, 50, 50, 0.1, None, 8) for name in "qkvouxy")
    blocks = tuple(BlockReport(i, f"layers.{i}", layers, {"gate": "a router"}, (), {}, 1, 1) for i in range(30))
    counts = (1.0, 9, 9, (1 << 30,), 1 << 28)
    one_shot = OneShotReport("wanda", "2:4" * 90, "block", 0.0, "none", None, 8, blocks, (), *counts)
    shrunk = Shrunk({("layers.0", "mlp", "mlp"): torch.arange(3)}, (0, 2), 88, 99, one_shot)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    training = SparseTraining(layer, optimizer, schedule=constant(0.5))
    walked = PrunedBlocks(one_shot, "2:4", [], 0, {}, "uniform", 9)
    smaller = SmallerModel(one_shot, "", [], 0, {}, None, [0, 1], 3, 10, 8)
    evaluation = Evaluation({f"file{i}": 1.0 for i in range(9)})
    job = PruneJob(model="m", output="o", sparsity=0.5)
    reports = [pruning, one_shot, shrunk, training.report(), walked, smaller]
    reports += [
        JobReport(job, Path("m"), {}, 1, "cpu", evaluation, evaluation, {}, work) for work in (pruning, smaller)
    ]
    for report in reports:
        assert 1 <= len(str(report).splitlines()) <= 15
        assert max(map(len, str(report).splitlines())) <= 120
    geometry = Geometry.rows((16, 16), 0, 16)
    shard = LocalShard("weight" * 20, torch.zeros(16, 16), geometry, Ownership(mesh_ranks=frozenset(range(50))))
    shown = [*reports, *pruning.parameters, pruning.masks, training, training.hold, geometry, shard, shard.ownership]
    shown += [*one_shot.blocks, *one_shot.layers, ADMM(), SparseGPT(), Block(16, 0.5), Random(), Regrow(stop=5)]
    training.hold.remove()
    shown += [pruning.masks.overlap(pruning.masks)]
    for each in [*shown, StraightThrough(layer, optimizer)]:
        assert len(repr(each)) <= 100
        assert "\n" not in repr(each)
    assert repr(training.finish()) == "<TrainingReport: 0.0 % zeros after 0 steps>"
