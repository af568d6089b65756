"""What is wrong raises on every rank, names the value, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typing_extensions import override

import distprune as prune
from distprune import Block, Channels, NByM, PerRow, Unstructured, prune_model, sparsity
from distprune.collectives.base import has_lost_ranks
from distprune.patterns.base import Choice, Pattern, Ranked
from tests.contract import OwnScore
from tests.decoder import BLOCK_WEIGHTS, decoder
from tests.pruning.failing import raised
from tests.worlds import all_raise, drawing, run_threads


def failing(
    world_size: int, change: Callable[[int, nn.Module], dict[str, Any]], kind: type[Exception], text: str
) -> list[Exception]:
    """Return what each rank raises, having checked that all of them do, in these words, and that nothing changed."""

    def on_rank(rank: int) -> Exception:
        model = decoder()
        model.odd = nn.Parameter(torch.ones(4, 4, 4))
        with drawing(0):
            model.back = nn.ConvTranspose1d(4, 4, 4)
        arguments = change(rank, model)
        arguments.setdefault("sparsity", None if "pattern" in arguments else 0.5)
        return raised(rank, model, lambda _, model: prune_model(model, **arguments))

    errors = run_threads(world_size, on_rank) if world_size else [on_rank(0)]
    for error in errors:
        assert isinstance(error, kind)
        assert re.search(text, str(error)), error
    return errors


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"sparsity": 1.5}, ValueError, r"sparsity=1.5 is outside \[0.0, 1.0\]"),
        ({"sparsity": -0.1}, ValueError, "outside"),
        ({"sparsity": float("nan")}, ValueError, "outside"),
        ({"sparsity": 1}, TypeError, r"sparsity=1 must be a share such as 0.5; Unstructured\(1\) is a count"),
        ({"sparsity": np.int64(1)}, TypeError, "must be a share such as 0.5"),
        ({"sparsity": np.int64(1), "pattern": "row"}, TypeError, "must be a share such as 0.5"),
        (
            {"sparsity": dict.fromkeys([*BLOCK_WEIGHTS, "layers.0.up.weigth"], 0.5)},
            ValueError,
            r"sparsity names 'layers.0.up.weigth', which is no parameter of the model; near it are 'layers...up.w",
        ),
        ({"sparsity": {"layers.0.up.weight": 0.5}}, ValueError, "there is no sparsity for"),
        ({"sparsity": {"layers.0.up.weight": 0.5}, "pattern": "row"}, ValueError, "there is no sparsity for"),
        ({"sparsity": {"layers.0.up.weight": 1.5}}, ValueError, "outside"),
        ({"sparsity": {"layers.0.up.weight": "half"}}, TypeError, "must be a float"),
        ({"sparsity": {"layers.0.up.weight": 0.5}, "scope": "global"}, ValueError, "goes with scope='tensor'"),
        ({"sparsity": True}, TypeError, "sparsity must be"),
        ({"sparsity": "0.5"}, TypeError, "sparsity must be"),
        ({"sparsity": None}, ValueError, "pattern='unstructured' needs sparsity"),
        ({"pattern": Unstructured(769)}, ValueError, "sparsity=769 is more than the 768 elements in all"),
        ({"pattern": Unstructured(193, "tensor")}, ValueError, "the 192 .* in 'layers.0.up.weight'"),
        (
            {"score": "wonder"},
            ValueError,
            r"score='wonder' is not known; use magnitude, random, gradient, taylor, in Spars",
        ),
        ({"score": 3}, TypeError, "score must be a name, a Score or a function"),
        (
            {"score": "wanda"},
            ValueError,
            r"score 'wanda' needs \['input_norm'\] of 'layers.0.up.weight', .*: prune_blocks\(.* method=\"wanda\"\)",
        ),
        ({"score": "movement"}, ValueError, r"needs \['movement'\] of .*, which was not given; SparseTraining sums it"),
        ({"score": "sparsegpt"}, ValueError, r"is not known; .*: prune_blocks\(.* method=\"sparsegpt\"\)"),
        ({"score": lambda w: w[:-1]}, ValueError, r"'<lambda>' returned .* elements of 'layers.0.up"),
        ({"scope": "row"}, ValueError, "scope='row' is not known"),
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"seed": True}, TypeError, "seed must be an int"),
        (
            {"include": ["*.up.weigth"]},
            ValueError,
            r"'\*.up.weigth' matches no parameter .*; near it are 'layers...up.w",
        ),
        ({"include": "up"}, ValueError, r"whole names: '\*up\*' would match 4, such as 'layers.0.up.weight'"),
        ({"exclude": ["*.bias", "nothing"]}, ValueError, "'nothing' matches no parameter"),
        ({"include": [3]}, TypeError, "modules, or lists of them, not int"),
        ({"include": 0}, TypeError, "modules, or lists of them, not int"),
        ({"evidence": [1]}, TypeError, r"evidence takes {'gradient': {name: tensor}}, not a list in"),
        ({"evidence": {"gradient": torch.ones(3)}}, TypeError, "evidence takes .*, not a Tensor in its place"),
        (
            {"evidence": {"gradients": {"layers.0.up.weight": torch.ones(24, 8)}}, "score": "taylor"},
            ValueError,
            "score 'taylor' reads no evidence 'gradients'; it takes gradient",
        ),
        (
            {"evidence": {"gradient": {"layers.0.up.weight": torch.ones(24, 8)}}},
            ValueError,
            "score 'magnitude' reads no evidence 'gradient'; it takes none",
        ),
        ({"exclude": torch.ones(2)}, TypeError, "modules, or lists of them, not Tensor"),
        ({"exclude": ["*"]}, ValueError, "no parameter to prune"),
        ({"pattern": NByM(2, 4), "sparsity": 0.5}, ValueError, r"pattern=NByM\(n=2, m=4\) says how much is pruned"),
        ({"pattern": "2:4", "sparsity": 0.5}, ValueError, "'2:4' says how much is pruned"),
        ({"pattern": NByM(2, 4), "scope": "tensor"}, ValueError, "scope='tensor' does not go with NByM"),
        ({"pattern": PerRow(0.5), "scope": "global"}, ValueError, "scope='global' does not go with PerRow"),
        ({"pattern": "4:2"}, ValueError, "4:2 is not a pattern"),
        ({"pattern": "blocks"}, ValueError, "pattern='blocks' is not known; use 'unstructured'"),
        ({"pattern": "row"}, ValueError, "pattern='row' needs sparsity"),
        ({"pattern": 24}, TypeError, "pattern must be a Pattern or its text, such as '2:4', not 24"),
        ({"pattern": Channels(0.5, 2)}, IndexError, "Invalid index 2"),
        ({"pattern": NByM(2, 5)}, ValueError, "2:5 does not fit 'layers.0.up.weight': its 8 inputs"),
        ({"pattern": Block(5, 0.5)}, ValueError, "blocks of 5 x 5 do not fit 'layers.0.up.weight'"),
        ({"pattern": Block(2, 0.5), "scope": "row"}, ValueError, "scope='row' is not known"),
        ({"pattern": NByM(2, 4), "include": ["layers.0.up.*"]}, ValueError, "'layers.0.up.bias' .*is no matrix"),
        ({"pattern": NByM(2, 4), "include": "odd"}, NotImplementedError, "the input dims of 'odd'.* are not known"),
        ({"pattern": NByM(2, 4), "include": "back.weight"}, NotImplementedError, "'back.weight', .*ConvTranspose1d"),
    ],
)
@pytest.mark.parametrize("world_size", [0, 2])
def test_wrong_arguments(world_size: int, arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    failing(world_size, lambda *_: arguments, kind, text)


@pytest.mark.parametrize("score", ["magnitude", "random"])
def test_nan_weights_are_named_and_counted(score: str) -> None:
    def change(_: int, model: nn.Module) -> dict[str, Any]:
        with torch.no_grad():
            model.get_parameter("layers.1.down.weight")[2, :3] = torch.nan
        return {"score": score}

    for world_size in (0, 3):
        failing(world_size, change, ValueError, r"'layers.1.down.weight' \(3\)")


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "row", "block:2", "channels:0"])
def test_nan_on_one_rank_of_a_sharded_model(pattern: str) -> None:
    def on_rank(rank: int) -> None:
        model = decoder()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        if rank == 1:
            weight = model.get_parameter("layers.0.up.weight")
            assert isinstance(weight, DTensor)
            weight.to_local().data[0, 0] = torch.nan
        prune_model(model, None if pattern == "2:4" else 0.5, pattern=pattern)

    all_raise(2, on_rank, kind=ValueError, match=r"'layers.0.up.weight' \(1\)")


def scaled(factor: float) -> prune.Score:
    """Return a user's score, whose attributes are compared."""
    score: Any = OwnScore()
    score.factor = factor
    return score  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("sparsity", (0.5, 0.6)),
        ("scope", ("global", "tensor")),
        ("seed", (1, 2)),
        ("score", ("magnitude", "random")),
        ("score", (prune.ChannelNorm(1), prune.ChannelNorm(2))),
        ("score", (scaled(1.0), scaled(2.0))),
    ],
)
def test_ranks_called_with_different_arguments(key: str, values: tuple[Any, Any]) -> None:
    failing(2, lambda rank, _: {key: values[rank]}, ValueError, f"{key}: .* on rank 0; .* on rank 1")


