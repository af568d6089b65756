"""What a user sees first: reports in a few lines, everything else in one."""

from __future__ import annotations

import copy
import doctest
import inspect
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

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
    compute_masks,
    constant,
    cubic,
    formatting,
    hints,
    prune_blocks,
    prune_model,
    prune_shards,
    shrink_model,
)
from distprune.calibration import token_ids
from distprune.jobs import PruneJob, ShrinkJob
from distprune.jobs.report import Evaluation, JobReport, PrunedBlocks, SmallerModel
from distprune.oneshot.report import BlockReport, LayerReport, OneShotReport
from distprune.version import __version__
from tests.architectures import samples, tiny_model
from tests.hf_models import make_model
from tests.worlds import all_raise, drawing, run_threads


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
    assert sum(doctest.testmod(module).failed for module in (formatting, hints, token_ids)) == 0


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
    windows = {"text": 0, "continuing": 0, "own": 8}
    walked = PrunedBlocks(one_shot, "2:4", [], 0, windows, "uniform", 9)
    smaller = SmallerModel(one_shot, "", [], 0, windows, None, [0, 1], 3, 10, 8)
    evaluation = Evaluation({f"file{i}": 1.0 for i in range(9)})
    job, shrink = PruneJob(model="m", output="o", sparsity=0.5), ShrinkJob(model="m", output="o", mlp=0.5)
    reports = [pruning, one_shot, shrunk, training.report(), walked, smaller]
    reports += [
        JobReport(asked, Path("m"), {}, 1, "cpu", evaluation, evaluation, {"total": 1.0}, work)
        for asked, work in ((job, pruning), (shrink, smaller))
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


NO_MODEL: dict[str, Callable[[Any], object]] = {
    "prune_model": lambda thing: prune_model(thing, 0.5),
    "compute_masks": lambda thing: compute_masks(thing, 0.5),
    "sparsity": distprune.sparsity,
    "Masks.of": distprune.Masks.of,
    "hold_zeros": distprune.hold_zeros,
    "SparseTraining": lambda thing: SparseTraining(thing, torch.optim.SGD([torch.ones(2)]), schedule=constant(0.5)),
    "erk": lambda thing: distprune.erk(thing, 0.5),
    "prune_blocks": lambda thing: prune_blocks(thing, samples(4), 0.5),
    "allocate": lambda thing: distprune.allocate(thing, samples(4), 0.5),
    "shrink_model": lambda thing: shrink_model(thing, samples(4), mlp=0.5),
    "perplexity": lambda thing: distprune.perplexity(thing, samples(4)),
    "own_words": lambda thing: distprune.own_words(thing, 2, 8),
    "save": lambda thing: distprune.save(thing, "nowhere"),
    "merge_adapters": distprune.merge_adapters,
    "dense_state_dict": distprune.dense_state_dict,
}


@pytest.mark.parametrize("call", NO_MODEL)
def test_what_is_no_model_is_met_with_the_way_to_go(call: str) -> None:
    things: dict[str, tuple[object, str]] = {
        "a path": ("some/model", r"not a str 'some/model'; load it first: distprune.load\(path\)"),
        "a state": (nn.Linear(2, 2).state_dict(), "not a OrderedDict; load the state into its model first"),
        "a tensor": (
            torch.ones(2, 2),
            r"not a Tensor; .* pruned by prune_shards, or by L1Unstructured\(amount\).prune",
        ),
        "a list": ([nn.Linear(2, 2)], "not a list; put several into one torch.nn.ModuleList"),
    }
    for thing, words in things.values():
        with pytest.raises(TypeError, match=f"model takes a torch.nn.Module, {words}"):
            NO_MODEL[call](thing)
    layer = nn.Linear(2, 2)
    for first in (layer, "model") if call in ("prune_model", "compute_masks", "Masks.of", "hold_zeros") else ("model",):
        all_raise(
            2,
            lambda rank, first=first: NO_MODEL[call]("model" if rank else first),
            kind=TypeError,
            match="model takes a torch.nn.Module, not a str 'model'",
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": 0.8}, r"schedule takes a function .* such as constant\(0.8\) .*, not 0.8"),
        ({"schedule": {"weight": 0.8}}, r"schedule takes a function .*, not 0.8"),
        ({"schedule": None}, r"schedule takes a function .*, not None"),
        ({"regrow": 0.3}, r"regrow takes a Regrow, such as Regrow\(stop=1000\), not 0.3"),
        ({"optimizer": torch.optim.SGD}, "not the class SGD: make one of the model's parameters"),
        ({"optimizer": [nn.Parameter(torch.ones(999))]}, "or several, not a Parameter$"),
    ],
)
def test_first_arguments_of_training(arguments: dict[str, Any], message: str) -> None:
    layer = nn.Linear(2, 2)
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(layer.parameters()), "schedule": constant(0.5)} | arguments
    with pytest.raises(TypeError, match=message):
        SparseTraining(layer, **given)


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def _holding(weight: torch.Tensor, **beside: torch.Tensor) -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    for name, scale in beside.items():
        layer.register_parameter(name, nn.Parameter(scale))
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_lazy, ValueError, "'0.weight' of a LazyLinear has no shape yet: run a forward first"),
        (
            lambda: _holding(torch.ones(4, 4, dtype=torch.int8)),
            TypeError,
            "'0.weight' holds torch.int8 values, .* prune a model before it is quantized",
        ),
        (
            lambda: _holding(
                torch.ones(4, 4).to(torch.float8_e4m3fn), weight_scale_inv=torch.ones(2, 2)
            ),  # as DeepSeek's
            TypeError,
            "'0.weight' holds torch.float8_e4m3fn values, which are scaled by 'weight_scale_inv' beside it: prune a",
        ),
        (
            lambda: _holding(torch.ones(4, 4).to(torch.float8_e8m0fnu)),
            TypeError,
            "'0.weight' holds torch.float8_e8m0fnu values, which have no zero",
        ),
        (
            lambda: _holding(TwoTensor(torch.ones(4, 4), torch.ones(4, 4))),  # as torchao's
            NotImplementedError,
            r"the values of '0.weight' are packed \(TwoTensor\); prune before",
        ),
        (
            lambda: _holding(torch.ones(4, 4).to_sparse()),
            NotImplementedError,
            r"the values of '0.weight' are packed \(sparse_coo\)",
        ),
    ],
)
def test_values_that_cannot_be_pruned_are_named(
    make: Callable[[], nn.Module], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prune_model(make(), 0.5)
    if error is not TypeError:
        with pytest.raises(error, match=message):
            distprune.hold_zeros(make())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_of_several_ranks(dtype: torch.dtype) -> None:
    """Copies are compared. No integer has as many bits as complex128, which says whether a zero is held."""
    with drawing(0):
        layer = nn.Linear(8, 8, dtype=dtype)
    layers = [copy.deepcopy(layer) for _ in range(3)]

    def on_rank(rank: int) -> None:
        prune_model(layers[rank], 0.5)
        distprune.hold_zeros(layers[rank], torch.optim.SGD(layers[rank].parameters()))

    if dtype is torch.complex64:
        run_threads(2, on_rank)
    else:
        all_raise(2, on_rank, match="zeros of torch.complex128 weights cannot be held", kind=NotImplementedError)
    prune_model(layers[2], 0.5)
    assert all(torch.equal(layers[rank].weight, layers[2].weight) for rank in range(2))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_go_by_their_modulus(dtype: torch.dtype) -> None:
    with drawing(0):
        layers = [nn.Linear(8, 8, dtype=dtype) for _ in range(6)]
    sizes = layers[0].weight.detach().abs()
    expected = sizes > sizes.flatten().sort().values[31]
    prune_model(layers[0], 0.5)
    assert torch.equal(layers[0].weight != 0, expected)
    of_groups = layers[1].weight.detach().abs().view(8, 2, 4)
    prune_model(layers[1], pattern="2:4")
    kept = of_groups >= of_groups.sort(2).values[:, :, 2:3]
    assert torch.equal(layers[1].weight != 0, kept.view(8, 8))
    theirs: Any = torch.nn.utils.prune
    for method, others in (("l1_unstructured", ()), *(("ln_structured", (n, 0)) for n in (1, 2, math.inf))):
        layer = layers.pop()
        expected = getattr(theirs, method)(copy.deepcopy(layer), "weight", 0.5, *others).weight
        assert torch.equal(getattr(distprune, method)(layer, "weight", 0.5, *others).weight, expected), others
