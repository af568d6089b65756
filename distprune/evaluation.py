"""Perplexity, and log likelihoods of continuations, of a causal language model that may be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distprune.calibration.data import check_fit, device_of, token_digest, tokens_together
from distprune.calibration.sample_group import find_sample_group
from distprune.calibration.token_ids import TokenIds, as_line, as_windows
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.models.cross_entropy import token_chunk
from distprune.models.evaluating import evaluating, keeping_weights
from distprune.models.find_shards import check_model
from distprune.models.runnable import check_runs_on_tokens, logits_on_tokens
from distprune.shards.device import fetched, sent
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.in_step import in_step

Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Continuation:
    """What a model is to predict: ``targets`` (n,) from the last n of ``inputs``, which it is given; both int64."""

    inputs: torch.Tensor
    targets: torch.Tensor


def perplexity(
    model: nn.Module,
    samples: TokenIds,
    *,
    sequence_length: int | None = None,
    group: Group = None,
    batch_tokens: int | None = None,
    progress: Progress = None,
) -> float:
    """Return exp of the mean negative log likelihood over windows of ``sequence_length`` tokens.

    >>> perplexity(llama, samples) == perplexity(llama, samples.flatten(), sequence_length=samples.shape[1])
    True

    ``samples``: all forms that :func:`distprune.prune_blocks` takes, or one line of them; without
    ``sequence_length`` their own windows. The windows follow each other without overlap, an incomplete last one is left
    out, and of each every token but the first is predicted. Every rank of ``group`` must call it, with the same tokens:
    two rounds of 64 bytes, and those of ``log_likelihoods``, which says how the windows are run.

    Raises:
        TypeError: on every rank: something else than token ids, such as text.
        ValueError: on every rank: fewer tokens than one window, a window of fewer than two tokens, or what
            ``log_likelihoods`` raises.
        NotImplementedError, RuntimeError, Exception: on every rank: what ``log_likelihoods`` raises.
    """
    comm = communicator(group)
    with together(comm):
        if sequence_length is None:
            windows = as_windows(samples)
            if windows.ndim != 2:
                raise ValueError(f"samples of shape {tuple(windows.shape)} are no windows: say sequence_length")
            line, sequence_length = windows.reshape(-1), windows.shape[1]
        else:
            line = as_line(samples)
    (value,) = perplexities(
        model, [line], sequence_length=sequence_length, group=comm, progress=progress, batch_tokens=batch_tokens
    )
    return value


def perplexities(
    model: nn.Module,
    texts: Sequence[torch.Tensor],
    *,
    sequence_length: int,
    group: Group = None,
    batch_tokens: int | None = None,
    progress: Progress = None,
) -> list[float]:
    """Return the :func:`perplexity` of each of ``texts``; windows of several run in one forward. Rounds as there."""
    comm, asked, num_windows = communicator(group), list[Continuation](), list[int]()
    num_tokens = [ids.numel() for ids in texts]
    with together(comm, sequence_length=sequence_length, num_tokens=num_tokens):
        check_model(model)
        for ids in texts:
            num_windows.append(ids.numel() // max(sequence_length, 1))
            if sequence_length < 2 or num_windows[-1] == 0:
                raise ValueError(
                    f"{ids.numel()} tokens make no window of {sequence_length=}; it takes two tokens or more"
                )
            windows = ids[: num_windows[-1] * sequence_length].view(-1, sequence_length)
            check_fit(windows, model)
            asked += [Continuation(window[:-1], window[1:]) for window in windows]
    scored = log_likelihoods(model, asked, group=comm, progress=progress, batch_tokens=batch_tokens)
    values = []
    for of_text in torch.split(scored[:, 0], num_windows):
        mean = -math.fsum(of_text.tolist()) / (len(of_text) * (sequence_length - 1))
        values.append(math.inf if mean > 700 else math.exp(mean))  # NaN stays NaN
    return values


@torch.no_grad()
def log_likelihoods(
    model: nn.Module,
    asked: Sequence[Continuation],
    *,
    group: Group = None,
    batch_tokens: int | None = None,
    progress: Progress = None,
) -> torch.Tensor:
    """Return, float64 (number of ``asked``, 2): each one's log likelihood, and 1 where all its targets are most likely.

    Continuations of similar length are run together, at most ``batch_tokens`` tokens in one forward (or one of them),
    by default as many as ``tokens_together`` says: their logits are in memory, and FSDP2 gathers the model once for all
    of them. Shorter ones are right-padded; a causal model ignores the padding. Batches are dealt out in turn to
    ranks, of which those that need each other to run one (a tensor-parallel group) run the same; where batches do not
    divide evenly the last round is filled with a forward that does not count, because the forward of a sharded model
    needs every rank. The model is run in evaluation mode and left as it was, to the bit. Every rank of ``group`` must
    call it, with the same continuations. Rounds beyond the model's own: one of 64 bytes, those of
    :func:`find_sample_group` and :func:`in_step`, and one of 16 bytes for each of ``asked``.

    Args:
        progress: called with (continuations done on all ranks, number of ``asked``).

    Raises:
        ValueError: on every rank: ranks ask for different things, or more inputs than the model has positions for, or
            a token id outside the model's vocabulary.
        NotImplementedError: on every rank: a layout of which it is not known who runs the same batches; logits that are
            cut over ranks.
        RuntimeError: on every rank: a forward that changes the model's own weights.
        Exception: on every rank: what a forward, or ``progress``, raised on one; but for those of which
            :func:`in_step` says that the others cannot be told.
    """
    comm = communicator(group)
    with together(comm) as facts:
        check_model(model)
        check_runs_on_tokens(model)
        facts |= {"lengths": [len(one.inputs) for one in asked], "batch_tokens": batch_tokens}
        if asked:
            inputs = torch.cat([one.inputs for one in asked])
            check_fit(inputs, model, max(facts["lengths"]))
            facts["tokens"] = token_digest(torch.cat([inputs, *(one.targets for one in asked)]))
        reset_forward(model)
        num_together = tokens_together(model, batch_tokens, num_copies=1)
    sample_group = find_sample_group(comm, model)
    device = device_of(model)
    batches = _batches(asked, num_together, sample_group.num_groups)
    num_rounds = -(-len(batches) // sample_group.num_groups)

    several = in_step(comm, model, layers_communicate=sample_group.size > 1)
    with several as run, evaluating(model), keeping_weights(model):
        scores: dict[int, torch.Tensor] = {}  # by batch
        for i in range(num_rounds):
            index = i * sample_group.num_groups + sample_group.number
            counts = index < len(batches) and sample_group.rank == 0
            batch = batches[index] if index < len(batches) else batches[-1][-1:]
            some = [asked[member] for member in batch]
            longest = len(some[0].inputs)
            rows = [one.inputs.tolist() + [0] * (longest - len(one.inputs)) for one in some]
            input_ids = sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
            logits = run(logits_on_tokens, model, input_ids=input_ids, use_cache=False)
            if counts:
                scores[index] = _scores(logits, some)
            if progress is not None:
                progress(sum(map(len, batches[: (i + 1) * sample_group.num_groups])), len(asked))
        scored = torch.zeros(len(asked), 2, dtype=torch.float64, device="cpu")
        for index, of_batch in zip(scores, fetched(list(scores.values())), strict=True):
            scored[batches[index]] = of_batch
    return comm.sum(scored)


def _batches(asked: Sequence[Continuation], batch_tokens: int, num_groups: int) -> list[list[int]]:
    """Return which of ``asked`` run together: the longest first, alike in length, at least one for each group."""
    lengths = [len(one.inputs) for one in asked]
    order = sorted(range(len(asked)), key=lambda index: -lengths[index])
    most = -(-len(asked) // num_groups)
    batches: list[list[int]] = []
    while order:
        size = min(max(batch_tokens // lengths[order[0]], 1), most)
        batches.append(order[:size])
        order = order[size:]
    return batches


def _scores(logits: torch.Tensor, asked: Sequence[Continuation]) -> torch.Tensor:
    """Return the log likelihood of each continuation by its row of ``logits`` (rows, length, vocabulary), and whether
    all its targets are most likely, (rows, 2) float64, where the logits are.
    """
    num_rows, length, vocabulary = logits.shape
    ends = [row * length + len(one.inputs) for row, one in enumerate(asked)]
    predicting = [i for end, one in zip(ends, asked, strict=True) for i in range(end - len(one.targets), end)]
    places = sent(torch.tensor(predicting, dtype=torch.int64, device="cpu"), logits.device)
    targets = sent(torch.cat([one.targets for one in asked]), logits.device)
    of_tokens = torch.zeros((2, num_rows * length), dtype=torch.float64, device=logits.device)
    step = token_chunk(vocabulary)
    for here, wanted in zip(torch.split(places, step), torch.split(targets, step), strict=True):
        log_probabilities = nn.functional.log_softmax(logits.reshape(-1, vocabulary)[here].float(), dim=1)
        of_tokens[0, here] = log_probabilities.gather(1, wanted[:, None])[:, 0].double()
        of_tokens[1, here] = (log_probabilities.argmax(dim=1) != wanted).double()
    likelihoods, misses = of_tokens.view(2, num_rows, length).sum(dim=2)
    return torch.stack([likelihoods, (misses == 0).double()], dim=1)
