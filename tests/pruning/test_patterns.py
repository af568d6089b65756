"""Patterns in place: every layout gives the plain answer, wherever shard edges cut groups, rows and blocks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
from distprune import Block, Channels, NByM, PerRow, Unstructured
from distprune.patterns.base import Pattern
from distprune.shards import device
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix
from tests.contract import FITTING, own_cases
from tests.layouts import LAYOUTS, Layout
from tests.pattern_oracle import SEED, keep_in_pattern
from tests.sampling import Combination, over_layouts
from tests.test_contract import Holder, local, whole_model
from tests.worlds import ProcessPool, drawing, run_threads
from tests.wrapped import whole

KINDS = (("normal", torch.float32), ("ties", torch.bfloat16), ("same", torch.float32), ("infinite", torch.float16))
# By pattern: score; each with the kinds of values in turn.
CASES: list[tuple[Pattern, str]] = [
    (NByM(2, 4), "magnitude"),
    (NByM(1, 2), "random"),
    (NByM(1, 4), "magnitude"),
    (PerRow(0.4), "magnitude"),
    (PerRow(0.1), "magnitude"),
    (PerRow(0.55), "random"),
    (Block(2, 0.5), "magnitude"),
    (Block(2, 0.1, "tensor"), "magnitude"),
    (Block(2, 0.3), "random"),
    (Block(2, 0.3, "tensor"), "random"),
    (Unstructured(0.3), "magnitude"),
    (Channels(0.4, 0), "magnitude"),
    (Channels(0.4, 1), "random"),
    (Channels(0.3, -1, "global"), "magnitude"),
    (Block(1, 0.4), "magnitude"),
    (Block(1, 0.3, "tensor"), "random"),
]
TURNS = [(case, KINDS[i % 4]) for i, case in enumerate(CASES)]
Values = dict[str, torch.Tensor]
Made = tuple[Pattern, dict[str, Any], Values, Values]


def made(combinations: Sequence[Combination] = TURNS) -> list[Made]:
    """Return (pattern, arguments, weights, what they are afterwards)."""
    cases: list[Made] = []
    for (pattern, score), (kind, dtype) in combinations:
        shapes = FITTING if isinstance(pattern, Block) else (*FITTING, (1, 8))
        values = whole_model(kind, dtype, shapes)
        left = [before.ne(0) for before in values.values()]
        keep = keep_in_pattern(pattern, list(values), list(values.values()), left, method=score, zeros="first")
        pruned = {n: before.masked_fill(~k, 0) for (n, before), k in zip(values.items(), keep, strict=True)}
        cases.append((pattern, {"score": score, "seed": SEED}, values, pruned))
    return cases


def check_rank(rank: int, layout: Layout, world_size: int, cases: list[Made]) -> None:
    spread = layout.make(world_size)
    for pattern, arguments, values, pruned in cases:
        held = Holder({name: spread(i, before) for i, (name, before) in enumerate(values.items())})
        report = prune.prune_model(held, pattern=pattern, include="*", **arguments)
        counts = {parameter.name: parameter for parameter in report.parameters}
        for i, (name, after) in enumerate(pruned.items()):
            num_zeros, num_before = int((after == 0).sum()), int((values[name] == 0).sum())
            assert (counts[name].num_zeros, counts[name].num_pruned) == (num_zeros, num_zeros - num_before)
            if (wanted := spread(i, after)) is not None:
                same = torch.equal(local(held.get_parameter(name)), local(wanted))
                assert same, f"{layout.name} {world_size=} {rank=} {pattern} {arguments} {name} {after.dtype}"
        assert report.pattern == repr(pattern)


@pytest.mark.parametrize(("layout", "world_size", "combinations"), over_layouts(CASES, KINDS))
@pytest.mark.sampled(10)
def test_equals_the_plain_answer(layout: Layout, world_size: int, combinations: list[Combination]) -> None:
    run_threads(world_size, check_rank, layout, world_size, made(combinations))


def own_on_rank(rank: int, layout: Layout, world_size: int, cases: list[tuple[dict[str, Any], Values]]) -> None:
    spread, values = layout.make(world_size), whole_model("ties", torch.float32, FITTING)
    for arguments, pruned in cases:
        held = Holder({name: spread(i, before) for i, (name, before) in enumerate(values.items())})
        prune.prune_model(held, include="*", **arguments)
        for i, (name, after) in enumerate(pruned.items()):
            if (wanted := spread(i, after)) is not None:
                assert torch.equal(local(held.get_parameter(name)), local(wanted)), (rank, layout.name, arguments, name)


@functools.cache
def own_answers() -> list[tuple[dict[str, Any], Values]]:
    """Return arguments with scores and patterns of one's own, and the weights that one process ends with."""
    cases = []
    for arguments in own_cases():
        model = Holder({name: value.clone() for name, value in whole_model("ties", torch.float32, FITTING).items()})
        assert 0 < prune.prune_model(model, include="*", **arguments).sparsity < 1
        cases.append((arguments, {name: parameter.detach() for name, parameter in model.named_parameters()}))
    return cases


