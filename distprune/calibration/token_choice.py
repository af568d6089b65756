"""Which token comes next: drawn from the likeliest, by a number that follows from the seed, text and position."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.models.decoder_blocks import text_config

_BITS = 53  # of a float64


def draw(seed: int, text: int, position: int) -> float:
    """Return a number in [0, 1) that the three numbers stand for. Local."""
    digest = hashlib.sha256(f"{seed}:{text}:{position}".encode()).digest()
    return math.ldexp(int.from_bytes(digest[:8], "little") >> (64 - _BITS), -_BITS)


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens ``model`` knows. Local.

    Raises:
        NotImplementedError: its configuration does not say.
    """
    found = getattr(text_config(model), "vocab_size", None)
    if not isinstance(found, int) or found < 1:
        raise NotImplementedError(f"{type(model).__name__} says no vocab_size in its configuration; give a text")
    return found


def random_tokens(model: nn.Module, num_texts: int, seed: int, tokenizer: Any = None) -> torch.Tensor:
    """Return one random token for each text, (num_texts, 1) int64: one that is there, and not special. Local.

    Raises:
        ValueError: there is none.
    """
    allowed = set(range(vocabulary_of(model)))
    of_model: Any = model
    for of in (of_model.config, text_config(model), of_model.generation_config):
        for name, special in vars(of).items():
            if name.endswith("_token_id"):
                allowed -= {*special} if isinstance(special, list) else {special}
    if tokenizer is not None:
        allowed = (allowed & {*tokenizer.get_vocab().values()}) - {*tokenizer.all_special_ids}
    if not allowed:
        raise ValueError(f"the vocabulary of {type(model).__name__} has no token that is not special")
    ids = sorted(allowed)
    chosen = [[ids[int(draw(seed, text, 0) * len(ids))]] for text in range(num_texts)]
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


class TokenChoice:
    """A logits processor of ``generate``, greedy: all logits but that of the token that was drawn become -inf.

    ``texts``: the number of each row's text. ``tell`` is called with how many tokens each has.
    """

    def __init__(
        self,
        texts: Sequence[int],
        vocabulary: int,
        temperature: float,
        top_k: int,
        seed: int,
        tell: Callable[[int], None],
    ) -> None:
        self._texts, self._vocabulary, self._seed, self._tell = texts, vocabulary, seed, tell
        self._temperature, self._top_k = temperature, top_k
        self._num_steps = 0
        self._is_number: torch.Tensor | None = None  # by row: so were all the likeliest logits

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (texts, vocabulary) that remain. Local.

        Raises:
            NotImplementedError: logits are cut.
        """
        if isinstance(logits, DTensor) or logits.shape[-1] < self._vocabulary:
            raise NotImplementedError(
                f"logits are cut: {tuple(logits.shape)} on this rank; let the tensor-parallel plan replicate them"
            )
        position = input_ids.shape[1]
        drawn = [[draw(self._seed, text, position)] for text in self._texts]
        at = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
        tokens, is_number = choose(logits, at, self._temperature, self._top_k)
        self._is_number = is_number if self._is_number is None else self._is_number & is_number
        self._num_steps += 1
        self._tell(self._num_steps)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens, 0.0)

    def check(self) -> None:
        """Raise a ValueError if any logits were NaN or infinite. Local."""
        for text, is_number in zip(self._texts, [] if self._is_number is None else self._is_number, strict=False):
            if not is_number:
                raise ValueError(f"the model's logits are NaN or Inf where it writes text {text}")


def choose(logits: torch.Tensor, at: torch.Tensor, temperature: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens (rows, 1) at the quantiles ``at`` (rows, 1) float64, and by row whether logits are numbers.

    Of the ``top_k`` likeliest tokens of ``logits`` (rows, vocabulary), the likeliest first, of equal ones that of the
    lower number. Local.
    """
    values, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    is_number = ~(values.isnan().any(-1) | values[:, 0].isinf())
    cumulated = (values.double() / temperature).softmax(-1).cumsum(-1)
    place = (cumulated <= at * cumulated[:, -1:]).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    return ids.gather(-1, by_value.gather(-1, place)), is_number
