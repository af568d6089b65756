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


class _OfProcess:
    """Settings of the process: the first of all threads to enter changes them, the last to leave puts them back."""

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        self._change, self._lock, self._num_within, self._changed = change, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._num_within += 1
            if self._num_within == 1:
                self._changed.enter_context(self._change())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                self._changed.close()


@contextmanager
def own_settings() -> Iterator[None]:
    """Run the body without autocast, with full-precision float32 products and float32 as the default dtype. Local.

    All that scores, statistics, selection and solvers compute stands in one, so that settings of the process do not
    change masks or weights. A model's forward stands in none: its user's settings are meant for it. Factories within
    name their device; results may not depend on whether algorithms are deterministic.

    Autocast belongs to a thread. The default dtype and the precision of products belong to the process: they are
    changed only where they are others, and for all threads until the last of these has left. So where ranks are
    threads, a model's forward may run under ours.

    Casts of weights that autocast has kept are dropped at the end: the weights may have been written to.
    """
    casting = [kind for kind in _kinds_of_device() if torch.is_autocast_enabled(kind)]
    with _precision, ExitStack() as stack:
        if casting:
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


@contextmanager
def _full_precision() -> Iterator[None]:
    """Have products of float32 matrices computed in float32, on every device, and float32 as the default dtype."""
    backends: Any = torch.backends
    dtype, products = torch.get_default_dtype(), (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [product.fp32_precision for product in products]
    general = backends.cudnn.fp32_precision, backends.mkldnn.fp32_precision
    older = "" if {"ieee", "none"}.issuperset(before) else _older(backends.cuda.matmul)
    if dtype != torch.float32:
        torch.set_default_dtype(torch.float32)
    if older == "highest":
        for product in products:
            product.fp32_precision = "ieee"
    elif older:  # what asks the older way must hear the same: products on CUDA raise where it does not
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if dtype != torch.float32:
            torch.set_default_dtype(dtype)
        if older and older != "highest":
            torch.set_float32_matmul_precision(older)
        for product, precision, of_all in zip(products, before, general, strict=True):
            if older:  # one that follows a more general setting goes on to do so
                product.fp32_precision = "none" if precision == of_all else precision


def _older(cuda: Any) -> str:
    """Return what was set for products the older way."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer settings are others
        pass
    try:
        allows_tf32 = bool(cuda.allow_tf32)
    except RuntimeError:  # not what was set the newer way
        allows_tf32 = cuda.fp32_precision != "tf32"
    return "high" if allows_tf32 else "highest"


_precision, _attention = _OfProcess(_full_precision), _OfProcess(partial(sdpa_kernel, SDPBackend.MATH))
