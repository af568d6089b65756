"""What the linear layers of a block are given, and what becomes of their outputs, while it runs.

Noun: a layer *adds to* the residual stream if a block puts out what it is given plus this layer's output, as it is, and
those of others. In most decoders the output of attention and that of the MLP do; where a norm or a factor comes in
between (Gemma 2, Granite), they do not. Its *total* is what the block is given plus the outputs that add, up to this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from distprune.models.experts import expert_inputs
from distprune.models.linear_layers import LinearLayer

Now = Callable[[], tuple[int, torch.Tensor]]  # the number of the run that is under way, and what its block is given


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
    linears: Mapping[str, LinearLayer],
    listener: Listener,
    adding: Mapping[str, LinearLayer] | None = None,
    now: Now | None = None,
) -> Iterator[None]:
    """Tell ``listener`` what ``linears`` are given while this lasts, and the totals of those in ``adding``.

    Through forward hooks on their modules. ``adding`` are all layers of the block that add to hidden states; ``now``
    must be there for them. Local.
    """
    with ExitStack() as stack:
        seen = _Seen()
        for name, module in first_layers(linears).items():
            # A linear's first of all hooks: those of tensor parallelism wrap the input anew for every layer.
            # The experts' last: theirs needs the weights, which a hook of FSDP2 may have yet to gather.
            is_linear = linears[name].expert is None
            hook = _hook(name, linears, listener, seen)
            stack.callback(module.register_forward_pre_hook(hook, prepend=is_linear, with_kwargs=True).remove)
        if adding and now is not None:
            totals = _HiddenStates(listener, now)
            for name, linear in adding.items():
                stack.callback(linear.module.register_forward_hook(partial(totals.add, name)).remove)
        yield


def first_layers(linears: Mapping[str, LinearLayer]) -> dict[str, nn.Module]:
    """Return the modules that hold ``linears``, by the first layer of each. Local."""
    first: dict[nn.Module, str] = {}
    for name, linear in linears.items():
        first.setdefault(linear.module, name)
    return {name: module for module, name in first.items()}


class _Seen:
    """Which tensors layers were given. One that was written to in between is another."""

    def __init__(self) -> None:
        self._refs: list[tuple[str, weakref.ref[torch.Tensor], int]] = []  # with version

    def first(self, name: str, x: torch.Tensor) -> str:
        """Return the first layer that was given ``x``, which layer ``name`` is given now."""
        version = 0 if x.is_inference() else x._version
        self._refs = [(other, ref, v) for other, ref, v in self._refs if ref() is not None]
        for other, ref, v in self._refs:
            if ref() is x and v == version:
                return other
        self._refs.append((name, weakref.ref(x), version))
        return name


def _hook(name: str, linears: Mapping[str, LinearLayer], listener: Listener, seen: _Seen) -> Callable[..., None]:
    """Return the pre-hook of the module that holds layer ``name``."""
    linear = linears[name]
    prefix = name.removesuffix(f"{linear.parameter_name}.{linear.expert}")

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if linear.expert is None:
            x = args[0] if args else kwargs["input"]
            listener.given(name, x, None, seen.first(name, x))
        else:
            for of_expert, (tokens, routed) in expert_inputs(module, args, kwargs).items():
                if prefix + of_expert in linears:
                    listener.given(prefix + of_expert, routed, tokens, seen.first(prefix + of_expert, routed))
        listener.passed(name)

    return hook


class _HiddenStates:
    """Adds what layers put out to what the block is given, in the order in which they run."""

    def __init__(self, listener: Listener, now: Now) -> None:
        self._listener, self._now = listener, now
        self._run = -1  # that is under way
        self._total: torch.Tensor | None = None  # hidden states in it so far

    def add(self, name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG002
        run, given = self._now()
        before = given if run != self._run or self._total is None else self._total
        self._run, self._total = run, before + output.detach().view_as(before)
        self._listener.added(name, self._total)
