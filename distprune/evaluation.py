"""Perplexity of a causal language model that may be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.calibration import check_fit, find_crew, open_text, shared_axis, text_tokens
from distprune.collectives import Group, communicator, sum_together, together
from distprune.masks import reset_forward
from distprune.models import evaluating, keeping_weights

__all__ = ["perplexity", "tokenize_file"]

_LOSS_ROWS = 256  # tokens whose logits are in float32 at a time


def tokenize_file(tokenizer: Any, path: str | Path, *, max_tokens: int, sequence_length: int) -> torch.Tensor:
    """Return the first ``max_tokens`` token ids of a UTF-8 text file (1-D int64). Local.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not UTF-8, or holds less than one window of ``sequence_length`` tokens.
    """
    with open_text(Path(path), "text file") as file:
        ids = text_tokens(tokenizer, file, max_tokens)[:max_tokens]
    if len(ids) < sequence_length:
        raise ValueError(
            f"{path} holds {len(ids)} tokens; an evaluation needs at least one window of {sequence_length}"
        )
    return torch.tensor(ids, dtype=torch.int64)


@torch.no_grad()
def perplexity(
    model: nn.Module,
    token_ids: torch.Tensor,
    *,
    sequence_length: int,
    group: Group = None,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Return exp of the mean negative log likelihood over windows of ``sequence_length`` tokens.

    The windows follow each other without overlap, an incomplete last one is left out, and of each
    every token but the first is predicted. They are dealt out in turn to ranks, of which those that need each other to
    run one (a tensor-parallel group) run the same; where they do not divide evenly the last round is filled with
    windows that do not count, because the forward of a sharded model needs every rank. The model is run in evaluation
    mode and left as it was, to the bit. Every rank of ``group`` must call it, with the same tokens. Four rounds beyond
    the model's own, of 64 bytes at most but for 8 for each rank of a tensor-parallel group.

    Raises:
        ValueError: on every rank: fewer tokens than one window, a window of fewer than two tokens or of more than the
            model has positions for, a token id outside the model's vocabulary, or arguments that differ.
        NotImplementedError: on every rank: a layout of which it is not known who runs the same windows.
        RuntimeError: on every rank: a forward that changes the model's own weights.
        Exception: on every rank: what a forward, or ``progress``, raised on one.
    """
    comm = communicator(group)
    num_windows = token_ids.numel() // max(sequence_length, 1)
    with together(comm, sequence_length=sequence_length, num_tokens=token_ids.numel()):
        if sequence_length < 2 or num_windows == 0:
            raise ValueError(
                f"{token_ids.numel()} tokens make no window of {sequence_length=}; it takes two tokens or more"
            )
        windows = token_ids[: num_windows * sequence_length].view(num_windows, sequence_length)
        check_fit(windows, model)
        reset_forward(model)
        axis = shared_axis(model)
    crew = find_crew(comm, axis)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    num_rounds = -(-num_windows // crew.num_crews)

    def run(total: torch.Tensor) -> None:
        """Run all rounds, also behind an error: other ranks' forwards may need this one's."""
        error: Exception | None = None
        with evaluating(model), keeping_weights(model):
            for i in range(num_rounds):
                index = i * crew.num_crews + crew.number
                try:
                    window = windows[min(index, num_windows - 1)].unsqueeze(0).to(device)
                    logits = model(input_ids=window, use_cache=False).logits[0, :-1]
                    if index < num_windows and crew.place == 0:
                        total += _negative_log_likelihood(logits, window[0, 1:])
                    if progress is not None and error is None:
                        progress(i + 1, num_rounds)
                except Exception as caught:
                    error = error or caught
            if error is not None:
                raise error

    loss = sum_together(comm, (1,), run, torch.float64)
    mean = float(loss) / (num_windows * (sequence_length - 1))
    return math.inf if mean > 700 else math.exp(mean)  # NaN stays NaN


def _negative_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> float:
    total = 0.0
    for rows, wanted in zip(torch.split(logits, _LOSS_ROWS), torch.split(targets, _LOSS_ROWS), strict=True):
        total += float(nn.functional.cross_entropy(rows.float(), wanted, reduction="sum").double())
    return total