def test_wrong_on_one_rank_only() -> None:
    errors = failing(3, lambda rank, _: {"include": [3]} if rank == 1 else {}, TypeError, "not int")
    assert "rank 1 of 3" in str(errors[0])


@dataclass(frozen=True)
class Failing(Pattern):
    """Half of all elements; fails on the last rank, while the others communicate."""

    when: str = ""
    needs_matrix = False

    @override
    def __str__(self) -> str:
        return "failing"

    @override
    def choose(self, ranked: Ranked) -> Choice:
        self._fail(ranked, "at once")
        assert int(ranked.comm.sum(torch.ones(1, dtype=torch.int64))) == ranked.comm.size
        self._fail(ranked, "after a round")
        choice = Unstructured(0.5).choose(ranked)
        self._fail(ranked, "at the end")
        return choice

    def _fail(self, ranked: Ranked, when: str) -> None:
        if when == self.when and ranked.comm.rank == ranked.comm.size - 1:
            raise KeyError(when)


@pytest.mark.parametrize("when", ["at once", "after a round", "at the end"])
def test_a_users_pattern_fails_on_one_rank(when: str) -> None:
    errors = failing(3, lambda *_: {"pattern": Failing(when)}, Exception, when)
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError, KeyError]
    assert f"rank 2 of 3: KeyError('{when}')" in str(errors[0])
    assert not any(map(has_lost_ranks, errors))  # else what comes next would not be told


