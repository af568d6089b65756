"""One-shot pruning is the papers' on one rank, and the same on several."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import override

from distprune import ADMM, Block, Channels, NByM, PerRow, Unstructured, allocate, erk, sparsity
from distprune.calibration.moments import Moments
from distprune.models.linear_layers import linear_layers
from distprune.models.units import Units
from distprune.oneshot.damping import damped_factor
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.solver import Solver
from distprune.oneshot.sparsegpt import DAMPING, SparseGPT
from distprune.patterns.base import Pattern
from distprune.removal.criteria import OBS
from distprune.removal.readers import Asked
from distprune.removal.remover import UnitRemover
from distprune.scores.base import Elements, Score
from tests import oneshot_oracle as oracle, solver_oracle
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.oneshot.alike import (
    BLOCKS,
    CASES,
    FEW,
    PLAIN,
    TARGETS,
    TOKENS,
    Case,
    Pruned,
    check_counts,
    check_ranks,
    matrices,
    options,
    pruned,
    sharded,
    share_alike,
)
from tests.sampling import all_pairs, in_turn, only_whole
from tests.worlds import ProcessPool, run_threads
from tests.wrapped import whole

PATTERNS: dict[Pattern, solver_oracle.Pattern] = {
    Unstructured(0.5): 0.5,
    NByM(2, 4): solver_oracle.NM(2, 4),
    NByM(4, 8): solver_oracle.NM(4, 8),
    Block(4, 0.4): solver_oracle.Squares(4, 0.4),
}


@pytest.mark.parametrize(("architecture", "patterns"), in_turn(list(ONE_SHOT_ARCHITECTURES), list(PATTERNS), num=2))
@pytest.mark.sampled(4)
def test_wanda_is_the_papers(architecture: str, patterns: list[Pattern]) -> None:
    for pattern in patterns:
        model, plain = tiny_model(architecture), tiny_model(architecture)
        masks = oracle.prune_model(plain, TOKENS, "wanda", PATTERNS[pattern])
        report = prune_blocks(model, TOKENS, method="wanda", pattern=pattern)
        assert share_alike(model, masks) == 1.0
        for name, weight in matrices(model).items():
            assert torch.equal(weight, matrices(plain)[name]), (pattern, name)
        check_counts(model, report, "wanda", pattern)


PAPERS = [  # of the manners in which weights that stay move, those that are the defaults
    *itertools.product(("block own sparsegpt", "layer dense admm"), PATTERNS)
]
OTHERS = [
    ("layer own sparsegpt", Unstructured(0.5)),
    ("block dense sparsegpt", NByM(2, 4)),
    ("layer dense sparsegpt", Unstructured(0.5)),
    ("block own admm", NByM(2, 4)),
    ("layer own admm", NByM(4, 8)),
    ("block dense admm", Unstructured(0.5)),
    ("layer dense wanda", NByM(2, 4)),
    ("block dense wanda", Block(4, 0.4)),
]


ARCHITECTURES_OF_OTHERS = ("llama", "gpt_neox", "qwen2_moe")
PAIRS = [
    *(
        (architecture, manner, pattern)
        for architecture, pattern, manner in all_pairs(
            list(ONE_SHOT_ARCHITECTURES), list(PATTERNS), ("block own sparsegpt", "layer dense admm")
        )
    ),
    *((ARCHITECTURES_OF_OTHERS[i % 3], *other) for i, other in enumerate(OTHERS)),
]
PRODUCT = [
    *((architecture, *manner) for architecture in ONE_SHOT_ARCHITECTURES for manner in PAPERS),
    *((architecture, *manner) for architecture in ARCHITECTURES_OF_OTHERS for manner in OTHERS),
]


@pytest.mark.parametrize(
    ("architecture", "method", "pattern"),
    [pytest.param(*row, marks=() if row in PAIRS else pytest.mark.whole) for row in PRODUCT],
    ids=str,
)
@pytest.mark.sampled(10)
def test_updated_weights_are_the_papers(architecture: str, method: str, pattern: Pattern) -> None:
    model, plain = tiny_model(architecture), tiny_model(architecture)
    oracle.prune_model(plain, TOKENS, pattern=PATTERNS[pattern], **options(method))
    report = prune_blocks(model, TOKENS, pattern=pattern, **PLAIN, **options(method))
    wanted = matrices(plain)
    # By the weights, not the masks: of a dead input all weights are zero, also in blocks that stay.
    assert share_alike(model, {name: weight != 0 for name, weight in wanted.items()}) >= 0.999
    for name, weight in matrices(model).items():
        assert float((weight - wanted[name]).norm() / wanted[name].norm()) < 0.02
    check_counts(model, report, method, pattern)


def on_rank(_: int, architecture: str, mesh_shape: tuple[int, ...], cases: list[Case]) -> list[Pruned]:
    return [pruned(sharded(tiny_model(architecture), mesh_shape), case) for case in cases]


Key = tuple[str, tuple[int, ...]]  # FSDP2, and HSDP
RANKS: list[Key] = [
    *((architecture, (2,)) for architecture in ONE_SHOT_ARCHITECTURES if architecture != "llama"),
    *((architecture, (3,)) for architecture in ("llama", "gpt2", "phi", "mixtral")),
]
ON_TWO: list[Key] = [(architecture, (2,)) for architecture in ("llama", "gpt2", "mixtral")]
OF_FOUR: list[Case] = [*FEW, ("permuted wanda", NByM(2, 4))]


@pytest.mark.parametrize(
    ("key", "cases"),
    [
        pytest.param(ON_TWO[0], CASES[::4], id="2-llama-some"),
        only_whole(ON_TWO[0], [case for case in CASES if case not in CASES[::4]], id="2-llama-others"),
        *in_turn(ON_TWO[1:], [*TARGETS, ("wanda", BLOCKS)], num=3),
        *in_turn(RANKS, FEW),
        *in_turn([("llama", (2, 2)), ("gpt2", (4,)), ("mixtral", (2, 2))], OF_FOUR),
        *(only_whole(key, OF_FOUR) for key in (("llama", (4,)), ("gpt2", (2, 2)), ("mixtral", (4,)))),
    ],
)
@pytest.mark.sampled(5)
def test_ranks_do_what_one_does(pool: ProcessPool, key: Key, cases: list[Case]) -> None:
    everywhere = pool.run(math.prod(key[1]), on_rank, *key, cases)
    check_ranks(everywhere, partial(tiny_model, key[0]), cases)


def waves_on_rank(_: int) -> list[Pruned]:
    """Prune experts one at a time, as with very little memory."""
    model = sharded(tiny_model("mixtral"))
    report = prune_blocks(model, TOKENS, method="admm", pattern=NByM(2, 4), seed=3, expert_memory=1, **PLAIN)
    return [({name: whole(p) for name, p in model.named_parameters()}, report)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_in_waves(num_ranks: int) -> None:
    """Are pruned as all at once on one rank."""
    check_ranks(run_threads(num_ranks, waves_on_rank), partial(tiny_model, "mixtral"), [("admm", NByM(2, 4))])


@pytest.mark.parametrize(("key", "numbers"), in_turn(ON_TWO, range(4), num=2))
@pytest.mark.sampled(1)
def test_every_layer_its_own_sparsity(pool: ProcessPool, key: Key, numbers: list[int]) -> None:
    shares = {name: 0.2 + 0.1 * (i % 6) for i, name in enumerate(matrices(tiny_model(key[0])))}
    rows, matrix = PerRow(shares), Unstructured(shares, "tensor")
    cases: list[Case] = [("wanda", matrix), ("sparsegpt", rows), ("admm", rows), ("sparsegpt", matrix)]
    test_ranks_do_what_one_does(pool, key, [cases[number] for number in numbers])


def test_sparsities_by_parameter() -> None:
    """As ``erk`` names them; the layers of a parameter (experts) have one."""
    model, plain = tiny_model("mixtral"), tiny_model("mixtral")
    report = prune_blocks(
        model, TOKENS, method="sparsegpt", pattern="row", sparsity=dict.fromkeys(erk(model, 0.6), 0.4)
    )
    prune_blocks(plain, TOKENS, method="sparsegpt", pattern=PerRow(0.4))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    check_counts(model, report, "sparsegpt", PerRow(0.4))
    with pytest.raises(ValueError, match="there is no sparsity for"):
        prune_blocks(model, TOKENS, method="wanda", pattern="row", sparsity={"model.layers.1": 0.5})


def test_none_of_a_layer_is_a_share_of_its_columns() -> None:
    model = tiny_model("llama")
    shares = dict.fromkeys(matrices(model), 0.5) | {"model.layers.0.mlp.up_proj": 0}
    prune_blocks(model, TOKENS, method="sparsegpt", pattern=Unstructured(shares, "tensor"))
    zeros = {name: int((weight == 0).sum()) for name, weight in matrices(model).items()}
    assert [name for name, num in zeros.items() if not num] == ["model.layers.0.mlp.up_proj"]


def test_a_share_of_numpy_is_a_share() -> None:
    shares: tuple[Any, Any] = (0.5, np.float32(0.5))
    models = [tiny_model("llama"), tiny_model("llama")]
    for model, share in zip(models, shares, strict=True):
        prune_blocks(model, TOKENS, method="admm", pattern=Block(2, share))
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_compiled_blocks_are_pruned_as_others(way: str) -> None:
    plain, model, tokens = tiny_model("llama"), tiny_model("llama"), samples(4, 16)
    blocks: Any = model.get_submodule("model.layers")
    for number, block in enumerate(blocks):
        if way == "wrapped":
            blocks[number] = torch.compile(block, backend="eager")
        else:
            block.compile(backend="eager")
    shares = [[*allocate(it, tokens, 0.5).values()] for it in (plain, model)]
    assert shares[0] == shares[1]
    for it in (plain, model):
        prune_blocks(it, tokens, pattern="2:4")
    assert sparsity(plain) == 0.5
    for weight, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor is in prototype stage")
def test_the_kernels_give_the_dense_answer(method: Any) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = tiny_model("llama", **sizes, num_key_value_heads=1).half()
    prune_blocks(model, samples(4, 64), method=method, pattern="2:4")
    for name, weight in matrices(model).items():
        weight = weight.detach().cuda()
        sparse: Any = torch.sparse.to_sparse_semi_structured(weight)
        assert torch.equal(sparse.to_dense(), weight), name  # it drops, without a word, what does not fit
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1)).half().cuda()
        wanted = F.linear(x.float(), weight.float())
        found = F.linear(x, sparse)
        assert found.dtype is torch.float16
        # Half's own rounding of the result, and of sums in another order.
        torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))


class Squared(Score):
    """As Wanda, of squares: another score of the same order."""

    needs = ("input_norm",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return (elements.weight * elements["input_norm"]).square()


def test_a_score_of_ones_own_and_a_pattern_by_its_text() -> None:
    one, other = tiny_model("llama"), tiny_model("llama")
    report = prune_blocks(one, TOKENS, method=Squared(), pattern="row", sparsity=0.5)
    assert (report.method, report.pattern) == ("Squared", "PerRow(sparsity=0.5)")
    prune_blocks(other, TOKENS, method="wanda", pattern=Unstructured(0.5))
    for name, weight in matrices(one).items():
        assert float(((weight != 0) == (matrices(other)[name] != 0)).float().mean()) > 0.999
    with pytest.raises(NotImplementedError, match="SparseGPT decides block of columns by block of columns"):
        prune_blocks(one, TOKENS, method="sparsegpt", pattern=Channels(0.5, 0))
    with pytest.raises(NotImplementedError, match="ADMM decides rows, or blocks of weights"):
        prune_blocks(one, TOKENS, method="admm", pattern=Channels(0.5, 0))


def remover(num_kept: int) -> UnitRemover:
    """Return what removes all but ``num_kept`` of three inputs of ``up``."""
    linear = linear_layers(nn.Sequential(nn.Linear(3, 2, bias=False)))["0"]
    units = Units("mlp", "", 3, 1, (), "up", torch.arange(3)[:, None])
    return UnitRemover({"up": Asked("", units, num_kept, linear)}, OBS(), "least_squares")


def moments_of(products: torch.Tensor) -> Moments:
    ones = torch.ones(3).double()
    return Moments(("up",), 4, ones, ones, ones, products=products.double(), gram=torch.eye(3).double())


@pytest.mark.parametrize("solver", [ADMM(), SparseGPT(), remover(2)], ids=lambda of: type(of).__name__)
def test_damping_is_raised_or_the_layer_named(solver: Solver) -> None:
    """One rule for all that invert: what rounding or few tokens left indefinite is damped tenfold until it is not."""
    indefinite = torch.full((3, 3), 3.0).fill_diagonal_(1)
    assert all(bool(of.isfinite().all()) for of in solver.prepare(moments_of(indefinite)).values())
    with pytest.raises(ValueError, match=r"the 3 inputs of 'up' have no inverse, although the damping was raised"):
        solver.prepare(moments_of(torch.full((3, 3), torch.nan)))


def test_damping_is_raised_until_it_helps() -> None:
    assert SparseGPT().prepare(moments_of(torch.eye(3)))["damping"] == DAMPING
    products = torch.tensor([[1.0, 1.05, 1.0], [1.05, 1.0, 1.0], [1.0, 1.0, 1.0]])  # not positive semidefinite
    prepared = SparseGPT().prepare(moments_of(products))
    assert prepared["damping"] == 10 * DAMPING
    damped = 2 / 4 * (products + 10 * DAMPING * torch.eye(3))  # of 4 tokens
    torch.testing.assert_close(prepared["upper"].t() @ prepared["upper"] @ damped, torch.eye(3), rtol=0, atol=1e-4)


def factored_on_rank(_: int) -> None:
    prune_blocks(sharded(tiny_model("bloom")), TOKENS, method="admm", pattern="2:4")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_input_is_factored_by_one_rank(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Once for the way to its target, once to be solved."""
    seen: list[str] = []

    def factor(products: torch.Tensor, damping: float, name: str, **others: Any) -> Any:
        seen.append(name)
        return damped_factor(products, damping, name, **others)

    for module in ("admm", "retarget"):
        monkeypatch.setattr(f"distprune.oneshot.{module}.damped_factor", factor)
    run_threads(num_ranks, factored_on_rank)
    of_block = {"self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert Counter(seen) == Counter(dict.fromkeys(of_block, 2 * 2))
