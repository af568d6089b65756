"""How much memory a walk over the blocks takes of a rank, in five terms, from a model's shapes alone.

Experts are taken to be given equally many tokens. What an evaluation, ``allocate`` and the interpreter take is not in
it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distprune.calibration.data import tokens_together
from distprune.calibration.order import kind_of
from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.formatting import gibibytes
from distprune.models.decoder_blocks import decoder_blocks, num_bytes, text_config
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.oneshot.recipe import Recipe

_WAYS_OUT = (
    "Ways out: fewer samples, more ranks, offload=True, refit='none', targets='own', or of experts less expert_memory"
)
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")  # in configs of transformers
_USUAL_EXPERTS = 8  # where the config does not say
_FACTORS = 12  # bytes a number of X^T X: a factor, the inverse, and one more, float32
_FITTED = 16  # bytes a weight of a shard: float32, two averages of Adam, and the step


@dataclass(frozen=True)
class _LayerInput:
    """What layers of a block, of ``num_out`` rows in all, are given: ``num`` experts a ``share`` of all tokens each."""

    num_in: int
    num_out: int
    adds: bool = False  # to hidden states
    num: int = 1
    share: float = 1.0
    is_routed: bool = False

    def goes_by_tokens(self, recipe: Recipe) -> bool:
        """Return whether tokens are kept, and summed in waves of experts once the block has run."""
        return self.is_routed and recipe.updates_weights

    def num_sums(self, recipe: Recipe) -> int:
        """Return how many numbers X^T X is, with what leads to the targets."""
        towards = self.num_in * (self.num_out if self.adds else self.num_in)
        return self.num_in**2 + (towards if recipe.targets == "dense" else 0)


def estimate(
    model: nn.Module,
    recipe: Recipe,
    num_windows: int,
    length: int,
    num_ranks: int = 1,
    batch_tokens: int | None = None,
    expert_memory: int = EXPERT_MEMORY,
) -> dict[str, int]:
    """Return the bytes that a walk takes of each of ``num_ranks`` at most, by term. Local.

    ``model`` may be in shards or on the meta device; ``recipe`` is resolved. The walk has ``num_windows`` of ``length``
    tokens, and runs ``batch_tokens`` of them together.

    Raises:
        ValueError: there are no decoder blocks, or no linear layers in them.
    """
    inputs: dict[tuple[_LayerInput, ...], int] = {}  # of each kind of block, with its bytes
    for _, block in decoder_blocks(model):
        if linears := list(linear_layers(block).values()):
            inputs[tuple(_inputs(linears, text_config(model)))] = num_bytes(block)
    if not inputs:
        raise ValueError(f"the blocks of {type(model).__name__} hold no linear layer")
    hidden = next(iter(inputs))[0].num_in
    itemsize = next(model.parameters()).element_size()
    num_streams = 2 if recipe.targets == "dense" else 1
    num_tokens = -(-num_windows // num_ranks) * length
    batch_bytes = itemsize * min(num_tokens, max(length, tokens_together(model, batch_tokens)))
    gathered = max(inputs.values()) if num_ranks > 1 else 0
    work = 0.0
    for of_block, size in inputs.items():
        sums, waves = (
            _sum_bytes([of for of in of_block if of.goes_by_tokens(recipe) is routed], recipe, expert_memory)
            for routed in (False, True)
        )
        run = batch_bytes * max((of.num_in + of.num_out) * of.num * of.share for of in of_block)
        widest = max(of.num_in for of in of_block) ** 2 if recipe.updates_weights else 0
        graph = batch_bytes * sum(of.num_out * of.num * of.share for of in of_block)
        fit = size * (1 + 4 / itemsize) + size / num_ranks * (1 + _FITTED / itemsize) + graph
        work = max(work, gathered + sums + run, 1.5 * max(sums, waves) + _FACTORS * widest)
        work = max(work, fit) if recipe.refit == "block" else work
    return {
        "shard of the weights": num_bytes(model) // num_ranks,
        "gathered block": gathered,
        "hidden states": num_tokens * itemsize * hidden * num_streams,
        "inputs of a block": int(
            num_tokens * itemsize * max(_num_kept(of_block, hidden, recipe) for of_block in inputs)
        ),
        "sums, factors and fit": int(work - gathered),  # it is not gathered while layers are solved
    }


def as_line(terms: Mapping[str, int]) -> str:
    """Return an estimate as text."""
    parts = ", ".join(f"{name} {gibibytes(num)}" for name, num in terms.items())
    return f"about {gibibytes(sum(terms.values()))} of memory a rank: {parts}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, or a device, had no more memory to give."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    has_said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return has_said or isinstance(error, MemoryError | torch.OutOfMemoryError)


@contextmanager
def explaining_memory(make: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Add to an error of the body that is for lack of memory the estimate that ``make`` returns, and ways out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(f"the walk takes {as_line(make())}")
            error.add_note(_WAYS_OUT)
        raise


def _sum_bytes(inputs: Sequence[_LayerInput], recipe: Recipe, expert_memory: int) -> float:
    """Return the bytes of the sums that are there at a time, float64: of an input, or of all of a block."""
    if not recipe.updates_weights:
        return 16.0 * sum(of.num * of.num_in for of in inputs)
    sizes = [8 * of.num_sums(recipe) for of in inputs]
    all_experts = [max(size, min(expert_memory, of.num * size)) for of, size in zip(inputs, sizes, strict=True)]
    return max(all_experts, default=0.0) if recipe.sequential == "layer" else sum(all_experts)


def _num_kept(inputs: Sequence[_LayerInput], hidden: int, recipe: Recipe) -> float:
    """Return how many features of a token are kept: those of the dense model, and what experts are given."""
    dense = sum(hidden if of.adds else of.num_in * of.num * of.share for of in inputs)
    routed = sum(of.num_in * of.num * of.share for of in inputs if of.goes_by_tokens(recipe))
    return (dense if recipe.targets == "dense" else 0) + routed


def _inputs(linears: Sequence[LinearLayer], config: Any) -> Iterator[_LayerInput]:
    """Yield the inputs of a block's ``linears``, in the order of its modules.

    Which layers share an input, and which add to hidden states, shows only when a block runs. Here a rule says it: of
    the layers of one module the last that puts out as many features as hidden states have adds to these, and the
    others share an input if they take equally many features.
    """
    hidden = linears[0].num_in
    modules: dict[str, dict[str, list[LinearLayer]]] = {}  # by the module's name, by the layer's; experts are one kind
    for linear in linears:
        kind = kind_of(linear.name if linear.expert is None else linear.parameter_path)
        modules.setdefault(kind.rpartition(".")[0], {}).setdefault(kind, []).append(linear)
    for module in modules.values():
        *others, last = module.values()
        if last[0].num_out != hidden:
            others, last = [*others, last], []
        for num_in in dict.fromkeys(layers[0].num_in for layers in others):
            yield _input([layers for layers in others if layers[0].num_in == num_in], config)
        if last:
            yield _input([last], config, adds=not last[0].is_routed)


def _input(kinds: Sequence[Sequence[LinearLayer]], config: Any, *, adds: bool = False) -> _LayerInput:
    """Return the input that layers of ``kinds`` share, those of an expert each."""
    first, num_out = kinds[0][0], sum(layers[0].num_out for layers in kinds)
    if not first.is_routed:
        return _LayerInput(first.num_in, num_out, adds)
    num = len(kinds[0])
    said = next((said for name in _EXPERTS_A_TOKEN if (said := getattr(config, name, None))), _USUAL_EXPERTS)
    num_active = max(said) if isinstance(said, list | tuple) else int(said)
    return _LayerInput(first.num_in, num_out, num=num, share=min(num_active, num) / num, is_routed=True)
