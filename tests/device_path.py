"""The code for devices on CPU tensors, and a count of what it would cost there: waits, operations, bytes, memory."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from distprune.shards import device

__all__ = ["Waits", "Work", "as_on_a_device", "bytes_touched", "counted_waits", "counted_work"]

_aten = torch.ops.aten
# Their results, or the sizes of them, are known on the host once the device has caught up.
_WAITING = (
    *(_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal, _aten.nonzero, _aten.masked_select, _aten.bincount),
    *(_aten._unique2, _aten.unique_consecutive, _aten.unique_dim, _aten.repeat_interleave),
)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_BLOCKING = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__")


@contextlib.contextmanager
def as_on_a_device(chunk: int = 512) -> Iterator[None]:
    """Within, what lies on the CPU is worked on as on a device, ``chunk`` elements at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_HOST_TYPES", ())
        patch.setattr(device, "_DEVICE_CHUNK", chunk)
        yield


class Waits:
    """How often the host asked for values, by what it called; ``num_fetches``: through ``fetched``."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_fetches = 0


@contextlib.contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count within, of device code on CPU tensors: on the host too, so the count stands for one where it grows."""
    waits = Waits()

    class Calls(TorchFunctionMode):
        """Of methods that read a CPU tensor without dispatching anything, and of copies made of the host's data."""

        @override
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in _BLOCKING or func in (torch.tensor, torch.as_tensor):
                waits.calls[name] += 1
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in _WAITING:
                waits.calls[str(func)] += 1
            if func.overloadpacket in _INDEXING and any(at is not None and at.dtype is torch.bool for at in args[1]):
                waits.calls[f"{func} by a mask"] += 1
            return func(*args, **(kwargs or {}))

    def fetch(tensors: Any) -> Any:
        waits.num_fetches += 1
        return original(tensors)

    original = device.fetched
    with pytest.MonkeyPatch.context() as patch:
        for module in [module for name, module in sys.modules.items() if name.startswith("distprune")]:
            if getattr(module, "fetched", None) is original:
                patch.setattr(module, "fetched", fetch)
        from_numpy = torch.from_numpy

        def counted_from_numpy(array: Any) -> torch.Tensor:
            waits.calls["from_numpy"] += 1
            return from_numpy(array)

        patch.setattr(torch, "from_numpy", counted_from_numpy)
        with Calls(), Dispatched():  # type: ignore[no-untyped-call]
            yield waits


# They read, or write, as many elements of what they index as there are indices.
_GATHERING = (_aten.index, _aten.index_select, _aten.take, _aten.gather)
_SCATTERING = (_aten.index_add_, _aten.index_copy_, _aten.scatter_, _aten.scatter_add_, _aten.scatter_reduce_)


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a device would do: ``num`` operations, ``num_bytes`` that they read and write; ``peak`` bytes of memory.

    Views and memory that is asked for are no operations. The memory is of what was made within and is still alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = self.num_bytes = self.peak = self._now = 0
        self._alive: dict[int, Any] = {}
        self.by_operation: Counter[str] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors((args, kwargs))
        known = {each.untyped_storage()._cdata for each in given}
        out = func(*args, **(kwargs or {}))
        made = _tensors(out)
        for each in made:
            if (storage := each.untyped_storage())._cdata not in known:
                self._note(storage)
        mutates = func._schema.is_mutable
        is_view = not mutates and all(each.untyped_storage()._cdata in known for each in made)
        if not (is_view and made) and func.overloadpacket not in (_aten.empty, _aten.empty_like, _aten.empty_strided):
            num_bytes = bytes_touched(func, args, kwargs or {}, out)
            self.num, self.num_bytes = self.num + 1, self.num_bytes + num_bytes
            self.by_operation[str(func)] += num_bytes
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def free() -> None:
            del self._alive[key]
            self._now -= num_bytes

        self._alive[key] = weakref.finalize(storage, free)
        self._now += num_bytes
        self.peak = max(self.peak, self._now)


_LINE = 32  # bytes of memory that a device reads or writes at least


def bytes_touched(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """Return how many bytes of memory ``func``, which returned ``out``, reads and writes.

    It reads each byte once, and writes it once, whatever views its operands are. A strided view is all that it spans:
    memory is read and written in whole lines. ``out=`` is written alone.
    """
    read = _tensors((args, {name: value for name, value in kwargs.items() if name != "out"}))
    written = _tensors(out)
    if func.overloadpacket in _GATHERING:
        return _num_spanned(read[1:]) + written[0].nbytes + _num_spanned(written)
    if func.overloadpacket in _SCATTERING:
        return _num_spanned(read[1:]) + 2 * read[0].itemsize * max(each.numel() for each in read[1:])
    return _num_spanned(read) + _num_spanned(written)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _num_spanned(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes lie between the first and the last of ``tensors``; less where one skips whole lines."""
    ranges = []
    for each in tensors:
        steps = [(size - 1, step) for size, step in zip(each.shape, each.stride(), strict=True) if step]
        if each.numel():
            num_spanned = (1 + sum(last * step for last, step in steps)) * each.itemsize
            num = min(num_spanned, _LINE * math.prod(last + 1 for last, _ in steps))
            ranges.append((each.untyped_storage()._cdata, each.data_ptr(), each.data_ptr() + num))
    num = end_before = of_before = 0
    for storage, start, end in sorted(ranges):
        start = max(start, end_before) if storage == of_before else start
        num += max(end - start, 0)
        end_before, of_before = max(end, start), storage
    return num


@contextlib.contextmanager
def counted_work() -> Iterator[Work]:
    """Count within, of device code on CPU tensors, what it would be on a device."""
    with Work() as work:
        yield work
