"""Saving for others: what transformers and Accelerate write of a reparametrized model has plain keys.

``PreTrainedModel.save_pretrained`` is where all saving for ``from_pretrained`` comes together: the user's call, the
Trainer's, Accelerate's. It asks the model for its state dict or is given one. A pruned module cannot know for whom a
state dict is, nor which model it is part of. So the first time that a module is reparametrized, these few methods of
classes that are imported by then are replaced by ones that do the same with plain keys. Models without pruned modules
do not notice. Saving that is meant to be resumed from (``Accelerator.save_state``, sharded checkpoints) keeps the
original and the mask.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from distprune.masks.hooks import pruning_hooks
from distprune.masks.plain_keys import joined, plain_keys

# By module, class and method.
_SAVERS = (
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("accelerate.accelerator", "Accelerator", "save_model"),
)


def watch_savers() -> None:
    """Let what is imported of transformers and Accelerate save plain keys of reparametrized models. Local."""
    for module, name, method in _SAVERS:
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None and not hasattr(vars(owner)[method], "_saves_plain_keys"):
            setattr(owner, method, _saving_plain_keys(vars(owner)[method]))


def _saving_plain_keys(save: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        model: nn.Module = given.get("model", given["self"])
        if given.get("distributed_checkpoint") or not any(pruning_hooks(module) for module in model.modules()):
            return save(*args, **kwargs)
        if given.get("state_dict") is not None:
            given["state_dict"] = joined(model, given["state_dict"])
        with plain_keys():
            return save(*bound.args, **bound.kwargs)

    saving._saves_plain_keys = True  # type: ignore[attr-defined]
    return saving
