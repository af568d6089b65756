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
from distprune.models.decoder_blocks import decoder_blocks, largest_said, num_bytes, text_config
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

    @property
    def width(self) -> float:
        """How many features a token has."""
        return self.num_in * self.num * self.share


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
    num_active, kinds = _num_active(text_config(model)), dict[tuple[_LayerInput, ...], int]()  # of blocks
    for _, block in decoder_blocks(model):
        if linears := list(linear_layers(block).values()):
            kinds[tuple(_inputs(linears, num_active))] = num_bytes(block)
    if not kinds:
        raise ValueError(f"the blocks of {type(model).__name__} hold no linear layer")
    hidden, itemsize = next(iter(kinds))[0].num_in, next(model.parameters()).element_size()
    updates, has_dense = recipe.updates_weights, recipe.has_targets
    num_tokens = -(-num_windows // num_ranks) * length
    batch_bytes = itemsize * min(num_tokens, max(length, tokens_together(model, batch_tokens)))
    gathered = max(kinds.values()) if num_ranks > 1 else 0

    def sum_bytes(inputs: Sequence[_LayerInput]) -> float:
        """Return the bytes of the sums that are there at a time, float64: of an input, or of all of a block."""
        if not updates:
            return 16.0 * sum(one.num * one.num_in for one in inputs)
        sizes = []
        for one in inputs:
            towards = one.num_in * (one.num_out if one.adds else one.num_in) if has_dense else 0
            size = 8 * (one.num_in**2 + towards)
            sizes.append(max(size, min(expert_memory, one.num * size)))
        return max(sizes, default=0.0) if recipe.sequential == "layer" else sum(sizes)

    work = kept = 0.0
    for inputs, size in kinds.items():
        # Tokens of experts are kept, and summed in waves once the block has run.
        routed = [one for one in inputs if one.is_routed and updates]
        sums, waves = sum_bytes([one for one in inputs if one not in routed]), sum_bytes(routed)
        run = batch_bytes * max((one.num_in + one.num_out) * one.num * one.share for one in inputs)
        widest = max(one.num_in for one in inputs) ** 2 if updates else 0
        work = max(work, gathered + sums + run, 1.5 * max(sums, waves) + _FACTORS * widest)
        if recipe.refit == "block":
            graph = batch_bytes * sum(one.num_out * one.num * one.share for one in inputs)
            work = max(work, size * (1 + 4 / itemsize) + size / num_ranks * (1 + _FITTED / itemsize) + graph)
        dense = sum(hidden if one.adds else one.width for one in inputs) if has_dense else 0
        kept = max(kept, dense + sum(one.width for one in routed))
    return {
        "shard of the weights": num_bytes(model) // num_ranks,
        "gathered block": gathered,
        "hidden states": num_tokens * itemsize * hidden * (2 if has_dense else 1),
        "inputs of a block": int(num_tokens * itemsize * kept),
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


def _num_active(config: Any) -> int:
    """Return how many experts a token goes to."""
    said = next((said for name in _EXPERTS_A_TOKEN if (said := largest_said(config, name))), _USUAL_EXPERTS)
    return max(said) if isinstance(said, list | tuple) else int(said)


def _inputs(linears: Sequence[LinearLayer], num_active: int) -> Iterator[_LayerInput]:
    """Yield the inputs of a block's ``linears``, in the order of its modules.

    Which layers share an input, and which add to hidden states, shows only when a block runs. Here a rule says it: of
    the layers of one module the last that puts out as many features as hidden states have adds to these, and the
    others share an input if they take equally many features.
    """
    modules: dict[str, dict[str, list[LinearLayer]]] = {}  # by the module's name, by the layer's; experts are one kind
    for linear in linears:
        kind = kind_of(linear.name if linear.expert is None else linear.parameter_path)
        modules.setdefault(kind.rpartition(".")[0], {}).setdefault(kind, []).append(linear)
    for module in modules.values():
        shared: dict[tuple[int, bool], list[list[LinearLayer]]] = {}
        for kind, layers in module.items():
            adds = kind == [*module][-1] and layers[0].num_out == linears[0].num_in
            shared.setdefault((layers[0].num_in, adds), []).append(layers)
        for (num_in, adds), kinds in shared.items():
            num, num_out = len(kinds[0]), sum(layers[0].num_out for layers in kinds)
            if kinds[0][0].is_routed:
                yield _LayerInput(num_in, num_out, num=num, share=min(num_active, num) / num, is_routed=True)
            else:
                yield _LayerInput(num_in, num_out, adds)
