"""What a process may have set for its models, and must not matter to pruning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

__all__ = ["STATES", "ambient", "of_process", "of_thread"]


class _BFloat16Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does what CPUs with the instructions for it do, on any: float32 products of bfloat16 values, if that is set."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        if precision == "bf16" and func.overloadpacket in _PRODUCTS:
            *others, one, other = args
            args = (*others, _rounded(one), _rounded(other))
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.addmm_, _ATEN.bmm, _ATEN.baddbmm, _ATEN.mv, _ATEN.addmv, _ATEN.dot}


def _rounded(operand: torch.Tensor) -> torch.Tensor:
    return operand.bfloat16().float() if operand.dtype == torch.float32 else operand


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _medium() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"  # it was put back
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Enter = Callable[[], AbstractContextManager[object]]
# What belongs to the process, and what to each thread.
STATES: dict[str, tuple[Enter | None, Enter | None]] = {
    "default device": (None, lambda: torch.device("meta")),
    "default dtype": (_default_dtype, None),
    "autocast": (None, lambda: torch.autocast("cpu", torch.bfloat16)),
    "matmul precision": (_medium, _BFloat16Products),
    "deterministic": (_deterministic, None),
}


@contextmanager
def _entered(*enters: Enter | None) -> Iterator[None]:
    with ExitStack() as stack:
        for enter in enters:
            if enter is not None:
                stack.enter_context(enter())
        yield


def of_process(state: str) -> AbstractContextManager[None]:
    """Set what belongs to the process: once, where ranks are threads."""
    return _entered(STATES[state][0])


def of_thread(state: str) -> AbstractContextManager[None]:
    """Set what belongs to the thread."""
    return _entered(STATES[state][1])


def ambient(state: str) -> AbstractContextManager[None]:
    """Set ``state`` in the one thread of a process."""
    return _entered(*STATES[state])
