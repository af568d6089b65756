"""The settings that our own arithmetic runs under, whatever the process has set for its models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch

_lock = threading.Lock()
_num_within = 0  # of all threads: the first changes what belongs to the process, and the last puts it back
_put_back: list[Callable[[], object]] = []


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
    _enter()
    try:
        if not casting:
            yield
            return
        with ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            for kind in casting:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _leave()


@cache
def _kinds_of_device() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _enter() -> None:
    global _num_within
    with _lock:
        _num_within += 1
        if _num_within == 1:
            if (dtype := torch.get_default_dtype()) != torch.float32:
                torch.set_default_dtype(torch.float32)
                _put_back.append(partial(torch.set_default_dtype, dtype))
            _raise_precision()


def _leave() -> None:
    global _num_within
    with _lock:
        _num_within -= 1
        while not _num_within and _put_back:
            _put_back.pop()()


def _raise_precision() -> None:
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
        _put_back.append(partial(setattr, of, "fp32_precision", precision))
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer settings are others
        older = "high" if _allows_tf32(cuda) else "highest"
    if older == "highest":
        cuda.fp32_precision = mkldnn.fp32_precision = "ieee"
    else:  # what asks the older way must hear the same: products on CUDA raise where it does not
        torch.set_float32_matmul_precision("highest")
        _put_back.append(partial(torch.set_float32_matmul_precision, older))


def _allows_tf32(cuda: Any) -> bool:
    """Return what was set for products on CUDA the older way."""
    try:
        return bool(cuda.allow_tf32)
    except RuntimeError:  # not what was set the newer way
        return bool(cuda.fp32_precision != "tf32")