@torch.no_grad()
def other_value(model: nn.Module) -> None:
    model.get_parameter("layers.1.up.weight")[0, 0] += 1


def other_shape(model: nn.Module) -> None:
    with drawing(0):
        model.get_submodule("layers.0").up = nn.Linear(8, 23)


@pytest.mark.parametrize(
    ("num_ranks", "change", "text"),
    [
        (2, other_shape, "disagree on parameter 'layers.0.up.weight'"),
        (3, other_value, "hold the same values of 'layers.1.up.weight'"),
    ],
)
def test_ranks_with_different_models(num_ranks: int, change: Callable[[nn.Module], None], text: str) -> None:
    def on_the_last(rank: int, model: nn.Module) -> dict[str, Any]:
        if rank == num_ranks - 1:
            change(model)
        return {}

    failing(num_ranks, on_the_last, ValueError, text)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "channels:0"])
def test_parts_that_do_not_fit_together(pattern: str) -> None:
    """Ranks of which one cuts rows and the other columns; a group of some of the ranks of a mesh."""
    sparsity = None if pattern == "2:4" else 0.5

    def cut(world_size: int, dim: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (world_size,))
        weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(dim)], src_data_rank=None)
        return nn.ParameterList([nn.Parameter(weight)])

    def otherwise(rank: int) -> None:
        prune_model(cut(2, rank), sparsity, pattern=pattern, include="*")

    def some(rank: int) -> None:
        model = cut(4, 0)
        group = torch.distributed.new_group([0, 1])
        if rank < 2:
            prune_model(model, sparsity, pattern=pattern, include="*", group=group)

    for world_size, on_rank in ((2, otherwise), (4, some)):
        for error in run_threads(world_size, on_rank, catch=True, draws=True)[:2]:
            assert isinstance(error, ValueError)
            assert "of the 64 elements of '0' the ranks own" in str(error)


