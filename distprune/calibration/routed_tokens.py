"""The tokens of routed layers on their way to the rank that works on these.

Noun: a *routed* layer is given some of all tokens, as the router chooses: one of the matrices of an expert. What a
block's experts are given are so few tokens each, and the sums X^T X of all of them are so large, that the tokens travel
and not the sums: they are kept as they were given, sample by sample, and go to the *owner* of their input, which makes
each sample's addend of them, to the same bits as any rank would. In *waves*: as many experts as an owner has room for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distprune.calibration.targets import Beside
from distprune.collectives import Communicator, as_bytes, from_bytes, max_together, swap_unknown

_ARRIVING = 1 << 26  # bytes at one rank in a round, unless one sample gives an input more


@dataclass(frozen=True)
class RoutedTokens:
    """What one sample gives an input: ``x`` (tokens, in), and what stands ``beside`` it in the dense stream."""

    x: torch.Tensor
    beside: Beside | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        beside = [] if self.beside is None else [self.beside.dense]
        known = [] if self.beside is None or self.beside.known is None else [self.beside.known]
        return [self.x, *beside, *known]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> RoutedTokens:
        x, *beside = tensors
        return RoutedTokens(x, Beside(*beside) if beside else None)


Take = Callable[[int, RoutedTokens], object]


def send_tokens(
    comm: Communicator, owners: Sequence[int], kept: Sequence[list[RoutedTokens]], take: Take
) -> Callable[[], None]:
    """Send what is ``kept`` of each input to its owner, where ``take`` is called with each sample's part.

    And with the number of the input among those that this rank owns. ``owners`` are the same on every rank. What is
    sent is let go of. What is returned takes what came last: it must be called on every rank, where errors are heard.
    Every rank must call it: a round of 16 bytes, and for every 64 MiB that go to a rank one of 8 bytes a rank and one
    of these. What ``take`` raises on one rank is raised on all.
    """
    own: list[tuple[int, RoutedTokens]] = []
    of_rank: dict[int, list[list[tuple[int, RoutedTokens]]]] = {}  # by owner and round

    def share_out(num_rounds: torch.Tensor) -> None:
        sizes: dict[int, int] = {}
        num_inputs = Counter[int]()
        for owner, of_input in zip(owners, kept, strict=True):
            number = num_inputs[owner]
            num_inputs[owner] += 1
            for tokens in of_input:
                if owner == comm.rank:
                    own.append((number, tokens))
                    continue
                rounds = of_rank.setdefault(owner, [[]])
                size = sizes.get(owner, 0) + tokens.num_bytes
                if rounds[-1] and size > _ARRIVING // comm.size:
                    rounds.append([])
                    size = tokens.num_bytes
                rounds[-1].append((number, tokens))
                sizes[owner] = size
            of_input.clear()
        num_rounds.fill_(max(map(len, of_rank.values()), default=0))

    num_rounds = int(max_together(comm, (1,), share_out))
    arrived: list[torch.Tensor] = []

    def take_arrived() -> None:
        while own:
            take(*own.pop())
        while arrived:
            for number, tokens in _unpacked(arrived.pop()):
                take(number, tokens)

    def next_pieces() -> list[torch.Tensor]:
        take_arrived()
        pieces = [as_bytes([])] * comm.size
        for owner, rounds in of_rank.items():
            if rounds:
                pieces[owner] = _packed(rounds.pop(0))
        return pieces

    for _ in range(num_rounds):
        arrived.extend(swap_unknown(comm, next_pieces))
    return take_arrived


def _packed(some: Sequence[tuple[int, RoutedTokens]]) -> torch.Tensor:
    """Return inputs' numbers and tokens as bytes: the length of a text, the text, which says what follows, tensors."""
    told = [[number, [_kind(of) for of in tokens.tensors]] for number, tokens in some]
    text = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
    return as_bytes([length, text, *(of for _, tokens in some for of in tokens.tensors)])


def _kind(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _unpacked(piece: torch.Tensor) -> list[tuple[int, RoutedTokens]]:
    if not piece.numel():
        return []
    start = 8 + int(piece[:8].clone().view(torch.int64))
    told = json.loads(bytes(piece[8:start].numpy()))
    likes = [
        [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape in kinds] for _, kinds in told
    ]
    tensors = iter(from_bytes(piece[start:], [like for of_input in likes for like in of_input]))
    return [
        (number, RoutedTokens.of([next(tensors) for _ in of_input]))
        for (number, _), of_input in zip(told, likes, strict=True)
    ]
