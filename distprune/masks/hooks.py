"""The pruning hooks of a module: by them a reparametrized module is known, ours and PyTorch's."""

from __future__ import annotations

import torch.nn.utils.prune as torch_prune
from torch import nn


def pruning_hooks(module: nn.Module, name: str | None = None) -> dict[int, torch_prune.BasePruningMethod]:
    """Return the pruning pre-hooks of ``module`` by key, ours and PyTorch's, on ``name`` or (``None``) any."""
    return {
        key: hook
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, torch_prune.BasePruningMethod) and name in (None, getattr(hook, "_tensor_name", None))
    }
