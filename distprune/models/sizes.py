"""What a model's configuration says of its text model, and how large the model is. No communication."""

from __future__ import annotations

from typing import Any

from torch import nn


def text_config(model: nn.Module) -> Any:
    """Return the configuration of what reads and writes text in ``model``, ``None`` without any. Local."""
    config: Any = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


def num_bytes(module: nn.Module) -> int:
    """Return the size of all parameters of ``module``: the whole ones, where they are sharded. Local."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