def windows(model: nn.Module) -> object:
    return prune.perplexity(model, torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (lambda model: prune_model(model, 0.5), prune.sparsity, ("prune_model", "sparsity")),
        (lambda model: prune.compute_masks(model, 0.5), prune.Masks.of, ("compute_masks", "Masks.of")),
        (lambda model: prune_model(model, 0.5), windows, ("prune_model", "perplexity")),
        (windows, prune.hold_zeros, ("perplexity", "hold_zeros")),
        (lambda model: prune.prune_blocks(model, "self", 0.5), prune.sparsity, ("prune_blocks", "sparsity")),
        (prune.sparsity, prune.hold_zeros, ("sparsity", "hold_zeros")),
        (prune.Masks.of, prune.sparsity, ("Masks.of", "sparsity")),
    ],
)
def test_ranks_in_different_functions(
    first: Callable[[nn.Module], object], second: Callable[[nn.Module], object], names: tuple[str, str]
) -> None:
    def on_rank(rank: int) -> None:
        model = decoder()
        fully_shard(model)
        (second if rank else first)(model)

    said = f'ranks have called different functions: "{names[0]}" on rank 0; "{names[1]}" on rank 1;'
    all_raise(2, on_rank, kind=ValueError, match=said)


def sharing(what: str) -> nn.Sequential:
    """Return two layers of which elements of the second are no memory of their own, or read otherwise than stored."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    weight, complexes = layers.get_parameter("0.weight").detach(), torch.randn(8, 8, dtype=torch.complex64).conj()
    made = {
        "the same": weight,
        "part": weight.view(-1)[8:].view(7, 8),
        "columns": weight[:, 1::2],
        "transposed": weight.t(),
        "rows expanded": torch.randn(1, 8).expand(8, 8),
        "columns expanded": torch.randn(8, 1).expand(8, 8),
        "windows": torch.randn(16).unfold(0, 8, 1),
        "negated": complexes.imag,
        "conjugated": complexes,
    }
    layers[1].register_parameter("weight", nn.Parameter(made[what], requires_grad=False))
    return layers


@pytest.mark.parametrize(
    ("what", "message"),
    [
        *[(what, "'0.weight' and '1.weight' share memory") for what in ("the same", "part", "columns", "transposed")],
        *[(what, "elements of '1.weight' share memory") for what in ("rows expanded", "columns expanded", "windows")],
        *[(what, "'1.weight' is a negated or conjugated view") for what in ("negated", "conjugated")],
    ],
)
def test_memory_that_is_not_a_weights_own(what: str, message: str) -> None:
    with drawing(0):
        model = sharing(what)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    models = [nn.Sequential(nn.Linear(8, 8)), model]
    all_raise(2, lambda rank: prune_model(models[rank], 0.5, include="*"), kind=ValueError, match=message)
    assert [*map(torch.equal, model.parameters(), before)] == [True, True]
    assert sparsity(model, include="*") == 0.0  # which writes nothing


def test_views_of_one_buffer_that_share_no_element() -> None:
    with drawing(0):
        buffer = torch.randn(16, 8)
    views = (buffer[:8, ::2], buffer[:8, 1::2], buffer[8:12], buffer[12:, :4].t(), buffer[12, 4:], buffer[13:, 4:])
    report = prune_model(nn.ParameterList(views), 0.5, include="*")
    assert report.num_zeros == 64 == int((buffer == 0).sum())
