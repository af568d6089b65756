"""What operations on tensors touch: how many there are, their bytes, and the memory that is in use at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

__all__ = ["Touched"]

_Reference: Any = StorageWeakRef
_UNWRITTEN = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)


class Touched(TorchDispatchMode):
    """Counts within: ``num_operations`` but for views, and the ``num_bytes`` of the tensors that they take and return.

    What is both, as of an operation in place, counts twice (of a list of tensors once, since nothing is returned); what
    is only made room for, not at all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0
        self.num_bytes = 0
        self._most = 0
        self._alive: dict[int, tuple[Any, int]] = {}  # by storage
        self._before: dict[int, torch.UntypedStorage] = {}  # kept, so that no other has its number

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        for storage in (tensor.untyped_storage() for tensor in given):
            if storage._cdata not in self._alive:
                self._before[storage._cdata] = storage
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not func.is_view:
            self.num_operations += 1
            if func.overloadpacket not in _UNWRITTEN:
                self.num_bytes += sum(tensor.nbytes for tensor in (*given, *made))
        self._look(made)
        return result

    def _look(self, made: list[torch.Tensor]) -> int:
        """Return how many bytes of new tensors, ``made`` among them, are alive."""
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        for storage in (tensor.untyped_storage() for tensor in made):
            if storage._cdata not in self._before:
                self._alive[storage._cdata] = _Reference(storage), storage.nbytes()
        alive = sum(size for _, size in self._alive.values())
        self._most = max(self._most, alive)
        return alive

    @property
    def peak(self) -> int:
        """The most bytes of new tensors that were alive at a time, beyond those that are now."""
        return self._most - self._look([])
