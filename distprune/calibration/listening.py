"""What the linear layers of a block are given, and what becomes of their outputs, while it runs.

Noun: a layer *adds to* the residual stream if its output, as it is, is one addend of a sum of hidden states; that
*sum* is known to whoever listens. In most decoders the output of attention and that of the MLP do; where a norm or a
factor comes in between (Gemma 2, Granite), they do not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from distprune.models.experts import expert_inputs
from distprune.models.linear_layers import LinearLayer

_ADDS = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__iadd__} | {
    torch.Tensor.__radd__
}


class Listener(Protocol):
    """Is told, in the order in which a block does it; what it raises ends the run."""

    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:
        """Map ``name`` is given ``x`` (..., in): all tokens, or, of an expert, those with the numbers ``tokens``.

        Where these are not known, there are none. ``first`` is the first layer that was given the same ``x``.
        """

    def passed(self, name: str) -> None:
        """All that the module of layer ``name`` is given has been told; ``name`` is the first layer it holds."""

    def added(self, name: str, total: torch.Tensor) -> None:
        """The output of layer ``name`` was added to hidden states: to ``total`` (..., out)."""


@contextmanager
def listening(
    linears: Mapping[str, LinearLayer],
    listener: Listener,
    adding: Mapping[str, LinearLayer] | None = None,
    *,
    unseen: Collection[str] = (),
    now: Callable[[], tuple[int, torch.Tensor]] | None = None,
) -> Iterator[None]:
    """Tell ``listener`` what ``linears`` are given while this lasts, and the sums that the layers in ``adding`` add to.

    Through forward hooks on their modules, and functions called in the body. ``adding`` must have all layers of the
    block that add to hidden states, or a sum of two of them would not be told from one with hidden states. Those in
    ``unseen`` do it in a way that shows in no function of torch: their sum is made here, of what the block is given in
    this run, which ``now`` returns with the run's number, and of the outputs in ``adding`` so far. Local.
    """
    with ExitStack() as stack:
        seen = _Seen()
        for name, module in first_layers(linears).items():
            # A linear's first of all hooks: those of tensor parallelism wrap the input anew for every layer.
            # The experts' last: theirs needs the weights, which a hook of FSDP2 may have yet to gather.
            is_linear = linears[name].expert is None
            hook = _hook(name, linears, listener, seen)
            stack.callback(module.register_forward_pre_hook(hook, prepend=is_linear, with_kwargs=True).remove)
        if adding:
            sums = stack.enter_context(_Sums(listener, unseen, now))
            for name, linear in adding.items():
                stack.callback(linear.module.register_forward_hook(partial(sums.follow, name)).remove)
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


class _Sums(TorchFunctionMode):
    """Follows the outputs of layers into the sums that they are addends of.

    A sum of outputs alone (attention and MLP side by side) is followed into the next one.
    """

    def __init__(
        self, listener: Listener, unseen: Collection[str], now: Callable[[], tuple[int, torch.Tensor]] | None
    ) -> None:
        super().__init__()
        self._listener, self._unseen, self._now = listener, unseen, now
        self._followed: dict[str, torch.Tensor] = {}
        self._run = -1  # that is under way
        self._total: torch.Tensor | None = None  # hidden states in it so far

    def follow(self, name: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._unseen and self._now is not None:
            run, given = self._now()
            self._total = output + (given if run != self._run or self._total is None else self._total)
            self._run = run
        if name in self._unseen and self._total is not None:
            self._listener.added(name, self._total)
        elif isinstance(output, torch.Tensor):
            self._followed[name] = output

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _ADDS or kwargs or not self._followed:
            return func(*args, **(kwargs or {}))
        names = [[name for name, output in self._followed.items() if _is_same(output, addend)] for addend in args]
        total = func(*args)
        if len(names) != 2 or not any(names) or any(not _has_size(addend, total) for addend in args):
            return total
        for name in {*names[0], *names[1]}:
            if all(names):
                self._followed[name] = total
            else:
                del self._followed[name]
                self._listener.added(name, total)
        return total


def _has_size(addend: Any, total: torch.Tensor) -> bool:
    return isinstance(addend, torch.Tensor) and addend.numel() == total.numel()


def _is_same(output: torch.Tensor, addend: Any) -> bool:
    """Return whether ``addend`` is ``output``, seen in another shape maybe."""
    if output is addend or type(addend) is not type(output):
        return output is addend
    alike = addend.numel() == output.numel() and addend.dtype == output.dtype and addend.is_contiguous()
    return alike and output.is_contiguous() and addend.data_ptr() == output.data_ptr()
