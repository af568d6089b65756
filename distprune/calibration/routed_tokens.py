"""The tokens of routed layers on their way to the rank that works on these.

Noun: a *routed* layer is given some of all tokens, as the router chooses: one of the matrices of an expert. What a
block's experts are given are so few tokens each, and the sums X^T X of all of them are so large, that the tokens travel
and not the sums: they are kept as they were given, and go to the *owner* of their input, which sums them up. In
*waves*: as many experts as an owner has room for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.collectives.tensors import as_bytes

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def send_tokens(
    comm: Communicator,
    owners: Sequence[int],
    kept: Sequence[list[torch.Tensor]],
    widths: Sequence[int],
    device: torch.device,
) -> dict[int, list[torch.Tensor]]:
    """Return all ranks' tokens of the inputs that this rank owns, by the number of the input.

    ``kept``: this rank's, by input, parts of (tokens, width) on ``device``; they are let go of. ``owners`` and
    ``widths`` are the same on every rank. Every rank must call it: a round of 8 bytes, one of 8 bytes for each input,
    and the tokens. It raises on one rank alone: within ``guarding``.
    """
    if comm.size == 1:
        return {i: list(parts) for i, parts in enumerate(kept) if parts}
    going = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(comm.size)]
    mine = going[comm.rank]
    widest = max((_DTYPES.index(x.dtype) for parts in kept for x in parts), default=0)
    dtype = _DTYPES[int(max_together(comm, (1,), lambda words: words.fill_(widest)))]
    nums = [sum(map(len, kept[i])) for numbers in going for i in numbers]
    counts = torch.tensor(nums, dtype=torch.int64, device="cpu")
    sizes = [sum(len(x) * widths[i] * dtype.itemsize for i in numbers for x in kept[i]) for numbers in going]
    said = comm.swap(counts.view(torch.uint8), [8 * len(numbers) for numbers in going], [8 * len(mine)] * comm.size)
    told = said.view(torch.int64).view(comm.size, len(mine)).tolist()
    pieces = [torch.empty(0, dtype=dtype, device=device)]
    for numbers in going:
        for i in numbers:
            pieces += [x.to(dtype) for x in kept[i]]
            kept[i].clear()
    sent = as_bytes(pieces, device)
    pieces.clear()
    numels = [[num * widths[i] for num, i in zip(of_rank, mine, strict=True)] for of_rank in told]
    received = comm.swap(sent, sizes, [sum(of_rank) * dtype.itemsize for of_rank in numels]).view(dtype)
    found: dict[int, list[torch.Tensor]] = {i: [] for i in mine}
    for of_rank in numels:
        for i, numel in zip(mine, of_rank, strict=True):
            found[i].append(received[:numel].view(-1, widths[i]))
            received = received[numel:]
    return found
