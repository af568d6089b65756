"""The private names of torch that this library uses; ``tests/test_torch_private.py`` lists those of FSDP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["FSDPParam", "FSDPState", "StridedShard", "find_private", "private"]


def find_private(module: str, name: str) -> Any:
    """Return ``name`` of torch's ``module``, or ``None`` if torch has no such name."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def private(module: str, name: str) -> Any:
    """Return ``name`` of torch's ``module``.

    Raises:
        ImportError: torch has no such name: it is older or newer than those that distprune works with.
    """
    if (found := find_private(module, name)) is None:
        raise ImportError(f"torch {torch.__version__} has no {module}.{name}: distprune works with torch 2.11 to 2.15")
    return found


_FSDP2 = "torch.distributed.fsdp._fully_shard."
if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    FSDPParam = private(_FSDP2 + "_fsdp_param", "FSDPParam")
    FSDPState = private(_FSDP2 + "_fsdp_state", "FSDPState")
    StridedShard = private("torch.distributed.tensor.placement_types", "_StridedShard")
