"""What training carries in a checkpoint beside the weights: tensors in their parameters' layout. Local."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from distprune.collectives.base import Communicator
from distprune.shards.layouts import dtensor_like, local_of
from distprune.shards.local_shard import LocalShard


def laid_out(
    shards: Iterable[LocalShard], local_tensor: Callable[[LocalShard], torch.Tensor], what: str
) -> dict[str, torch.Tensor]:
    """Return the ``local_tensor`` of each of ``shards``, of local shape, in its parameter's layout; nothing is copied.

    Raises:
        NotImplementedError: no checkpoint knows the place of such a tensor (FSDP1).
    """
    tensors = {}
    for shard in shards:
        if shard.tensor is None:
            raise NotImplementedError(
                f"the {what} of {shard.name!r} have a place that no checkpoint knows (FSDP1); shard the model with "
                "fully_shard (FSDP2), or save the weights alone"
            )
        local = local_tensor(shard)
        tensors[shard.name] = dtensor_like(shard.tensor, local) if isinstance(shard.tensor, DTensor) else local
    return tensors


def load_in_place(
    comm: Communicator, current: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], what: str
) -> None:
    """Copy ``given`` into ``current``. No communication.

    Raises:
        ValueError: nothing changed: other parameters, or another rank's parts: DTensors that were not loaded in place,
            as ``torch.distributed.checkpoint`` does it.
    """
    if given.keys() != current.keys():
        raise ValueError(f"{what} of other parameters: {sorted(given.keys() ^ current.keys())[:4]}")
    for name, tensor in current.items():
        theirs, mine = local_of(given[name]), local_of(tensor)
        is_elsewhere = isinstance(tensor, DTensor) and theirs.data_ptr() != mine.data_ptr()
        if theirs.shape != mine.shape or (is_elsewhere and comm.size > 1):
            raise ValueError(
                f"the {what} of {name!r} are laid out otherwise, or may be another rank's part of it: load them in "
                "place, with torch.distributed.checkpoint"
            )
    for name, tensor in current.items():
        local_of(tensor).copy_(local_of(given[name]))
