"""Which layers share an input, over all ranks, and which rank, its *owner*, factors X^T X of it.

A token may reach a layer on some ranks alone. Owners are ranks in turn, and of an expert the one that alone has it.

Noun: a *routed* layer is given some of all tokens, as the router chooses: one of the matrices of an expert. What a
block's experts are given are so few tokens each, and the sums X^T X of all of them are so large, that the tokens travel
and not the sums: they are kept as they were given, and go to the owner of their input, which sums them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives.agree import max_together, sum_together
from distprune.collectives.base import Communicator
from distprune.collectives.tensors import as_bytes
from distprune.models.linear_layers import LinearLayer, expert_place
from distprune.shards.layouts import local_shard

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SharedInput:
    """What the layers ``names`` are given: ``num_tokens`` times ``num_in`` features. Rank ``owner`` factors it.

    ``is_alone``: no other rank has these layers, which are experts.
    """

    names: tuple[str, ...]
    num_in: int
    num_tokens: int
    owner: int
    is_alone: bool = False


def shared_inputs(
    comm: Communicator,
    linears: Mapping[str, LinearLayer],
    routed: Collection[str],
    heard: Callable[[], tuple[Mapping[str, str], Mapping[str, int]]],
) -> list[SharedInput]:
    """Return the inputs of ``linears`` in their order, and behind the others those of ``routed`` layers.

    ``heard`` returns what this rank's samples tell: of each layer that they reached the first one that has its input,
    and how many tokens it was given, as this rank is to count them. Every rank must call it, with the same ``linears``:
    a round of 24 bytes a layer, and 16 more a routed one. What ``heard`` raises on one rank is raised on all.

    Raises:
        NotImplementedError: on every rank: a layer shares the input of another on one rank and not on another.
    """
    layers, experts = list(linears), [name for name in linears if name in routed]
    number = {name: i for i, name in enumerate(layers)}
    sizes = [len(layers)] * 3 + [len(experts)] * 2

    def tell(words: torch.Tensor) -> None:
        """Write tokens, these times the number of the first layer, and its square; experts here, times this rank."""
        first_of, num_tokens = heard()
        firsts = [number[first_of.get(name, name)] for name in layers]
        columns = [num_tokens.get(name, 0) for name in layers], firsts, [_is_here(linears[name]) for name in experts]
        tokens, first, here = (torch.tensor(column, dtype=torch.int64, device="cpu") for column in columns)
        words.copy_(torch.cat([tokens, tokens * first, tokens * first**2, here, here * comm.rank]))

    told = torch.split(sum_together(comm, (sum(sizes),), tell), sizes)
    nums, firsts, squares, num_here, ranks = (words.tolist() for words in told)
    names: dict[str, list[str]] = {}
    for name, num, first, square in zip(layers, nums, firsts, squares, strict=True):  # the same everywhere: all raise
        if num * square != first**2:  # the first layer varies
            raise NotImplementedError(f"{name!r} has the input of other layers on one rank than on another")
        names.setdefault(layers[first // num] if num else name, []).append(name)
    lone = {name: rank for name, num, rank in zip(experts, num_here, ranks, strict=True) if num == 1}
    inputs = list[SharedInput]()
    for first, sharing in sorted(names.items(), key=lambda item: item[1][0] in routed):
        name, turn = sharing[0], len(inputs) % comm.size
        known = linears[name].num_in, nums[number[first]], lone.get(name, turn), name in lone
        inputs.append(SharedInput(tuple(sharing), *known))
    return inputs


def _is_here(linear: LinearLayer) -> bool:
    """Return whether this rank has the expert ``linear``, which is whole on a rank, or not there. Local."""
    runs = local_shard(linear.parameter_path, linear.parameter).geometry.dim_runs[0]
    return linear.expert is None or expert_place(runs, linear.expert) is not None


def send_tokens(
    comm: Communicator,
    inputs: Sequence[SharedInput],
    kept: Sequence[list[torch.Tensor]],
    widths: Sequence[int],
    device: torch.device,
) -> list[list[torch.Tensor]]:
    """Return all ranks' tokens of each of ``inputs``, in parts; none where another rank is the owner.

    ``kept``: this rank's, by input, parts of (tokens, width) on ``device``; they are let go of. Every rank must call
    it: a round of 8 bytes, one of 8 bytes for each input, and the tokens. It raises on one rank alone: within
    ``guarding``.
    """
    if comm.size == 1:
        return [list(parts) for parts in kept]
    going = [[i for i, shared in enumerate(inputs) if shared.owner == rank] for rank in range(comm.size)]
    mine = going[comm.rank]
    widest = max((_DTYPES.index(x.dtype) for parts in kept for x in parts), default=0)
    dtype = _DTYPES[int(max_together(comm, (1,), lambda words: words.fill_(widest)))]
    sizes = [sum(len(x) * widths[i] * dtype.itemsize for i in numbers for x in kept[i]) for numbers in going]
    nums = [sum(map(len, kept[i])) for i in itertools.chain(*going)]
    counts = torch.tensor(nums, dtype=torch.int64, device="cpu").view(torch.uint8)
    said = comm.swap(counts, [8 * len(numbers) for numbers in going], [8 * len(mine)] * comm.size)
    told = said.view(torch.int64).view(comm.size, len(mine)).tolist()
    sent = as_bytes([x.to(dtype) for i in itertools.chain(*going) for x in kept[i]], device)
    for parts in kept:
        parts.clear()
    numels = [[num * widths[i] for num, i in zip(of_rank, mine, strict=True)] for of_rank in told]
    received = comm.swap(sent, sizes, [dtype.itemsize * sum(of_rank) for of_rank in numels]).view(dtype)
    pieces = iter(torch.split(received, list(itertools.chain(*numels))))
    arrived: list[list[torch.Tensor]] = [[] for _ in inputs]
    for i in mine * comm.size:
        arrived[i].append(next(pieces).view(-1, widths[i]))
    return arrived
