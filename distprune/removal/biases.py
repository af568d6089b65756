"""What the biases of refitted linear layers gain, from the ranks that hold the rows to those that hold the biases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from distprune.collectives import Communicator, sum_together, together
from distprune.models import LinearLayer
from distprune.oneshot.rows import Rows
from distprune.shards import cut, local_shard

__all__ = ["shift_biases"]


def shift_biases(
    comm: Communicator, linears: Mapping[str, LinearLayer], offsets: Mapping[str, tuple[Rows, torch.Tensor]]
) -> None:
    """Add ``offsets``, by linear layer this rank's rows and what their biases gain, to the biases of ``linears``.

    Biases are laid out as they are. Every rank must call it, with the same linear layers; of the rows their owners'
    offsets
    count: a round of 8 bytes for each output, and one of 64.
    """
    if not linears:
        return
    sizes = [linear.num_out for linear in linears.values()]

    def fill(words: torch.Tensor) -> None:
        for name, part in zip(linears, torch.split(words, sizes), strict=True):
            rows, gained = offsets.get(name, (None, None))
            if rows is not None and gained is not None and rows.owned:
                places = torch.cat([torch.arange(start, stop) for start, stop in rows.runs])
                part[places] = gained.double().cpu()

    total = sum_together(comm, (sum(sizes),), fill, torch.float64)
    with together(comm):
        for (name, linear), gained in zip(linears.items(), torch.split(total, sizes), strict=True):
            bias = linear.module.bias
            assert isinstance(bias, nn.Parameter)
            shard = local_shard(f"{name}.bias", bias.detach())
            own = cut(gained, shard.geometry).to(shard.local.device)
            shard.local.copy_((shard.local.double() + own).view_as(shard.local))
