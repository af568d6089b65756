"""Which layers share an input, over all ranks: a token may reach a layer on some ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from distprune.collectives.agree import max_together, sum_together
from distprune.collectives.base import Communicator


def shared_inputs(
    comm: Communicator, layers: Sequence[str], heard: Callable[[], tuple[Mapping[str, str], Mapping[str, int]]]
) -> dict[tuple[str, ...], int]:
    """Return the layers that share each input, in the order of ``layers``, with its number of tokens on all ranks.

    ``heard`` returns what this rank's samples tell: of each layer that they reached the first one that has its input,
    and how many tokens that was given, as this rank is to count them. Every rank must call it, with the same
    ``layers``: two rounds, of 24 bytes a layer. What ``heard`` raises on one rank is raised on all.

    Raises:
        NotImplementedError: on every rank: a layer shares the input of another on one rank and not on another.
    """
    number = {name: i for i, name in enumerate(layers)}
    num_tokens: Mapping[str, int] = {}

    def share(words: torch.Tensor) -> None:
        """Write the number of each layer's first one, and its negative: less where no token came."""
        nonlocal num_tokens
        first_of, num_tokens = heard()
        firsts = [number[first_of[name]] if name in first_of else None for name in layers]
        highest = [-1 if first is None else first for first in firsts]
        lowest = [-len(layers) if first is None else -first for first in firsts]
        words.copy_(torch.tensor([highest, lowest], dtype=torch.int64, device="cpu"))

    def count(words: torch.Tensor) -> None:
        words.copy_(torch.tensor([num_tokens.get(name, 0) for name in layers], dtype=torch.int64, device="cpu"))

    highest, lowest = max_together(comm, (2, len(layers)), share).tolist()
    names: dict[str, list[str]] = {}
    for name, first, negative in zip(layers, highest, lowest, strict=True):  # the same on every rank, so all raise
        if first not in (-1, -negative):
            raise NotImplementedError(f"{name!r} has the input of other layers on one rank than on another")
        names.setdefault(name if first < 0 else layers[first], []).append(name)
    counts = sum_together(comm, (len(layers),), count).tolist()
    return {tuple(sharing): counts[number[first]] for first, sharing in names.items()}
