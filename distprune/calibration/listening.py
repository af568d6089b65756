"""What the linear layers of a block are given, and what becomes of their outputs, while it runs.

Noun: a layer *adds to* the residual stream if a block puts out what it is given plus this layer's output, as it is, and
those of others. In most decoders the output of attention and that of the MLP do; where a norm or a factor comes in
between (Gemma 2, Granite), they do not. Its *total* is what the block is given plus the outputs that add, up to this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from distprune.calibration.walk import Walk
from distprune.models.experts import expert_inputs
from distprune.models.linear_layers import LinearLayer


class Listener(Protocol):
    """Is told, in the order in which a block does it; what it raises ends the run."""

    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:
        """Layer ``name`` is given ``x`` (..., in): all tokens, or, of an expert, those with the numbers ``tokens``.

        Where these are not known, there are none. ``first`` is the first layer that was given the same ``x``.
        """

    def passed(self, name: str) -> None:
        """All that the module of layer ``name`` is given has been told; ``name`` is the first layer it holds."""

    def added(self, name: str, total: torch.Tensor) -> None:
        """The output of layer ``name``, which adds to hidden states, brings them to ``total`` (..., out)."""


@contextmanager
def listening(
    walk: Walk, linears: Mapping[str, LinearLayer], listener: Listener, adding: Mapping[str, LinearLayer]
) -> Iterator[None]:
    """Tell ``listener`` what ``linears`` are given while this lasts, and the totals of those in ``adding``.

    Through forward hooks on their modules. ``adding`` are all layers that add to hidden states, of the block that
    ``walk`` runs. Local.
    """
    refs: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
    given = total = torch.empty(0, dtype=torch.float32, device="cpu")  # hidden states before the block, and by now

    def hear(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        linear = linears[name]
        if linear.expert is None:
            x = args[0] if args else next(iter(kwargs.values()))
            listener.given(name, x, None, _first(refs, name, x))
        else:
            prefix = name.removesuffix(f"{linear.parameter_name}.{linear.expert}")
            for of_expert, (tokens, x) in expert_inputs(module, args, kwargs).items():
                if (expert := prefix + of_expert) in linears:
                    listener.given(expert, x, tokens, _first(refs, expert, x))
        listener.passed(name)

    def add(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG001
        nonlocal given, total
        assert walk.given is not None  # a block runs
        before = total if given is walk.given else walk.given
        given, total = walk.given, before + output.detach().view_as(before)
        listener.added(name, total)

    with ExitStack() as stack:
        for name, module in first_layers(linears).items():
            # Last of all hooks: others may change the input, or gather experts. But those of tensor parallelism wrap a
            # linear's input anew for every layer.
            is_first = linears[name].expert is None and walk.sample_group.size > 1
            hook = partial(hear, name)
            stack.callback(module.register_forward_pre_hook(hook, prepend=is_first, with_kwargs=True).remove)
        for name, linear in adding.items():
            stack.callback(linear.module.register_forward_hook(partial(add, name)).remove)
        yield


def first_layers(linears: Mapping[str, LinearLayer]) -> dict[str, nn.Module]:
    """Return the modules that hold ``linears``, by the first layer of each. Local."""
    first: dict[nn.Module, str] = {}
    for name, linear in linears.items():
        first.setdefault(linear.module, name)
    return {name: module for module, name in first.items()}


def _first(refs: list[tuple[str, weakref.ref[torch.Tensor], int]], name: str, x: torch.Tensor) -> str:
    """Return the first layer that was given ``x``, which layer ``name`` is given now; one written to is another.

    ``refs`` are the tensors that layers were given, with their versions, and are brought up to date.
    """
    version = 0 if x.is_inference() else x._version
    refs[:] = [ref for ref in refs if ref[1]() is not None]
    first = next((other for other, ref, v in refs if ref() is x and v == version), None)
    if first is None:
        refs.append((name, weakref.ref(x), version))
    return first or name
