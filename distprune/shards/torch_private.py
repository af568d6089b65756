"""The private names of torch that this library uses; ``tests/test_torch_private.py`` lists those of FSDP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["FSDPParam", "FSDPState", "StridedShard", "TorchDispatchMode", "private"]


def private(module: str, name: str, *, is_optional: bool = False) -> Any:
    """Return ``name`` of torch's ``module``; ``None`` where torch has none and it ``is_optional``.

    Raises:
        ImportError: torch has no such name: it is older or newer than those that distprune works with.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        if is_optional:
            return None
        text = f"torch {torch.__version__} has no {module}.{name}: distprune works with torch 2.11 to 2.15"
        raise ImportError(text) from error


_FSDP2 = "torch.distributed.fsdp._fully_shard."
if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FSDPParam = private(_FSDP2 + "_fsdp_param", "FSDPParam")
    FSDPState = private(_FSDP2 + "_fsdp_state", "FSDPState")
    StridedShard = private("torch.distributed.tensor.placement_types", "_StridedShard")
    TorchDispatchMode = private("torch.utils._python_dispatch", "TorchDispatchMode")
