"""The settings that our own arithmetic runs under, whatever the process has set for its models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from distprune.shards.device import on_host

_PutBack = list[Callable[[], object]]


class _OfProcess:
    """Settings of the process: the first of all threads to enter changes them, the last to leave puts them back.

    ``change`` appends to a list what puts back each thing that it changes.
    """

    def __init__(self, change: Callable[[_PutBack], None]) -> None:
        self._change, self._lock, self._num_within = change, threading.Lock(), 0
        self._put_back: _PutBack = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_within += 1
            if self._num_within == 1:
                self._change(self._put_back)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            while not self._num_within and self._put_back:
                self._put_back.pop()()


@contextmanager
def own_settings() -> Iterator[None]:
    """Run the body without autocast, with full-precision float32 products and float32 as the default dtype. Local.

    All that scores, statistics, selection and solvers compute stands in one, so that settings of the process do not
    change masks or weights. A model's forward stands in none: its user's settings are meant for it. What is made within
    says its device; it may not matter whether algorithms are deterministic.

    Autocast belongs to a thread. The default dtype and the precision of products belong to the process: they are
    changed only where they are others, and for all threads until the last of these has left. So where ranks are
    threads, a model's forward may run under ours.

    Casts of weights that autocast has kept are dropped at the end: the weights may have been written to.
    """
    casting = [kind for kind in _kinds_of_device() if torch.is_autocast_enabled(kind)]
    with _precision:
        if not casting:
            yield
            return
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            for kind in casting:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


def plain_attention(device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which the backward pass of torch's attention has the same bits each time. Local.

    Fused kernels of accelerators add in any order: those are off for all threads, as of :func:`own_settings`. Nothing
    is changed of attention that a model computes in another way.
    """
    return nullcontext() if on_host(device) else _attention


@cache
def _kinds_of_device() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _change_numbers(put_back: _PutBack) -> None:
    if (dtype := torch.get_default_dtype()) != torch.float32:
        torch.set_default_dtype(torch.float32)
        put_back.append(partial(torch.set_default_dtype, dtype))
    _raise_precision(put_back)


def _raise_precision(put_back: _PutBack) -> None:
    """Have products of float32 matrices computed in float32, on every device."""
    backends: Any = torch.backends
    cuda, mkldnn = backends.cuda.matmul, backends.mkldnn.matmul
    before = cuda.fp32_precision, mkldnn.fp32_precision
    if {"ieee", "none"}.issuperset(before):
        return
    # One that follows a more general setting goes on to do so.
    general = backends.cudnn.fp32_precision, backends.mkldnn.fp32_precision
    own = ["none" if precision == of_all else precision for precision, of_all in zip(before, general, strict=True)]
    for of, precision in zip((cuda, mkldnn), own, strict=True):
        put_back.append(partial(setattr, of, "fp32_precision", precision))
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer settings are others
        older = "high" if _allows_tf32(cuda) else "highest"
    if older == "highest":
        cuda.fp32_precision = mkldnn.fp32_precision = "ieee"
    else:  # what asks the older way must hear the same: products on CUDA raise where it does not
        torch.set_float32_matmul_precision("highest")
        put_back.append(partial(torch.set_float32_matmul_precision, older))


def _allows_tf32(cuda: Any) -> bool:
    """Return what was set for products on CUDA the older way."""
    try:
        return bool(cuda.allow_tf32)
    except RuntimeError:  # not what was set the newer way
        return bool(cuda.fp32_precision != "tf32")


def _change_attention(put_back: _PutBack) -> None:
    stack = ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    put_back.append(stack.close)


_precision, _attention = _OfProcess(_change_numbers), _OfProcess(_change_attention)
