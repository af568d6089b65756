"""What the upper half refuses: a call, its arguments, the error and its words, alone and on three ranks.

What fails has changed nothing, and all ranks say the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import distprune as prune
from distprune import Block, NByM, Unstructured
from tests.architectures import VOCABULARY, tiny_model
from tests.contract import Below
from tests.oneshot.alike import sharded
from tests.refused import (
    BLOCKS,
    HASHED,
    MIXTRAL,
    ONE_IN_TWO,
    PLACED,
    SPARE,
    TOKENS,
    TOWERS,
    all_zeros,
    blocks,
    cut,
    finetune,
    frozen,
    inferring,
    large_experts,
    nan_blocks,
    no_gradient,
    one_shot,
    other_optimizer,
    over_time,
    regrow,
    shares,
    shrink,
    straight,
    streamed,
    trained,
    units,
    without_losses,
    words,
)
from tests.worlds import all_raise, run_threads
from tests.wrapped import transformer

Row = tuple[Callable[[], object], type[Exception], str]
REFUSED: list[Row] = [
    # one-shot pruning
    (partial(blocks, method="lasso"), ValueError, "method='lasso' is none of"),
    (partial(blocks, pattern=0.5), TypeError, "pattern must be a Pattern or its text, such as '2:4', not 0.5"),
    (partial(blocks, pattern=NByM(8, 16)), ValueError, "8:16 does not fit 'model.layers.0.self_attn.q_proj': its 24"),
    (partial(blocks, pattern=Block(5, 0.5)), ValueError, "blocks of 5 x 5 do not fit 'model.layers.0.self_attn.q_pr"),
    (partial(blocks, seed="7"), TypeError, "seed must be an int"),
    (partial(blocks, sequential="map"), ValueError, "sequential='map' is none of block, layer"),
    (partial(blocks, targets="sparse"), ValueError, "targets='sparse' is none of own, dense"),
    (partial(blocks, targets="dense", target_share=1.5), ValueError, r"target_share=1.5 is not in \(0, 1\]"),
    (partial(blocks, ONE_IN_TWO, targets="dense"), NotImplementedError, "are one weight: when .*take targets='own'"),
    (partial(blocks, targets="own", target_share=0.5), ValueError, "target_share=0.5 is of the way to targets='dense'"),
    (partial(blocks, target_share="half"), TypeError, "target_share must be a number, not 'half'"),
    (partial(blocks, refit="block"), ValueError, "needs targets='dense'"),
    (partial(blocks, targets="dense", refit="all"), ValueError, "refit='all' is none of block, none"),
    (partial(blocks, targets="dense", epochs=0), ValueError, "epochs=0: passes over all samples, 1 or more"),
    (partial(blocks, targets="dense", epochs=1.5), ValueError, "epochs=1.5: passes over all samples"),
    (partial(blocks, refit="none", epochs=3), ValueError, "epochs=3: .* where refit='block'"),
    (partial(blocks, pattern=prune.PerRow(0.5), permute="channels"), ValueError, "patterns such as '2:4'"),
    (partial(blocks, pattern="2:4", permute="heads"), ValueError, "is none of channels, none"),
    (partial(blocks, expert_memory=0), ValueError, "expert_memory=0 must be more than 0"),
    (partial(blocks, expert_memory="1G"), TypeError, "expert_memory must be a number of bytes, not '1G'"),
    (partial(blocks, samples=TOKENS[:0]), ValueError, r"samples must be \(num_samples, length\), not \(0, 16\)"),
    (partial(blocks, samples=TOKENS[0]), ValueError, r"samples must be \(num_samples, length\), not \(16,\)"),
    (partial(blocks, samples=["text"]), TypeError, "samples are text: 'text'; distprune.calibration_windows"),
    (partial(blocks, samples=[[TOKENS, TOKENS]]), TypeError, "a batch is a list of 2 tensors, .*alone, such"),
    (partial(blocks, samples=[(TOKENS[0], TOKENS[0])]), TypeError, "a batch is a tuple of 2 tensors"),
    (partial(blocks, samples=TOKENS.float()), TypeError, "samples must be a tensor of int64 token ids"),
    (partial(blocks, samples=[[1.5]]), TypeError, "not a float"),
    (partial(blocks, samples=nn.Linear(2, 2)), TypeError, "not a Linear"),
    (partial(blocks, samples={"labels": [[1, 2]]}), TypeError, "a mapping without 'input_ids': it has labels"),
    (partial(blocks, samples=[torch.ones(2, 2)]), TypeError, r"not a tensor of torch.float32 \(2, 2\)"),
    (partial(blocks, samples=[]), ValueError, "samples hold no token id"),
    (partial(blocks, samples=TOKENS + 100), ValueError, "outside the model's vocabulary of 97"),
    (
        partial(nan_blocks, "model.layers.0.input_layernorm.weight"),
        ValueError,
        "block 'model.layers.0': NaN or Inf in the inputs of 'self_attn.q_proj'",
    ),
    (
        partial(nan_blocks, "model.layers.2.mlp.up_proj.weight"),
        ValueError,
        "values are NaN in 'model.layers.2.mlp.up_proj.weight'",
    ),
    (partial(blocks, method="sparsegpt", pattern=Unstructured(9)), NotImplementedError, "a share of each block of col"),
    (partial(blocks, method="sparsegpt", pattern=Block(2, 9)), NotImplementedError, "a share of each block of columns"),
    (partial(blocks, pattern=Unstructured(9)), TypeError, "must be a fraction"),
    (partial(blocks, method=prune.Taylor()), NotImplementedError, "needs 'gradient', which a walk has not"),
    (large_experts, ValueError, "'model.layers.0': NaN or Inf in the inputs of 'mlp.experts.down_proj.0'"),
    # allocation
    (partial(shares, sparsity=1), TypeError, "must be a share"),
    (partial(shares, sparsity={"a": 0.5}), TypeError, "must be a share"),
    (partial(shares, sparsity=1.5), ValueError, "outside"),
    (partial(shares, sparsity=0.61, max_difference=0.0), ValueError, "no shares meet the budget"),
    (partial(shares, max_difference=-1), ValueError, "max_difference=-1"),
    (partial(shares, max_difference="0.1"), TypeError, "each must be a share such as 0.6: .*'0.1'"),
    (inferring, ValueError, "call it outside of torch.inference_mode"),
    (partial(shares, samples=TOKENS[:, :1]), ValueError, "two are the least"),
    # own words
    (partial(words, sequence_length=9), ValueError, "longer than the model's 8 positions"),
    (partial(words, sequence_length=1), ValueError, "leaves nothing to write behind 1 given"),
    (partial(words, samples=0), ValueError, "samples=0"),
    (partial(words, seed=1 << 64), ValueError, "seed=18446744073709551616 has more than the 64 bits"),
    (partial(words, seed=0.5), TypeError, "seed must be an int"),
    (partial(words, temperature=0.0), ValueError, "temperature=0.0"),
    (partial(words, temperature=None), TypeError, "temperature must be a number, not None"),
    (partial(words, prompts=TOKENS[:3, :2]), ValueError, r"must be \(at most 2, 1 or more tokens\), not \(3, 2\)"),
    (partial(words, prompts=torch.full((2, 2), VOCABULARY)), ValueError, "outside the model's vocabulary"),
    (partial(words, prompts=torch.tensor([[5, -1], [5, 5]])), ValueError, "token id -1 is outside the model's"),
    (partial(words, config=SimpleNamespace(is_encoder_decoder=False)), NotImplementedError, "says no vocab_size"),
    # removal
    (shrink, ValueError, "there is nothing to remove"),
    (partial(shrink, mlp=41), ValueError, "41 of the 40"),
    (partial(shrink, heads=2, kv_groups=1), ValueError, "remove one of them, then the other"),
    (partial(shrink, mlp=0.5, criterion="best"), ValueError, "best"),
    (partial(shrink, layers=2, layer_criterion="angle"), ValueError, "angle"),
    (partial(shrink, mlp=1.0, layers=3), ValueError, "mlp 1.0, layers 3: as many as the model has"),
    (
        partial(shrink, SPARE, mlp=0.5),
        ValueError,
        "of the experts in 'model.layers.0.*' some would keep 16 and others 32",
    ),
    (partial(shrink, TOWERS, mlp=0.5), ValueError, "Gemma4TextConfig cannot say this .mlp 48 to 24, mlp 8"),
    (partial(shrink, experts=2), NotImplementedError, "no experts"),
    (partial(shrink, MIXTRAL, experts=2, expert_criterion="size"), ValueError, "'size' is none of output, usage"),
    (partial(shrink, MIXTRAL, experts=2, criterion="best"), ValueError, "criterion='best' is none of"),
    (partial(shrink, MIXTRAL, experts=2, mlp=0.5, refit="bias"), ValueError, "refit='bias' needs biases"),
    (partial(shrink, MIXTRAL, experts=2, layers=1, layer_criterion="angle"), ValueError, "is none of loss, influence"),
    (partial(shrink, MIXTRAL, experts=2, layers=1, samples=TOKENS[:, :1]), ValueError, "have none to predict"),
    (partial(shrink, mlp=0.5, expert_criterion="size"), ValueError, "'size' is none of output, usage"),
    (partial(shrink, MIXTRAL, experts=5), ValueError, "5 of the 4 .* possible are 2 to 4"),
    (partial(shrink, MIXTRAL, experts=1), ValueError, "1 of the 4 .* possible are 2 to 4"),
    (partial(shrink, without_losses, layers=2), ValueError, "the loss without layers"),
    (partial(shrink, layers=5), ValueError, "layers: 5 of the 3 cannot stay"),
    (
        partial(shrink, PLACED, layers=3),
        NotImplementedError,
        "layers 1-3 were chosen to stay, .*'transformer.h.1.attn'.*another",
    ),
    (
        partial(shrink, ONE_IN_TWO, layers=2, layer_criterion="influence"),
        NotImplementedError,
        "'model.layers.2.shared_transformer.*' are one weight: no block of Zamba2ForCausalLM can leave",
    ),
    (partial(shrink, HASHED, experts=2), NotImplementedError, "its router holds 'tid2eid', whole numbers"),
    (partial(shrink, parameters=1.5), ValueError, "1.5 is neither a number from 1 on nor a share in"),
    (partial(shrink, parameters=0), ValueError, "0 is neither a number"),
    (partial(shrink, parameters="0.5"), TypeError, "parameters: a number or a share of them, not '0.5'"),
    (partial(shrink, parameters=True), TypeError, "parameters: a number or a share of them, not True"),
    (partial(shrink, parameters=10**9), ValueError, "not more than 1,000,000,000: there is none to remove"),
    (partial(shrink, parameters=100), ValueError, "the least possible is [0-9,]+ .mlp 8, kv_groups 1, layers 1."),
    (partial(shrink, parameters=0.1, mlp=0.9, layers=3), ValueError, "least possible is [0-9,]+ .kv_groups 1.$"),
    (partial(shrink, parameters=9, mlp=8, layers=3, heads=2), ValueError, "is [0-9,]+ .nothing else can leave"),
    (partial(units, "llama", {"mlp": 0}), ValueError, "0 of the 40"),
    (partial(units, "llama", {"heads": 3}), ValueError, "multiples of 2"),
    (partial(units, "llama", {"heads": 1.5}), ValueError, "not in .0, 1."),
    (partial(units, "llama", {"heads": True}), TypeError, "a number of units"),
    (partial(units, "llama", {"heads": 2}, layers=[2, 1]), ValueError, "ascending"),
    (partial(units, "llama", {"heads": 2}, layers=[0, 3]), ValueError, "0 to 2"),
    (partial(units, "llama", {"mlp": 30}, refit="bias"), ValueError, "has none"),
    (partial(units, "llama", {"mlp": 30}, refit="best"), ValueError, "none of least_squares"),
    (partial(units, "llama", {"mlp": 30}, targets="best"), ValueError, "none of own, dense"),
    (partial(units, "mixtral", {"experts": 2}), ValueError, "choose_experts"),
    (partial(units, "gpt2", {"heads": 1}), NotImplementedError, "cannot be removed"),
    # training
    (all_zeros, ValueError, "'layers.0.up.weight' is all zeros"),
    (partial(trained, partial(no_gradient, "taylor")), ValueError, "'layers.0.attention.q.weight' has no gradient"),
    (partial(trained, partial(no_gradient, "movement")), ValueError, "leave out what has none with exclude"),
    (partial(trained, partial(over_time, seed="7")), TypeError, "seed must be an int"),
    (partial(trained, partial(over_time, score="wanda")), ValueError, "'wanda' needs .* not there while training"),
    (partial(trained, partial(over_time, pattern="3:7")), ValueError, "3:7 does not fit 'layers.0.attention.q.weight'"),
    (
        partial(trained, partial(over_time, schedule={"up": prune.constant(0.5)})),
        ValueError,
        "there is no sparsity for",
    ),
    (partial(trained, partial(over_time, schedule=[0.1, 0.5].__getitem__)), ValueError, "has nothing for step 2"),
    (partial(trained, partial(no_gradient, "taylor", frozen="layers.0.attention.q.weight")), ValueError, "is frozen"),
    (frozen, ValueError, r"are frozen .*as under PEFT's adapters.*merge_adapters"),
    (partial(straight, None), TypeError, "expected a torch.optim.Optimizer"),
    (partial(trained, other_optimizer), ValueError, "none of the 8 pruned parameters is among those of SGD"),
    (
        partial(trained, partial(over_time, schedule=lambda step: 0.5 / (step + 1))),
        ValueError,
        "the schedule goes down from 0.5 to 0.25",
    ),
    (partial(trained, lambda model: prune.hold_zeros(model, "adam")), TypeError, "expected a torch.optim.Optimizer"),
    (partial(trained, lambda model: prune.hold_zeros(model, include="nothing")), ValueError, "matches no parameter"),
    (
        partial(trained, lambda model: prune.SparseTraining(model, None, schedule=prune.constant(0.5))),
        TypeError,
        "counts the steps",
    ),
    (partial(trained, lambda _: prune.Regrow(stop=10, every=1)), ValueError, "every >= 2, for what grew must"),
    (partial(trained, lambda _: prune.Regrow(stop=10, every=2.5)), TypeError, "steps are whole numbers"),  # type: ignore[arg-type]
    (partial(straight, pattern="row"), ValueError, "pattern='row' does not say how much is pruned"),
    (partial(straight, pattern="2;4"), ValueError, "pattern='2;4' is not known"),
    (partial(straight, pattern=NByM(2, 8)), ValueError, "'layers.0.attention.q.weight'"),
    (partial(straight, decay=-1.0), ValueError, "decay=-1.0 must be a number from 0 up"),
    (partial(straight, every=0), ValueError, "every=0 must be a number of steps"),
    (partial(straight, include="nothing"), ValueError, "matches no parameter"),
    (partial(regrow, pattern="5:8"), ValueError, "5:8 does not fit 'layers.0.attention.q.weight': its 12 inputs"),
    (partial(regrow, pattern=Below(0.5)), NotImplementedError, "give it a method regrowth"),
    (partial(regrow, by="gradient"), ValueError, "'layers.0.attention.q.weight' has no gradient"),
    (partial(regrow, by="gradient", is_nan=True), ValueError, "scores are NaN in 'layers.0.attention.o.weight'"),
    (partial(regrow, share=1.5), ValueError, "share=1.5 is outside"),
    (partial(regrow, is_frozen=True), ValueError, "'layers.0.attention.q.weight' is frozen: what grows could not"),
    # jobs: nothing is read before
    (partial(one_shot, samples=0), ValueError, r"samples \(--samples\) takes a number at least 1 .*, not 0"),
    (partial(one_shot, sequence_length=0), ValueError, r"\(--sequence-length\) takes a number at least 1"),
    (partial(one_shot, target_share=7.0), ValueError, "takes a number above 0 and at most 1, not 7.0"),
    (partial(one_shot, target_share=math.nan), ValueError, "takes a number above 0 and at most 1, not nan"),
    (partial(one_shot, evaluation_length=1), ValueError, r"length \(--eval-length\) takes a number at least 2"),
    (partial(one_shot, targets="none"), ValueError, r"targets \(--targets\) takes 'own', 'dense', not 'none'"),
    (partial(one_shot, dtype=torch.int8), ValueError, r"dtype \(--dtype\) takes .*, not torch.int8"),
    (partial(one_shot, sparsity=None, pattern=NByM(2, 4), allocation="gradients"), ValueError, "a pattern with one"),
    (partial(one_shot, own_words=3), ValueError, r"own_words=3 \(--own-words\) is beside a text"),
    (partial(streamed, evaluate_on=("text.txt",)), ValueError, "builds no model"),
    (partial(streamed, dtype=torch.bfloat16), ValueError, "leave out dtype"),
    (partial(streamed, sparsity=1.5), ValueError, "outside"),
    (finetune, ValueError, r"give steps \(--steps\) or minutes \(--minutes\)"),
    (partial(finetune, steps=2, minutes=1.0), ValueError, "not both 2 and 1.0"),
    (partial(finetune, steps=0), ValueError, r"steps \(--steps\) takes a number at least 1, not 0"),
    (partial(finetune, steps=2, learning_rate=math.inf), ValueError, "takes a number above 0 and finite, not inf"),
    (partial(finetune, steps=2, compute_dtype=torch.float16), ValueError, "takes torch.bfloat16, torch.float32, not"),
]


def wrong(num_ranks: int) -> list[str]:
    """Return what is said otherwise than the table has it."""
    found = []
    for call, error, said in REFUSED:
        for raised in run_threads(num_ranks, lambda _, call=call: call(), catch=True):
            if not isinstance(raised, error) or not re.search(said, str(raised)):
                found.append(f"{said}: {raised!r}")
    return found


# What the rank with this number asks for, and how the difference is named.
def infinite(_: int) -> None:
    """Inf * 0: scores that are NaN, of the rows that the last rank holds."""
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = 0  # an input of down_proj that is always 0
        model.model.layers[0].mlp.down_proj.weight[-1, 3] = torch.inf
    prune.prune_blocks(sharded(model), **BLOCKS)


DISAGREEMENTS: list[tuple[Callable[[int], object], str]] = [
    (lambda rank: blocks(pattern=Unstructured(0.5 + rank / 10)), "pattern: "),
    (lambda rank: blocks(samples=TOKENS[: 3 + rank]), "samples: "),
    (lambda rank: blocks(samples="self" if rank else TOKENS), "called with different arguments"),
    (
        lambda rank: blocks(method="admm", finished=lambda index: index < 1 + rank),
        r"finished\(1\): false on rank 0; true on rank 1",
    ),
    (infinite, "NaN"),
    (lambda rank: shares(sparsity=0.6 + rank / 10), "called with different arguments"),
    (lambda rank: shares(samples="self" if rank else TOKENS), "called with different arguments"),
    (
        lambda rank: prune.perplexity(tiny_model("llama"), TOKENS.flatten(), sequence_length=(6, 0)[rank]),
        "make no window",
    ),
    (lambda rank: shrink(mlp=0.5 + rank / 10), "called with different arguments"),
    (lambda rank: units("llama", {"mlp": 30 + rank}), "called with different arguments"),
    (lambda rank: prune.own_words(tiny_model("llama"), 2, 5, seed=rank), "different arguments: asked"),
    (lambda rank: cut(torch.arange(21)[rank:]), "called with different arguments: kept"),
    (lambda rank: straight(decay=0.25 + rank), "decay: "),
    (lambda rank: over_time(transformer(), score=("magnitude", "taylor")[rank]), "score: "),
    (lambda rank: over_time(transformer(), regrow=prune.Regrow(stop=5 + rank)), "regrow: "),
    (lambda rank: prune.perplexity(tiny_model("llama"), TOKENS.flip(rank)), "arguments: tokens: "),
    (lambda rank: prune.perplexity(tiny_model("llama"), TOKENS, batch_tokens=16 << rank), "batch_tokens: 16 on rank 0"),
]


def test_ranks_that_disagree() -> None:
    for call, said in DISAGREEMENTS:
        all_raise(2, call, kind=ValueError, match=said)


def test_alone() -> None:
    assert wrong(1) == []


def test_on_three_ranks() -> None:
    """All ranks raise the same, and none waits for another."""
    assert wrong(3) == []
