"""A mask under FSDP2: multiplied into the shard before the all-gather.

A pruned parameter hands out its sharded data (see ``shards/fsdp2.py``) already masked, on the device that gathers.
So no rank ever holds a whole mask, the product costs 1/N, and everything after it (mixed precision, resharding to a
smaller mesh, prefetching, CPU offload) is FSDP2's own.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.shards.device import sent
from distprune.shards.fsdp2 import Fsdp2Params, Managed
from distprune.shards.torch_private import FSDPParam


class _MaskedParam(FSDPParam):
    """An ``FSDPParam`` whose all-gathers start from masked data. Instances change into it and back."""

    @property  # type: ignore[explicit-override]
    def _sharded_param_data(self) -> torch.Tensor:
        """The product of data and mask, 1-D and padded, made anew for every all-gather."""
        _watch_gradient(self)  # which comes after
        data: torch.Tensor = self.__dict__["_sharded_param_data"]
        if self.offload_to_cpu:  # a product made there would not be pinned, and its copy waited for
            data = sent(data, self.device)
        local_mask = sent(_local_mask(self).reshape(-1), data.device)
        if local_mask.numel() == data.numel():
            return data * local_mask
        masked = data.clone()
        masked[: local_mask.numel()].mul_(local_mask)  # the rest is padding
        return masked

    @_sharded_param_data.setter
    def _sharded_param_data(self, data: torch.Tensor) -> None:
        self.__dict__["_sharded_param_data"] = data

    @override
    def reset_sharded_param(self) -> None:
        """Look for a new sharded parameter, as after ``.to()`` or ``load_state_dict(assign=True)``."""
        param: Any = self
        param.__class__ = FSDPParam  # it compares storages: let it see the data themselves
        try:
            param.reset_sharded_param()
        finally:
            param.__class__ = _MaskedParam


def is_masked(module: nn.Module, name: str) -> bool:
    """Return whether FSDP2 multiplies the parameter by its mask before it gathers it. Local."""
    managed = Fsdp2Params().find(module, name)
    return managed is not None and isinstance(managed.param, _MaskedParam)


def _local_mask(param: FSDPParam) -> torch.Tensor:
    """Return this rank's mask as bytes: multiplying by them is three times as fast as by bools on a CPU."""
    info = param._module_info
    mask = info.module.get_buffer(info.param_name.removesuffix("_orig") + "_mask")
    if not isinstance(mask, DTensor):
        raise ValueError(
            f"the mask of {info.param_name!r} is a plain tensor of shape {tuple(mask.shape)}, its parameter is sharded "
            "by FSDP2; call distprune.shard_masks(model) after loading or moving masks"
        )
    return mask._local_tensor.view(torch.uint8)


def _watch_gradient(param: Any) -> None:
    """Mask the sharded gradient as FSDP2 accumulates it: the unsharded weight's is dense."""
    sharded: Any = param.sharded_param
    # No reference to the tensor is kept: module.to() would refuse to swap it.
    if param.__dict__.get("_watch") is not None and param._watch.id in (sharded._post_accumulate_grad_hooks or {}):
        return
    if not sharded.requires_grad:
        return
    reference = weakref.ref(param)

    def mask_gradient(parameter: torch.Tensor) -> None:
        param = reference()
        if param is not None and parameter.grad is not None:
            gradient = cast(DTensor, parameter.grad)._local_tensor
            gradient.mul_(_local_mask(param).to(gradient.device))

    param._watch = sharded.register_post_accumulate_grad_hook(mask_gradient)
    # Before those that were there: an optimizer that steps within the backward pass.
    sharded._post_accumulate_grad_hooks.move_to_end(param._watch.id, last=False)


def rename(managed: Managed, name: str, *, masked: bool) -> None:
    """Follow the parameter to its new ``name`` in its module; mask it from now on, or no longer."""
    param = managed.param
    param._module_info.param_name = name
    param.__class__ = _MaskedParam if masked else FSDPParam
    if not masked and param.__dict__.get("_watch") is not None:
        (param.sharded_param._post_accumulate_grad_hooks or {}).pop(param._watch.id, None)
        param._watch = None
