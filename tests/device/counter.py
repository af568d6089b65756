"""What calls cost on a device, by line of distprune: waits, copies from the host, operations."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves
from typing_extensions import override

import distprune
from tests.device.accelerator import extension

__all__ = ["Costs", "Ran"]

Ran = dict[tuple[str, tuple[str, ...]], str]  # operation and dtypes -> the line that it ran for first

# The host has to know their results, or how large they are. ``item`` and copies are told by the device itself.
_WAITING = {"nonzero", "argwhere", "equal", "allclose", "masked_select", "bincount", "_linalg_check_errors"} | {
    *("_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive", "_linalg_svd"),
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_PACKAGE = str(Path(distprune.__file__).parent) + "/"


class Costs(TorchDispatchMode):
    """Within, count by ``file.py:line`` of distprune; what runs for the tests alone is of ``(outside)``.

    Attributes:
        waits: how often the host waits, by line and operation.
        sends: how often the host sends tensors to the device, by line.
        operations: kernels that would be launched: all but views, and memory that is not filled.
        ran: which operation ran, with which dtypes.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.waits, self.sends, self.operations = (Counter[str]() for _ in range(3))
        self.ran: Ran = {}

    @override
    def __enter__(self) -> Costs:
        extension().on_event(self._hear)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        extension().on_event(None)

    def _hear(self, kind: str, what: str) -> None:
        (self.waits if kind == "wait" else self.sends)[f"{line_of_distprune()} {what}"] += 1

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # then come the operations on what it holds
        out = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return out
        inputs = [leaf for leaf in arg_tree_leaves(*args, **(kwargs or {})) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in arg_tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in (*inputs, *outputs) if tensor.device.type == self.device_type]
        name = func._schema.name.partition("::")[2]
        if there and func.namespace == "aten" and not func.is_view and name not in _EMPTY:
            line = line_of_distprune()
            self.operations[line] += 1
            self.ran.setdefault((str(func), tuple(map(self._dtype_of, inputs[:4]))), line)
            self._wait_for(name, line, args, kwargs or {})
        return out

    def _wait_for(self, name: str, line: str, args: Any, kwargs: dict[str, Any]) -> None:
        sizes_result = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _WAITING or sizes_result:
            self.waits[f"{line} {name}"] += 1
        elif name in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            value = args[2] if len(args) > 2 else None
            fills = value is not None and value.numel() == 1  # as masked_fill_ does
            if not fills and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.waits[f"{line} {name} by a mask"] += 1
            if any(index.device.type != self.device_type for index in indices):
                self.sends[f"{line} {name} by an index of the host"] += 1
                self.waits[f"{line} {name} by an index of the host"] += 1

    def _dtype_of(self, tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.") + ("" if tensor.device.type == self.device_type else "@host")


def line_of_distprune() -> str:
    """Return the innermost line of distprune that runs: of ``shards/device.py``, which fetches for others, theirs."""
    frame = sys._getframe(1)
    while True:
        path = _within(frame.f_code.co_filename)
        if path not in (None, "shards/device.py"):
            return f"{path}:{frame.f_lineno}"
        if frame.f_back is None:
            return "(outside)"
        frame = frame.f_back


@functools.cache
def _within(path: str) -> str | None:
    return path.removeprefix(_PACKAGE) if path.startswith(_PACKAGE) else None
