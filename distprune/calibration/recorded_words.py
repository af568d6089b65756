"""Texts that a model writes by one CUDA graph a token: what a forward costs the host is paid once.

Noun: a *step* runs the last token of each text, and writes the next. It does the same whatever is written: keys and
values lie in a static cache of transformers, as long as the texts become.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_ALIGNED = 16  # keys: of another number attention copies the mask
_NUM_BEFORE = 3  # steps before there is a graph
_LEAST = 16  # steps that are worth one
_REACH = 256  # keys that steps of the first graph read


def can_record(model: nn.Module, num_steps: int) -> bool:
    """Return whether it is worth trying: a whole model on the current CUDA device, made for static caches. Local."""
    places = {(type(parameter), parameter.device) for parameter in model.parameters()}
    return (
        torch.cuda.is_available()
        and places == {(nn.Parameter, torch.device("cuda", torch.cuda.current_device()))}
        and num_steps >= _LEAST
        and bool(getattr(model, "_can_compile_fullgraph", False))
        and not any(isinstance(module, FSDPModule) for module in model.modules())
        and not torch.is_autocast_enabled("cuda")
    )


@torch.no_grad()
def write_recorded(
    model: Any,
    prompts: torch.Tensor,
    length: int,
    shuffle: Callable[[int], object],
    draw: Callable[[torch.Tensor], torch.Tensor],
    tell: Callable[[int], None],
) -> torch.Tensor | None:
    """Return ``prompts`` (texts, k), continued to ``length``; ``None``: steps of this model cannot be recorded.

    ``draw`` is given logits (texts, vocabulary) and returns tokens (texts, 1). What it draws by is made anew by
    ``shuffle``, which is given the token's place and is not recorded. ``tell`` is called with how many tokens of a text
    are on their way. Local.
    """
    caches, num_given = sys.modules["transformers.cache_utils"], prompts.shape[1]
    texts = nn.functional.pad(prompts, (0, length - num_given))
    place = torch.full((1,), num_given, dtype=torch.int64, device=prompts.device)  # of the next token
    reach = [max(_REACH, 2 * num_given)]  # as many keys a step reads, of those that there is room for

    def step(ids: torch.Tensor | None = None) -> None:
        ids = texts.index_select(1, place - 1) if ids is None else ids
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        texts.index_copy_(1, place, draw(logits))
        place.add_(1)

    with ExitStack() as stack:
        functions: Any = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        stack.callback(functions.__setitem__, "sdpa", functions["sdpa"])
        functions["sdpa"] = partial(_attention, functions["sdpa"], reach)
        try:
            cache = caches.StaticCache(config=model.config, max_cache_len=-(-length // _ALIGNED) * _ALIGNED)
            if {*map(type, cache.layers)} != {caches.StaticLayer}:  # others count tokens on the host
                return None
            for number, ids in enumerate((prompts, None)):
                shuffle(num_given + number)
                step(ids)
            shuffle(num_given + 2)
            run = recorded(step)
        except Exception:  # it waits for the device, say; token by token it writes all the same, or raises again
            return None
        for number in range(1, length - num_given + 1):
            if number > _NUM_BEFORE:
                shuffle(num_given + number - 1)
                if num_given + number - 1 > reach[0]:
                    reach[0] *= 2
                    run = recorded(step)
                else:
                    run()
            tell(number)
    return texts


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Return what runs ``step`` again, as one graph. It has run before, and does so once here.

    Raises:
        RuntimeError: it waits for the device.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that not all waits are found
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _attention(
    plain: Any, reach: list[int], module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> Any:
    """As ``plain``, transformers' attention, but of one token: ``reach`` keys, in which heads that share some meet.

    They are read as they lie, without a copy for each head.
    """
    num, heads, length, width = query.shape
    if length > 1 or mask is None or mask.shape[1] > 1 or kwargs.get("position_bias") is not None:
        return plain(module, query, key, value, mask, **kwargs)
    key, value, mask = key[:, :, : reach[0]], value[:, :, : reach[0]], mask[..., : reach[0]]
    by_key = query.reshape(num, key.shape[1], -1, width)
    out = nn.functional.scaled_dot_product_attention(by_key, key, value, mask, scale=kwargs.get("scaling"))
    return out.reshape(num, 1, heads, -1), None
