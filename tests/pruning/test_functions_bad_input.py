"""What ``torch.nn.utils.prune``'s functions are given wrong raises on every rank and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import override

import distprune
from distprune.collectives.communicator import Alone
from tests.pruning.failing import Act, World, failing, local, made, raised, spread_over
from tests.sampling import in_turn, only_whole
from tests.worlds import ProcessPool, run_threads

theirs: Any = torch.nn.utils.prune
ours: Any = distprune
Mistake = tuple[Act, type[Exception], str]  # here on a library and a layer; a pattern of the text
WORLDS: list[World] = [(0, "plain"), (2, "plain"), (2, "shard0"), (3, "shard1"), (2, "fsdp2")]
SCORES = torch.arange(24.0).view(6, 4) * 7 % 24 - 11


class Method(distprune.BasePruningMethod):  # a user's, made of a function
    PRUNING_TYPE = "unstructured"

    def __init__(self, compute: Callable[[Any, Any], Any] = lambda _, mask: mask) -> None:
        self.compute = compute

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = self.compute(t, default_mask)
        return mask


UnknownType: Any = type("UnknownType", (Method,), {"PRUNING_TYPE": "wonder"})
NoDim: Any = type("NoDim", (Method,), {"PRUNING_TYPE": "structured"})


def l1(net: Any, amount: Any = 0.5, name: str = "weight", scores: Any = None) -> None:
    ours.l1_unstructured(net.up, name, amount, scores)


def both(net: Any, method: Any = distprune.L1Unstructured, pairs: Any = None, **kwargs: Any) -> None:
    pairs = [(net.up, "weight"), (net.down, "weight")] if pairs is None else pairs
    ours.global_unstructured(pairs, method, **({} if method is Method else {"amount": 0.5}), **kwargs)


# What is done before: nothing, a first pruning, one that prunes nothing.
ONCE, AGAIN, KEPT = lambda *_: None, lambda _, net: l1(net, 2), lambda _, net: ours.identity(net.up, "weight")
MISTAKES: list[Mistake] = [  # the layer's weight is 6 x 4
    (lambda p, m: p.l1_unstructured(m, "weight", "0.5"), TypeError, "'0.5'"),
    (lambda p, m: p.random_unstructured(m, "weight", None), TypeError, "None"),
    (lambda p, m: p.ln_structured(m, "weight", [1], 2, 0), TypeError, r"\[1\]"),
    (lambda p, m: p.l1_unstructured(m, "weight", 1.5), ValueError, "amount=1.5"),
    (lambda p, m: p.random_structured(m, "weight", -1, 0), ValueError, "amount=-1"),
    (lambda p, m: p.l1_unstructured(m, "weight", 25), ValueError, "25.* (24|4) .*weight"),
    (lambda p, m: p.random_unstructured(m, "weight", 25), ValueError, "25.* (24|4) .*weight"),
    (lambda p, m: p.ln_structured(m, "weight", 5, 2, 1), ValueError, "5.* [1-4] .*weight"),
    (lambda p, m: p.l1_unstructured(m, "wieght", 1), AttributeError, "wieght"),
    (lambda p, m: p.l1_unstructured(m, "scale", 1), TypeError, "scale"),
    (lambda p, m: p.custom_from_mask(m, "weight", torch.ones(4, 6)), AssertionError, r"\[6, 4\].*\[4, 6\]"),
    (lambda p, m: p.l1_unstructured(m, "weight", 1, torch.ones(24)), AssertionError, r"\[24\].*\[6, 4\]"),
    (lambda p, m: p.remove(m, "bias"), ValueError, "'bias'"),
    (lambda p, m: p.ln_structured(m, "bias", 1, 2, 0), ValueError, "shape.*6.*1 dim"),
    (lambda p, m: p.ln_structured(m, "weight", 1, 2, 2), IndexError, "2 .*6, 4"),
    (lambda p, m: p.random_structured(m, "weight", 1, -3), IndexError, "-3 .*6, 4"),
    (lambda p, _: p.global_unstructured(3, p.L1Unstructured, amount=1), TypeError, "not an Iterable"),
    (lambda p, m: p.global_unstructured([(m, "weight")], p.L1Unstructured, [1], amount=1), TypeError, "type dict"),
    (lambda p, m: p.global_unstructured([(m, "weight")], p.RandomStructured, amount=1), TypeError, "RandomStructured"),
]
LATER: list[Mistake] = [  # 4 elements are left
    (lambda p, m: p.l1_unstructured(m, "weight", 5), ValueError, "5.* 4 .*weight"),
    (lambda p, m: p.random_structured(m, "weight", 5, 0), ValueError, "5.* [1-4] .*weight"),
    (lambda p, m: p.global_unstructured([(m, "weight")], p.L1Unstructured, amount=5), ValueError, "5.* 4 "),
    (lambda _, m: UnknownType.apply(m, "weight"), ValueError, "wonder"),
    (lambda _, m: NoDim.apply(m, "weight"), AttributeError, "need to have the attribute `dim`"),
]
OURS: list[Mistake] = [  # what PyTorch allows, or raises otherwise
    (lambda p, m: p.l1_unstructured(m, "weight", True), TypeError, "True"),
    (lambda p, m: p.ln_structured(m, "weight", 1, "nuc", 0), NotImplementedError, "'nuc'"),
    (lambda p, m: p.ln_structured(m, "weight", 1, "foo", 0), ValueError, "'foo'"),
    (lambda p, m: p.random_unstructured(m, "weight", 1, seed=1.5), TypeError, "1.5"),
    (lambda p, m: p.global_unstructured([(m, "weight")] * 2, p.Identity), ValueError, "'weight' of Linear is .*twice"),
    (lambda p, m: p.l1_pattern(m, "weight", "2:3"), ValueError, "2:3 does not fit 'weight': its 4 inputs"),
    (lambda p, m: p.l1_pattern(m, "bias", "2:4"), ValueError, "'bias' of shape .* is no matrix"),
    (lambda p, m: p.l1_pattern(m, "weight", 0.5), TypeError, "pattern must be .*0.5"),
    (lambda p, m: p.global_unstructured([(m, "weight")], p.L1Pattern, pattern="2:4"), ValueError, "go with NByM"),
    (lambda p, m: p.random_pattern(m, "weight", p.Block(2, 0.5), seed="x"), TypeError, "seed must be an int"),
]


@pytest.mark.parametrize("parity", [0, only_whole(1)])
@pytest.mark.parametrize(("act", "kind", "text"), MISTAKES + LATER + OURS)
def test_mistakes(act: Act, kind: type[Exception], text: str, parity: int) -> None:
    """In every world, before and after a first pruning in turn."""
    number = (MISTAKES + LATER + OURS).index((act, kind, text)) + parity
    for i, world in enumerate(WORLDS):
        again = (number + i) % 2 == 1 or (act, kind, text) in LATER
        failing(world, lambda _, net: act(ours, net.up), kind, text, partial(prune_first, again))
        if world == (0, "plain") and (act, kind, text) not in OURS:
            layer = made("plain").up
            if again:
                theirs.l1_unstructured(layer, "weight", 20)
            with pytest.raises(kind) as caught:
                act(theirs, layer)
            assert type(caught.value) is kind


@pytest.mark.parametrize("taken", ["weight_mask", "weight_orig"])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_name_that_a_mask_needs_is_taken(taken: str, is_buffer: bool) -> None:
    layer, own = nn.Linear(4, 6), torch.full((6, 4), 2.0)
    if is_buffer:
        layer.register_buffer(taken, own)
    else:
        vars(layer)[taken] = own
    masks, names = distprune.compute_masks(layer, 0.5), [name for name, _ in layer.named_parameters()]
    for call in (masks.reparametrize, partial(ours.l1_unstructured, layer, "weight", 0.5)):
        with pytest.raises(ValueError, match=f"Linear has a '{taken}' of its own, which a mask of 'weight' would"):
            call()
    assert [name for name, _ in layer.named_parameters()] == names
    assert bool((own == 2).all())


def prune_first(again: bool, _: int, net: Any) -> None:
    if again:
        l1(net, 20)


DISAGREEMENTS: list[tuple[Act, str]] = [
    (lambda rank, net: l1(net, (0.5, 0.25)[rank]), "method: .*0.5.* on rank 0; .*0.25.* on rank 1"),
    (lambda rank, net: both(net, (ours.L1Unstructured, ours.RandomUnstructured)[rank]), "L1.* 0; .*Random.* rank 1"),
    (lambda rank, net: ours.ln_structured(net.up, "weight", 1, rank, 0), '"n": "0".* rank 0; .* rank 1'),
    (lambda rank, net: l1(net, name=("weight", "bias")[rank]), "weight|bias"),
    (lambda rank, net: both(net, pairs=[((net.up, net.down)[i ^ rank], "weight") for i in (0, 1)]), "'0.weight'"),
    (lambda rank, net: both(net, pairs=[(net.up, "weight"), (net.up, "bias")][rank:]), "pruned before by: "),
    (lambda rank, net: both(net, pairs=[(net.up, "weight")][rank:]), "pruned before by: .*not given.* on rank 1"),
    (lambda rank, net: ours.random_unstructured(net.up, "weight", 1, seed=(None, 3)[rank]), '"None".* 0; .*"3".* 1'),
    (lambda rank, net: ours.random_structured(net.up, "weight", 1, 0, seed=rank), '"seed": "0".* rank 0; .* rank 1'),
    (lambda rank, net: ours.custom_from_mask(net.up, "weight", rank < SCORES), "CustomFromMask.* rank 0; .* rank 1"),
    (lambda rank, net: l1(net, scores=SCORES + rank), "importance scores: .* rank 0; .* rank 1"),
    (lambda rank, net: ours.l1_pattern(net.up, "weight", f"1:{2 + 2 * rank}"), "NByM.*m=2.* 0; .*m=4.* rank 1"),
]


@pytest.mark.parametrize("world", [world for world in WORLDS if world[0] == 2], ids=str)
@pytest.mark.parametrize(("act", "text"), DISAGREEMENTS)
@pytest.mark.sampled(12)
def test_ranks_that_disagree(act: Act, text: str, world: World) -> None:
    failing(world, act, ValueError, text)
    names = ("weight", "bias")
    failing(world, act, ValueError, text, lambda _, net: [ours.identity(each, name) for each in net for name in names])


def test_what_one_rank_alone_has_pruned() -> None:
    by_one: Act = lambda rank, net: rank and ours.identity(net.up, "weight", group=Alone())  # noqa: E731
    for world in (world for world in WORLDS if world[0] == 2):
        failing(world, lambda _, net: l1(net), ValueError, r"before by: \[\[\]\] on rank 0; .*Identity", by_one)


def fail(bad: int, error: Exception) -> Callable[[Any, Any], Any]:
    return lambda _, mask: (_ for _ in ()).throw(error) if bad else mask


WRONG: list[Mistake] = [  # on 1 where the rank is wrong, else 0
    (lambda bad, net: l1(net, (0.5, 1.5)[bad]), ValueError, "1.5"),
    (lambda bad, net: both(net, pairs=3 if bad else None), TypeError, "Iterable"),
    (lambda bad, net: l1(net, name=("weight", "wieght")[bad]), AttributeError, "wieght"),
    (lambda bad, net: l1(net, scores=torch.ones(6 - bad, 4)), AssertionError, r"\[5, 4\]"),
    (lambda bad, net: Method.apply(net.up, "weight", fail(bad, ValueError("mine"))), ValueError, "mine"),
    (lambda bad, net: both(net, pairs=((net.up, ["weight"][i]) for i in [bad])), IndexError, "out of range"),
    (lambda bad, net: both(net, Method, compute=fail(bad, RuntimeError("mine"))), RuntimeError, "mine"),
]


@pytest.mark.parametrize(("world", "numbers"), in_turn(WORLDS[1:], range(2 * len(WRONG)), num=len(WRONG)))
@pytest.mark.sampled(2)
def test_wrong_on_one_rank_only(world: World, numbers: Sequence[int]) -> None:
    for number in numbers:
        act, kind, text = WRONG[number % len(WRONG)]
        if kind is RuntimeError and world[1] != "plain":
            kind = NotImplementedError  # it is what a DTensor raises for what it cannot do
        texts = failing(world, partial(act_on_one, act), kind, text, (ONCE, AGAIN)[number % 2])
        assert all((f"rank 1 of {world[0]}: " in each) == (rank != 1) for rank, each in enumerate(texts))


def act_on_one(act: Act, rank: int, net: Any) -> None:
    act(int(rank == 1), net)


CALLS: dict[str, Callable[..., object]] = {
    "l1": lambda net, t=None: l1(net, 7, scores=t),
    "rows": lambda net, t=None: ours.ln_structured(net.up, "weight", 2, 2, 0, t),
    "columns": lambda net, t=None: ours.ln_structured(net.up, "weight", 2, float("inf"), 1, t),
    "global": lambda net, t=None: both(net, importance_scores=None if t is None else {(net.up, "weight"): t}),
    "mask": lambda net, t=SCORES: ours.custom_from_mask(net.up, "weight", t > 0),
    "random rows": lambda net, _=None: ours.random_structured(net.up, "weight", 1, 0, seed=1),
    "identity": lambda net, _=None: ours.identity(net.up, "weight"),
    "user's": lambda net, _=None: Method.apply(net.up, "weight", lambda t, mask: mask * (t.abs() >= 0.3)),
}
GIVEN = list(CALLS)[:5]  # these take a tensor


@pytest.mark.parametrize("by", GIVEN)
@pytest.mark.parametrize("layout", ["shard0", "fsdp2", "plain", "replicate"])
@pytest.mark.sampled(8)
def test_a_layout_that_is_not_the_parameters(layout: str, by: str) -> None:
    parameter = {"plain": "plain", "replicate": r"Replicate\(\)"}.get(layout, r"Shard\(dim=0\)")
    for prepare in (ONCE, AGAIN):
        act: Act = lambda _, net: CALLS[by](net, spread_over(SCORES, Shard(1)))  # noqa: E731
        failing((2, layout), act, ValueError, rf"Shard\(dim=1\).*its parameter is .*{parameter}", prepare)


def whole_masks(net: nn.Module) -> list[torch.Tensor]:
    return [(b.full_tensor() if isinstance(b, DTensor) else b).bool() for n, b in net.named_buffers() if "_mask" in n]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("world", [*WORLDS[1:], (2, "replicate")], ids=str)
@pytest.mark.sampled(8)
def test_what_fits_gives_the_masks_of_one_process(world: World, call: str) -> None:
    """Whole tensors, plain or DTensors that are replicated, and elementwise methods, twice."""

    def on_rank(_: int, layout: str, replicated: bool) -> list[torch.Tensor]:
        net = made(layout)
        for scores in (SCORES, -SCORES):
            CALLS[call](net, spread_over(scores, Replicate()) if replicated else scores)
        return whole_masks(net)

    for replicated in (False, True):
        for masks in run_threads(world[0], on_rank, world[1], replicated):
            assert all(map(torch.equal, masks, on_rank(0, "plain", False)))


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("call", GIVEN[:4])
@pytest.mark.parametrize("prepare", [ONCE, KEPT])
@pytest.mark.sampled(8)
def test_nan(prepare: Act, call: str, world: World) -> None:
    def poison(rank: int, net: Any) -> None:
        if rank == 1 or world[1] == "plain":  # on one shard only, where there are shards
            local(net.up.weight)[-1, -1] = torch.nan
        prepare(rank, net)

    scores, place = SCORES.clone(), Shard(int(world[1] == "shard1"))
    scores[-1, 3 if world[0] < 3 else 2] = torch.nan
    text = "NaN.*0.weight"
    failing(world, lambda _, net: CALLS[call](net, scores), ValueError, text, prepare)
    failing(world, lambda _, net: CALLS[call](net), ValueError, text, poison)
    if world[1] != "plain":
        failing(world, lambda _, net: CALLS[call](net, spread_over(scores, place)), ValueError, text, prepare)


UNSUITABLE = {
    "partial": "'0.weight' is a partial sum",
    "fsdp2 tied, first": "shares parameter 'weight'.*distprune.prune_model",
    "fsdp2 tied, second": "shares parameter 'weight'.*distprune.prune_model",
}


def call_on(call: str, _: int, net: Any) -> None:
    CALLS[call](net)


def call_on_shards(_: int, call: str) -> None:
    CALLS[call](made("shard0"))


@pytest.mark.parametrize("layout", UNSUITABLE)
@pytest.mark.sampled(4)
def test_unsuitable_layouts(layout: str) -> None:
    for call in list(CALLS)[layout.endswith("second") :: 2 if "tied" in layout else 1]:
        failing((2, layout), partial(call_on, call), NotImplementedError, UNSUITABLE[layout])
    run_threads(2, call_on_shards, "l1")  # what failed has left nothing behind


def fsdp1_on_rank(rank: int, layout: str) -> list[Exception]:
    return [raised(rank, made(layout), partial(call_on, call)) for call in CALLS]


@pytest.mark.parametrize(("layout", "kind"), [("fsdp1 original", NotImplementedError), ("fsdp1 flat", TypeError)])
def test_fsdp1(layout: str, kind: type[Exception], pool: ProcessPool) -> None:
    for errors in pool.run(2, fsdp1_on_rank, layout):
        for call, error in zip(CALLS, errors, strict=True):
            assert type(error) is kind, (call, error)
            assert "distprune.prune_model" in str(error), (call, error)


@pytest.mark.parametrize("call", ["l1", "rows", "global", "user's"])
@pytest.mark.parametrize("prepare", [ONCE, KEPT])
@pytest.mark.parametrize("world", [(3, "plain"), (2, "replicate"), (4, "hsdp")], ids=str)
@pytest.mark.sampled(8)
def test_replicas_that_differ(world: World, prepare: Act, call: str) -> None:
    def differ(rank: int, net: Any) -> None:
        if rank == 1:
            local(net.up.weight)[0, 0] = 0.01 if abs(local(net.up.weight)[0, 0]) >= 0.3 else 5
        prepare(rank, net)

    failing(world, lambda _, net: CALLS[call](net), ValueError, "same values of '0.weight'", differ)


def apply_alone(method: Any, amount: Sequence[Any], _: int, net: Any) -> None:
    method.apply(net.up, "weight", *amount, group=Alone())


def test_a_group_that_does_not_span_the_parameter() -> None:
    for method, *amount in ((ours.L1Unstructured, 0.5), (ours.L1Pattern, "1:2"), (Method,)):
        act = partial(apply_alone, method, amount)
        failing((2, "shard0"), act, ValueError, "of the 24 elements of '0.weight' the ranks own 12")


NOT_ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "topk": lambda t, mask: mask * (t.abs() >= torch.topk(t.abs().flatten(), 10).values.min()),
    "plain tensor": lambda t, _: torch.ones(t.shape),
    "boolean index": lambda t, mask: mask.__setitem__(t.abs() < 0.3, 0) or mask,
    "mean": lambda t, mask: mask * (t.abs() >= t.abs().mean()),
    "mean as a number": lambda t, mask: mask * (t.abs() >= float(t.abs().mean())),
    "branch": lambda t, mask: mask if bool((t.abs() > 0.55).any()) else mask * 0,
}


@pytest.mark.parametrize("what", NOT_ELEMENTWISE)
@pytest.mark.parametrize("prepare", [ONCE, AGAIN])
@pytest.mark.parametrize("layout", ["shard0", "fsdp2"])
@pytest.mark.sampled(8)
def test_methods_that_need_more_than_the_shard(layout: str, prepare: Act, what: str) -> None:
    text = r"elementwise.*default_mask \* \(t\.abs\(\) >= threshold\).*importance_scores"
    act: Act = lambda _, net: both(net, Method, compute=NOT_ELEMENTWISE[what])  # noqa: E731
    failing((2, layout), act, NotImplementedError, text, prepare)