@pytest.mark.parametrize(("layout", "world_size", "combinations"), over_layouts(range(len(own_cases()))))
@pytest.mark.sampled(5)
def test_scores_and_patterns_of_ones_own(layout: Layout, world_size: int, combinations: list[Combination]) -> None:
    cases = [own_answers()[number] for (number,) in combinations]
    run_threads(world_size, own_on_rank, layout, world_size, cases)


@pytest.mark.parametrize("name", ["hsdp", "plain", "shard1", "strided"])
@pytest.mark.sampled(2)
def test_chunks_that_end_within_units(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device, "_HOST_CHUNK", 7)
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    num_ranks = 4 if 4 in layout.world_sizes else 2
    run_threads(num_ranks, check_rank, layout, num_ranks, made())
    if name == "plain":
        run_threads(3, turned_on_rank, None)


class Turned(nn.Module):
    """Every kind of weight that is not (out, in), all held as matrices of 8 inputs or 24."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(3, 4, 8))
        self.experts.down_proj = nn.Parameter(torch.empty(3, 2, 8))
        with drawing(0):
            self.conv, self.turned, self.linear = nn.Conv2d(6, 4, 2), Conv1D(6, 8), nn.Linear(8, 6)
            for parameter in self.parameters():
                parameter.data.normal_()


def as_matrix(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.t() if name.startswith("turned") else weight.reshape(-1, 24 if name.startswith("conv") else 8)


def turned_oracle(pattern: Pattern) -> dict[str, torch.Tensor]:
    """Return the matrices as the pattern leaves them."""
    matrices = {name: as_matrix(name, p.detach()) for name, p in Turned().named_parameters() if p.ndim > 1}
    left = [torch.ones_like(matrix, dtype=torch.bool) for matrix in matrices.values()]
    keep = keep_in_pattern(pattern, list(matrices), list(matrices.values()), left, zeros="first")
    return {n: matrix.masked_fill(~of, 0) for (n, matrix), of in zip(matrices.items(), keep, strict=True)}


TURNED_PATTERNS: tuple[Pattern, ...] = (NByM(2, 4), PerRow(0.3), Block(2, 0.4))


def turned_on_rank(_: int, dim: int | None) -> None:
    for pattern in TURNED_PATTERNS:
        model, expected = Turned(), turned_oracle(pattern)
        if dim is not None:
            mesh = init_device_mesh("cpu", (3,))
            for module in model.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    placement = Shard(min(dim, parameter.ndim - 1))
                    sharded = distribute_tensor(parameter.detach().clone(), mesh, [placement], src_data_rank=None)
                    setattr(module, name, nn.Parameter(sharded))
        prune.prune_model(model, pattern=pattern)
        for name, wanted in expected.items():
            assert torch.equal(as_matrix(name, whole(model.get_parameter(name))), wanted), (pattern, name)


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
@pytest.mark.sampled(2)
def test_weights_kept_otherwise(dim: int | None) -> None:
    run_threads(3, turned_on_rank, dim)


def fsdp1_on_rank(_: int, use_orig_params: bool) -> None:
    from distprune.shards.layouts import find_flat_parts

    # Blocks compete by themselves: the experts are not there.
    for pattern in (*TURNED_PATTERNS[:2], Block(2, 0.4, "tensor")):
        model, expected = nn.ModuleDict({"only": Turned()}), turned_oracle(pattern)
        del model["only"].experts  # a flat parameter does not say that it holds experts
        names = {id(module): name for name, module in model["only"].named_modules()}
        sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        prune.prune_model(sharded, pattern=pattern, include="*weight")
        for key, of_module in find_flat_parts(sharded).items():
            if (part := of_module.get("weight")) is not None:
                name = f"{names[key]}.weight"
                wanted = expected[name].t() if name.startswith("turned") else expected[name]
                here = part.geometry.flat_indices(0, part.local.numel())
                assert torch.equal(part.local, wanted.reshape(-1)[here]), (pattern, name)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.sampled(2)
def test_flat_parameters(pool: ProcessPool, world_size: int, use_orig_params: bool) -> None:
    pool.run(world_size, fsdp1_on_rank, use_orig_params)


def test_shards_that_say_how_they_are_a_matrix() -> None:
    """Of equal blocks the first go, of one weight each too."""
    shard = prune.LocalShard("w", torch.ones(8, 4), Geometry.whole((8, 4)), matrix=Matrix(4, 8, transposed=True))
    prune.prune_shards([shard], pattern=Block(1, 0.25))
    assert torch.equal(shard.local != 0, torch.arange(4).expand(8, 4) > 0)
    wrong = dataclasses.replace(shard, matrix=Matrix(4, 4))
    with pytest.raises(ValueError, match=r"'w' of shape .*has not as many elements"):
        prune.prune_shards([wrong], pattern=NByM(2, 4))


def traffic_on_rank(_: int, pattern: Pattern, dim: int, width: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2,))
    with drawing(0):
        module, weight = nn.Linear(1, 1, bias=False), torch.randn(64, width)
    module.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)], src_data_rank=None))
    report = prune.prune_model(module, pattern=pattern)
    return report.num_rounds, report.num_bytes


def traffic(pattern: Pattern, dim: int, width: int) -> tuple[int, int]:
    """Return rounds, and the most bytes of a rank."""
    both = run_threads(2, traffic_on_rank, pattern, dim, width)
    assert both[0][0] == both[1][0]
    return both[0][0], max(num_bytes for _, num_bytes in both)


# To agree, the census of one parameter, and to report; each but the first with a word that says whether all went well.
BASE = 64 + 16 + 32


def test_whole_groups_and_rows_are_not_communicated() -> None:
    assert traffic(NByM(2, 4), 0, 48) == (3, BASE)
    assert traffic(PerRow(0.5), 0, 48) == (3, BASE)
    assert traffic(NByM(2, 4), 1, 48) == (3, BASE)  # cut between groups


def test_blocks() -> None:
    whole, cut = traffic(Block(4, 0.5), 0, 48), traffic(Block(4, 0.5), 1, 52)
    assert cut[0] == whole[0] + 3
    assert whole[0] == 1 + 1 + 1 + 4 + 1
    # 8 bytes to each of two ranks and homes, what is told of one parameter, two numbers of 16 cut blocks, which
    # are a run each, a byte of answers from each home, and two words that say whether all went well.
    assert cut[1] - whole[1] == 16 + 2 * (8 + 24) + 16 * (16 + 16) + 2 + 16


def test_patterns_refuse_nonsense() -> None:
    kinds: tuple[Any, ...] = (Unstructured, PerRow)
    refused: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        *((kind, (share,), ValueError, "is outside") for kind in kinds for share in (-0.1, 1.5, math.nan, math.inf)),
        *((kind, (share,), TypeError, "sparsity must be") for kind in kinds for share in ("0.5", True, None)),
        *((NByM, pair, ValueError, "is not a pattern") for pair in ((0, 4), (4, 4), (5, 4), (-1, 2))),
        (NByM, (2, 4.0), TypeError, "m must be an int"),
        (Block, (0, 0.5), ValueError, "size=0 is less than 1"),
        *((Block, (size, 0.5), TypeError, "size must be an int") for size in (4.0, True, "4")),
        *((Channels, (0.5, dim), TypeError, "dim must be an int") for dim in (4.0, True, "4")),
    ]
    for kind, arguments, error, words in refused:
        with pytest.raises(error, match=words):
            kind(*arguments)
    n, m = np.array([2, 4])
    assert repr((NByM(n, m), Block(m, 0.5), Channels(0.5, n))) == repr((NByM(2, 4), Block(4, 0.5), Channels(0.5, 2)))


def test_rows_lose_a_fraction_of_what_is_left() -> None:
    half: Any = Fraction(1, 2)
    masks = []
    for share in (half, 0.5):
        with drawing(0):
            layer = nn.Linear(8, 8)
        prune.l1_unstructured(layer, "weight", 0.25)
        prune.l1_pattern(layer, "weight", PerRow(share))
        masks.append(layer.get_buffer("weight_mask"))
    assert torch.equal(masks[0], masks[1])
