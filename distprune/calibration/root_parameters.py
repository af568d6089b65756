"""What a model needs around its decoder blocks, without gathering it: the root's parameters under FSDP2.

FSDP2 gathers all parameters of the root, embeddings and output head, before its forward. A walk needs of them
the embeddings of a few thousand tokens. So the root's forward runs without its hooks, and its functions are
handed what they ask for: rows are looked up where they are, anything else is gathered by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from distprune.collectives.base import Communicator
from distprune.collectives.tensors import lookup_rows, whole_tensor
from distprune.masks.fsdp2 import is_masked
from distprune.shards.fsdp2 import own_params
from distprune.shards.torch_private import private

_tree_map = private("torch.utils._pytree", "tree_map")

_ASK_FOR_NO_VALUES = ("__get__", "size", "dim", "numel", "is_floating_point")  # weight.dtype and the like


class RootParameters(TorchFunctionMode):
    """While it lasts, functions called with a parameter of the root in its shards work as if it were gathered.

    FSDP2 must know its roots (``shards.take_roots``), and every rank must run the same functions, with inputs of its
    own. Rounds: 3 for a look-up (8 bytes and the row for every different index), counted in the traffic of
    ``comm``; 1 for any other parameter, which is kept.
    """

    def __init__(self, comm: Communicator, model: nn.Module) -> None:
        super().__init__()
        self._comm = comm
        self._dtypes = {id(of.sharded): of.compute_dtype for of in own_params(model)}
        self._whole: dict[int, torch.Tensor] = {}

    @staticmethod
    def can_stand_in(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
        """Return whether FSDP2 manages ``model`` and each of ``blocks``, and nothing else cuts the root's weights."""
        if not isinstance(model, FSDPModule) or not all(isinstance(block, FSDPModule) for block in blocks):
            return False
        if len(model._forward_pre_hooks) > 1:  # FSDP2's and somebody else's, which may matter
            return False
        return all(
            not is_masked(of) and of.ranks == frozenset(of.sharded.device_mesh.mesh.flatten().tolist())
            for of in own_params(model)
        )

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _ASK_FOR_NO_VALUES:
            return func(*args, **kwargs)
        if func is F.embedding:
            given = inspect.signature(F.embedding).bind(*args, **kwargs).arguments
            if id(given["weight"]) in self._dtypes and (axis := _rows_cut_by(given["weight"])) is not None:
                return func(**{**given, **self._looked_up(given["input"], given["weight"], axis), "padding_idx": None})
        args, kwargs = _tree_map(self._gathered, (args, kwargs))
        return func(*args, **kwargs)

    def _looked_up(self, indices: torch.Tensor, weight: DTensor, axis: int) -> dict[str, torch.Tensor]:
        """Return the few rows asked for and the indices among them."""
        different, place = torch.unique(indices, return_inverse=True)
        group = weight.device_mesh.get_group(axis)
        rows = lookup_rows(self._comm, group, weight.to_local(), weight.shape[0], different)
        return {"input": place, "weight": rows.to(indices.device, self._dtypes[id(weight)])}

    def _gathered(self, value: Any) -> Any:
        if id(value) not in self._dtypes:
            return value
        if id(value) not in self._whole:
            self._whole[id(value)] = whole_tensor(self._comm, cast(DTensor, value)).to(self._dtypes[id(value)])
        return self._whole[id(value)]


def _rows_cut_by(weight: DTensor) -> int | None:
    """Return the mesh axis that cuts the rows of ``weight``, if that is all that cuts it."""
    cuts = [axis for axis, placement in enumerate(weight.placements) if placement != Replicate()]
    return cuts[0] if len(cuts) == 1 and weight.placements[cuts[0]] == Shard(0) else None
