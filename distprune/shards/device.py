"""Work on a device: chunk by chunk, and never waiting for it within a loop over chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from distprune.shards.torch_private import TorchDispatchMode, private

_HOST_TYPES = ("cpu",)  # of devices; what lies there is worked on by numpy
_HOST_CHUNK = 1 << 17  # elements: the temporaries of one chunk stay in a core's second-level cache
SMALL = 1 << 14  # elements: so many and fewer are worked on together with those of other shards
_CPU_BFLOAT16 = [
    private("torch.cpu", name, is_optional=True) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
]
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_COUNTED = ("cuda", "mps", "xpu", "meta")  # kinds of devices of which we say that there are none
_DEVICE_CHUNK = 1 << 21  # elements: large enough to fill an accelerator, and under 64 MiB of temporaries


def on_host(device: torch.device) -> bool:
    """Return whether what lies on ``device`` is worked on by the host."""
    return device.type in _HOST_TYPES


def as_device(device: torch.device | str) -> torch.device:
    """Return ``device``, if there is such a one here. Local.

    Raises:
        ValueError: it is no name of a device, or there is none.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device: say 'cpu', or 'cuda'") from error
    here = torch.accelerator.current_accelerator()
    num = torch.get_device_module(found).device_count() if here is not None and here.type == found.type else 0
    if found.type in _COUNTED and (found.index or 0) >= num:
        raise ValueError(f"device={str(device)!r}: there are {num} {found.type.upper()} devices here; say 'cpu'")
    return found


def chunk_size(device: torch.device) -> int:
    """Return how many elements one pass works on at a time on ``device``."""
    return _HOST_CHUNK if on_host(device) else _DEVICE_CHUNK


def row_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of the same rows of all ``tensors``, of one shape and not 0-D; of about a chunk's elements."""
    first = tensors[0]
    if first.numel():
        num_rows = max(1, chunk_size(first.device) * len(first) // first.numel())
        yield from zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)


def batches(items: Iterable[tuple[Any, int]], most: int) -> Iterator[list[Any]]:
    """Yield items to take together, but for empty ones: of ``most`` elements at most, or one that has more.

    ``items``: each with its number of elements.
    """
    batch: list[Any] = []
    total = 0
    for item, numel in items:
        if batch and total + numel > most:
            yield batch
            batch, total = [], 0
        if numel:
            batch.append(item)
            total += numel
    if batch:
        yield batch


def are_finite(values: torch.Tensor) -> torch.Tensor:
    """Return whether none of ``values`` is NaN or infinite, bool, on their device: one pass, without waiting for it."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return (torch.stack(torch.aminmax(values)) * 0 == 0).all()


def count_true(flags: torch.Tensor) -> torch.Tensor:
    """Return how many of ``flags`` (bool) are True: int64, on their device, without waiting for it."""
    if on_host(flags.device):
        # A fifth of the time torch takes.
        return torch.tensor(np.count_nonzero(flags.numpy()), dtype=torch.int64, device="cpu")
    return torch.count_nonzero(flags)


def is_zero(values: torch.Tensor) -> torch.Tensor:
    """Return which of ``values`` are 0, or -0, bool, on their device, without waiting for it."""
    if not on_host(values.device):
        return values == 0
    if values.dtype in (torch.bfloat16, torch.float16):
        return torch.from_numpy((values.view(torch.int16).numpy() & np.int16(0x7FFF)) == 0)
    if values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(values.numpy() == 0)  # a tenth of the time torch takes
    return values == 0


def fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors`` on the CPU: one wait for all of a dtype. The only way from a device."""
    there: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        there.setdefault((tensor.device, tensor.dtype), []).append(i)
    found = list(tensors)
    for (device, _), places in there.items():
        if device.type != "cpu":
            parts = [tensors[i].reshape(-1) for i in places]
            flat = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()
            for i, values in zip(places, torch.split(flat, [tensors[i].numel() for i in places]), strict=True):
                found[i] = values.view(tensors[i].shape)
    return found


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor``, which lies on the CPU, on ``device``. The only way there: the host does not wait."""
    return tensor.to(device, non_blocking=True)  # what is not pinned is copied aside before this returns


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
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cpu" if accelerator is None else accelerator.type}
    casting = [*filter(torch.is_autocast_enabled, kinds)]
    with _precision, ExitStack() as stack:
        if casting:
            stack.callback(torch.clear_autocast_cache)
        for kind in casting:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def ordered_attention(device: torch.device) -> Iterator[None]:
    """Run the body so that the backward pass of torch's attention, if within, has the same bits each time. Local.

    Fused kernels of accelerators add in any order. Those of CUDA do not where algorithms are to be deterministic: these
    are, for their time. Others are off, for all threads, as of :func:`own_settings`. Nothing is changed of attention
    that a model computes in another way.
    """
    with ExitStack() as stack:
        if not on_host(device):
            # Where a kernel raises, what comes behind it does not run.
            stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            stack.enter_context(_attention[device.type == "cuda"])
            stack.enter_context(_Ordering())
        yield


def half_products(device: torch.device) -> AbstractContextManager[object]:
    """Return what has products of float32 matrices computed in bfloat16 on a CPU that is faster so. Local.

    Forward and backward. Unlike autocast it changes no dtype that a model sees. It is for gradients, which are rough
    anyway: with autocast's, rounded as much, a block of SmolLM2 was fitted to the same error in four digits.
    """
    has_it = device.type == "cpu" and any(asks is not None and asks() for asks in _CPU_BFLOAT16)
    return _HalfProducts() if has_it else nullcontext()  # type: ignore[no-untyped-call]


class _HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and all(operand.dtype == torch.float32 for operand in args):
            return func(*(operand.bfloat16() for operand in args), **(kwargs or {})).float()
        return func(*args, **(kwargs or {}))


class _Ordering(TorchFunctionMode):
    """Within, algorithms are deterministic while fused attention runs backward."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is scaled_dot_product_attention and (last := output.grad_fn) is not None:
            before = torch.get_deterministic_debug_mode()
            for node in (last, *(node for node, _ in last.next_functions)):  # what is fused may be cut behind
                if node is not None and "Attention" in node.name():
                    node.register_prehook(lambda _: torch.set_deterministic_debug_mode("error"))
                    node.register_hook(lambda *_: torch.set_deterministic_debug_mode(before))
        return output


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


_precision = _OfProcess(_full_precision)
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
# Of other devices, and of CUDA.
_attention = [_OfProcess(partial(sdpa_kernel, [*fused, SDPBackend.MATH])) for fused in ((), _FUSED)]
