"""The code for devices on CPU tensors, and a count of what it would cost there: waits, memory."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from distprune.shards import device

__all__ = ["Memory", "Waits", "as_on_a_device", "counted_memory", "counted_waits"]

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
        waits.num_fetches += bool(tensors)
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


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``peak`` bytes of memory, of what was made within and is still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._alive: dict[int, Any] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if (storage := tensor.untyped_storage())._cdata not in known:
                self._note(storage)
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def counted_memory() -> Iterator[Memory]:
    """Count within the memory that tensors take."""
    with Memory() as memory:
        yield memory
