"""Calls that the upper half refuses: each checks that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import distprune as prune
from distprune import Unstructured
from distprune.jobs import FinetuneJob, OneShotJob, StreamedJob, run_finetune_job, run_one_shot_job, run_streamed_job
from distprune.removal.choose_units import choose_units
from distprune.removal.rebuild import remove_units
from tests.architectures import VOCABULARY, samples, tiny_model
from tests.families import family_model
from tests.removal.test_choose_units import make
from tests.training.exact import Exact
from tests.training.optimizers import INCLUDE
from tests.wrapped import transformer

TOKENS = samples(4)
PLAIN = partial(tiny_model, "llama")
# Its layers compute by their places: none but the last can leave.
PLACED = partial(tiny_model, "gpt2", n_layer=4, scale_attn_by_inverse_layer_idx=True)
SPARE = partial(family_model, "longcat_flash", vocab_size=VOCABULARY)  # one weight has more experts than the other
ONE_IN_TWO = partial(family_model, "zamba2", vocab_size=VOCABULARY)  # blocks share weights
HASHED = partial(family_model, "deepseek_v4", vocab_size=VOCABULARY)  # a table says which experts a token has
TOWERS = partial(family_model, "gemma4", vocab_size=VOCABULARY)  # not all have the attention of the text's decoder
BLOCKS: dict[str, Any] = {"samples": TOKENS, "method": "wanda", "pattern": Unstructured(0.5)}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[nn.Module]:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        yield model
    finally:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def blocks(make: Callable[[], nn.Module] = PLAIN, **arguments: Any) -> None:
    with unchanged(make()) as model:
        prune.prune_blocks(model, **{**BLOCKS, **arguments})


def nan_blocks(name: str) -> None:
    """Of a model in which one value of a parameter is NaN."""
    model = tiny_model("llama")
    model.get_parameter(name).detach().view(-1)[3] = torch.nan
    with unchanged(model):
        prune.prune_blocks(model, **BLOCKS)


def large_experts() -> None:
    """Whose own products are infinite."""
    model: Any = tiny_model("mixtral")
    model.model.layers[0].mlp.experts.gate_up_proj.detach().fill_(1e30)
    with unchanged(model):
        prune.prune_blocks(model, **BLOCKS)


def shares(**arguments: Any) -> None:
    with unchanged(tiny_model("llama")) as model:
        prune.allocate(model, **{"samples": TOKENS, "sparsity": 0.6, **arguments})


LLAMA, MIXTRAL = partial(make, "llama"), partial(make, "mixtral")


def inferring() -> None:
    with torch.inference_mode():
        shares()


def shrink(make: Callable[[], nn.Module] = LLAMA, samples: torch.Tensor = TOKENS, **arguments: Any) -> None:
    with unchanged(make()) as model:
        prune.shrink_model(model, samples, **arguments)


def without_losses() -> nn.Module:
    model: Any = tiny_model("llama")
    model.lm_head.weight.detach()[0, 0] = torch.nan
    return model  # type: ignore[no-any-return]


def words(config: Any = None, **arguments: Any) -> None:
    model: Any = tiny_model("llama", max_position_embeddings=8)
    model.config = config or model.config
    with unchanged(model):
        prune.own_words(model, **{"samples": 2, "sequence_length": 5, **arguments})


def units(architecture: str, keep: Any, **how: Any) -> None:
    with unchanged(make(architecture)) as model:
        choose_units(model, TOKENS, keep, **how)


def cut(kept: torch.Tensor) -> None:
    with unchanged(tiny_model("llama")) as model:
        remove_units(model, {(f"model.layers.{i}", "mlp", "mlp"): kept for i in range(3)})


def trained(call: Callable[[nn.Module], object]) -> None:
    with unchanged(transformer()) as model:
        call(model)


def straight(make: Any = torch.optim.SGD, **arguments: Any) -> None:
    with unchanged(Exact()) as model:
        optimizer = make and make(model.parameters(), lr=0.1)
        prune.StraightThrough(model, optimizer, **{"include": INCLUDE, **arguments})


def regrow(
    share: float = 0.4, pattern: Any = BLOCKS["pattern"], is_nan: bool = False, is_frozen: bool = False, **how: Any
) -> None:
    with unchanged(transformer().requires_grad_(not is_frozen)) as model:
        for parameter in model.parameters() if is_nan else ():
            parameter.grad = torch.full_like(parameter, torch.nan)
        hold = prune.hold_zeros(model, include=INCLUDE)
        try:
            hold.regrow(share, pattern, **how)
        finally:
            hold.remove()


def job(kind: Callable[..., Any], run: Callable[[Any], object], **arguments: Any) -> None:
    run(kind(**{"model": "nowhere", "output": "nowhere/out", **arguments}))


one_shot = partial(job, OneShotJob, run_one_shot_job, sparsity=0.5)
streamed = partial(job, StreamedJob, run_streamed_job, sparsity=0.5)
finetune = partial(job, FinetuneJob, run_finetune_job, data="text.txt")


def other_optimizer(model: nn.Module) -> None:
    prune.hold_zeros(model, torch.optim.SGD(transformer().parameters()), include=INCLUDE)


def over_time(model: nn.Module, **arguments: Any) -> None:
    given = {"schedule": prune.constant(0.5), "include": INCLUDE, **arguments}
    prune.SparseTraining(model, torch.optim.SGD(model.parameters()), **given)


def no_gradient(score: str, model: nn.Module, frozen: str = "") -> None:
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    training = prune.SparseTraining(model, optimizer, schedule=prune.constant(0.5), score=score, include=INCLUDE)
    try:
        optimizer.step()
    finally:
        training.remove()


def frozen() -> None:
    with unchanged(transformer().requires_grad_(False)) as model:
        prune.hold_zeros(model, torch.optim.SGD(transformer().parameters()), include=INCLUDE)


def all_zeros() -> None:
    model = transformer()
    nn.init.zeros_(model.get_parameter("layers.0.up.weight"))
    with unchanged(model):
        prune.hold_zeros(model, include=INCLUDE)
