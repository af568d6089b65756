"""The tokens of routed layers on their way to the rank that works on these.

Noun: a *routed* layer is given some of all tokens, as the router chooses: one of the matrices of an expert. What a
block's experts are given are so few tokens each, and the sums X^T X of all of them are so large, that the tokens travel
and not the sums: they are kept as they were given, sample by sample, and go to the *owner* of their input, which makes
each sample's addend of them, to the same bits as any rank would. In *waves*: as many experts as an owner has room for.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distprune.calibration.targets import Beside
from distprune.collectives.agree import max_together, swap_known, swap_unknown
from distprune.collectives.base import Communicator
from distprune.collectives.tensors import as_bytes, from_bytes
from distprune.shards.device import batches

ARRIVING = 1 << 26  # bytes at one rank in a round, unless one sample gives an input more


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

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> RoutedTokens:
        x, *beside = tensors
        return RoutedTokens(x, Beside(*beside) if beside else None)


Take = Callable[[int, RoutedTokens], object]
_Numbered = tuple[int, list[torch.Tensor]]  # of routed tokens, and the number of the input among those of its owner
_Kind = tuple[str, list[int]]  # of a tensor: dtype and shape


def send_tokens(
    comm: Communicator, owners: Sequence[int], kept: Sequence[list[RoutedTokens]], take: Take, device: torch.device
) -> Callable[[], None]:
    """Send what is ``kept`` of each input to its owner, where ``take`` is called with each sample's part.

    And with the number of the input among those that this rank owns. ``owners`` are the same on every rank, ``device``
    is where tokens are kept. What is sent is let go of. What is returned takes what came last: it must be called on
    every rank, where errors are heard. Every rank must call it: a round of 16 bytes, and for every 64 MiB that go to a
    rank one of 8 bytes a rank, one of about 60 bytes for each sample and input, and one of the tokens. What ``take``
    raises on one rank is raised on all.
    """
    post = _Post(comm, take, device)
    num_rounds = max_together(comm, (1,), lambda words: words.fill_(post.share_out(owners, kept)))
    for _ in range(int(num_rounds)):
        told = {rank: _read(text) for rank, text in enumerate(swap_unknown(comm, post.texts)) if text.numel()}
        coming = [0] * comm.size
        for rank, (_, kinds) in told.items():
            coming[rank] = sum([math.prod(shape) * _dtype(name).itemsize for name, shape in kinds])
        pieces = swap_known(comm, post.pieces, (post.sizes(), coming), device)
        post.arrived.extend((*told[rank], pieces[rank]) for rank in told)
    return post.take_all


class _Post:
    """What this rank sends and has been sent, round by round."""

    def __init__(self, comm: Communicator, take: Take, device: torch.device) -> None:
        self._comm, self._take, self._device = comm, take, device
        self._own: list[_Numbered] = []
        self._rounds: dict[int, list[list[_Numbered]]] = {}  # by the rank that they go to
        self._now: dict[int, list[_Numbered]] = {}
        self.arrived: list[tuple[list[int], list[_Kind], torch.Tensor]] = []

    def share_out(self, owners: Sequence[int], kept: Sequence[list[RoutedTokens]]) -> int:
        """Put all that is ``kept`` into rounds, and return how many these are."""
        num_inputs, going = Counter[int](), defaultdict[int, list[_Numbered]](list)
        for owner, of_input in zip(owners, kept, strict=True):
            (self._own if owner == self._comm.rank else going[owner]).extend(
                (num_inputs[owner], tokens.tensors) for tokens in of_input
            )
            num_inputs[owner] += 1
            of_input.clear()
        for owner, some in going.items():
            sizes = [sum([tensor.nbytes for tensor in tensors]) for _, tensors in some]
            rounds = batches(range(len(some)), sizes, ARRIVING // self._comm.size)
            self._rounds[owner] = [[some[i] for i in which] for which in rounds]
        return max(map(len, self._rounds.values()), default=0)

    def texts(self) -> dict[int, torch.Tensor]:
        """Take what has arrived, and return what is to be said of the next round's tokens, by rank."""
        self.take_all()
        self._now = {rank: rounds.pop(0) for rank, rounds in self._rounds.items() if rounds}
        return {rank: _text(some) for rank, some in self._now.items()}

    def sizes(self) -> list[int]:
        """Return how many bytes of tokens go to each rank in this round."""
        sizes = [0] * self._comm.size
        for rank, some in self._now.items():
            sizes[rank] = sum([tensor.nbytes for _, tensors in some for tensor in tensors])
        return sizes

    def pieces(self) -> dict[int, torch.Tensor]:
        """Return the tokens that go away in this round, by rank; they are let go of."""
        pieces = {}
        for rank in list(self._now):
            pieces[rank] = as_bytes([each for _, tensors in self._now.pop(rank) for each in tensors], self._device)
        return pieces

    def take_all(self) -> None:
        """Take what has arrived, and what stayed."""
        while self._own:
            number, tensors = self._own.pop()
            self._take(number, RoutedTokens.of(tensors))
        while self.arrived:
            numbers, kinds, piece = self.arrived.pop()
            likes = [torch.empty(shape, dtype=_dtype(name), device="meta") for name, shape in kinds]
            there = iter(from_bytes(piece, likes))
            for number, num_tensors in zip(numbers[::2], numbers[1::2], strict=True):
                self._take(number, RoutedTokens.of([next(there) for _ in range(num_tensors)]))


def _text(some: Sequence[_Numbered]) -> torch.Tensor:
    """Return as JSON of each input its number and how many tensors there are, and of each tensor dtype and shape."""
    numbers = [each for number, tensors in some for each in (number, len(tensors))]
    kinds = [(str(tensor.dtype)[len("torch.") :], [*tensor.shape]) for _, tensors in some for tensor in tensors]
    return torch.frombuffer(bytearray(json.dumps([numbers, kinds]).encode()), dtype=torch.uint8)


def _read(text: torch.Tensor) -> tuple[list[int], list[_Kind]]:
    numbers, kinds = json.loads(bytes(text.numpy()).decode())
    return numbers, [(name, shape) for name, shape in kinds]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
