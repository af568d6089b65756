"""Buffers that no checkpoint holds: rotary frequencies, causal masks, ALiBi slopes.

A model built on the meta device has lost them. Transformers computes them again in the ``_init_weights``
of the model, beside the weights; what is marked ``_is_hf_initialized`` it leaves alone.
"""

from __future__ import annotations

from typing import Any

import torch

from distprune.shards.device import own_settings


def compute_buffers(model: Any) -> None:
    """Let transformers compute the non-persistent buffers of ``model``, and see that it did.

    Parameters and persistent buffers stay as they are. Local; nothing is communicated.

    Raises:
        NotImplementedError: a buffer is not computed.
    """
    persistent = model.state_dict().keys()
    names = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in persistent]
    if not names:
        return
    # What is computed does not depend on what was there before.
    low, high = (_computed_over(model, names, value) for value in (0, 1))
    for name in names:
        if not torch.equal(low[name], high[name]):
            raise NotImplementedError(
                f"the buffer {name!r} of {type(model).__name__} is in no checkpoint and transformers does not compute "
                "it for a model built on the meta device; this architecture cannot be loaded in shards"
            )


def _computed_over(model: Any, names: list[str], value: int) -> dict[str, torch.Tensor]:
    """Compute the buffers after filling them with ``value``, and return their bytes."""
    wanted = {id(model.get_buffer(name)) for name in names}
    modules = {name.rpartition(".")[0] for name in names}
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        tensor._is_hf_initialized = id(tensor) not in wanted
    for prefix, module in model.named_modules():
        module._is_hf_initialized = prefix not in modules
    for name in names:
        model.get_buffer(name).fill_(value)
    with own_settings(), torch.device("cpu"):
        model.initialize_weights()
    for tensor in tensors:
        del tensor._is_hf_initialized
    return {name: model.get_buffer(name).clone().reshape(-1).view(torch.uint8) for name in names}
