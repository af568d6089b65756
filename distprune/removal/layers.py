"""Which decoder layers go: by how little each changes hidden states, or by what the loss says.

Noun: a *stream* is the hidden states of some samples in a model without one of its layers. At layer i we carry one
stream for each earlier layer that was left out, and the full model's. All run layer i; a copy of the full stream skips
it. So no layer is gathered twice, and what streams have in common is run once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from distprune.calibration.catch_inputs import Progress, past_blocks, visit_blocks, walking
from distprune.calibration.data import token_digest
from distprune.calibration.walk import Walk, with_hidden
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.models.cross_entropy import cross_entropy
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.evaluating import replacing_forwards
from distprune.oneshot.plan import blocks_to_walk, check_predicts, check_samples
from distprune.oneshot.recipe import chosen
from distprune.removal.readers import number_of
from distprune.shards.device import fetched, sent

LayerCriterion = Literal["loss", "influence"]
_MOST_SAMPLES = 16  # whose loss is tried: the time grows with them
_MOST_BYTES = 4 << 30  # of hidden states that one walk carries


def order_layers(
    model: nn.Module,
    samples: torch.Tensor,
    num_kept: int,
    *,
    criterion: LayerCriterion = "loss",
    known: Sequence[int] = (),
    group: Group = None,
    offload: bool = False,
    batch_tokens: int | None = None,
    progress: Progress = None,
) -> list[int]:
    """Return which decoder layers of ``model`` go so that ``num_kept`` stay, the first to go first.

    Which go first does not depend on how many go. The model is left as it was; the others are ``layers`` of
    :func:`choose_units`, which makes up for those that go.

    Args:
        model, samples, group, offload, batch_tokens: as of :func:`distprune.prune_blocks`.
        criterion: ``"loss"``: one layer after the other goes, each time the one without which the loss of the first 16
            samples is lowest (SLEB, arXiv 2402.09025); a walk each time, of half as many forwards as layers are left.
            ``"influence"``: those go that change hidden states least, by 1 - cos of what they are given and put out
            (ShortGPT, arXiv 2403.03853); one forward in all. Of equals the first goes.
        known: those that an earlier call has returned: with ``"loss"`` they are not looked for again.
        progress: called with (layers that are run, or with ``"loss"`` layers that go; their number in all).

    Every rank of ``group`` must call it, with equal arguments, and all come to the same layers. In memory, with
    ``"loss"``: a copy of the hidden states before the first layer, and for each layer that is left a copy of those of
    the batches that are walked together. That are as many as 4 GiB a rank hold, or one.

    Rounds: for ``"influence"`` those of a walk, 2 for each layer. For ``"loss"`` those of :func:`walking`, and for each
    layer that goes 2 of 64 bytes and 1 for each layer left, times the walks that its batches take, and 1 of 8 bytes for
    each layer left. FSDP2 gathers each layer, and what is around them, once a walk.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``prune_blocks`` refuses; more layers than are
            there, or none; a loss, or hidden states, that are NaN or infinite, by layer.
    """
    comm = communicator(group)
    with together(comm) as facts:
        check_samples(model, samples)
        num_layers = len(blocks_to_walk(model))
        num_kept = number_of(num_kept, num_layers, "layers")
        chosen("layer_criterion", criterion, LayerCriterion)
        if criterion == "loss":
            check_predicts(samples)
        facts |= {"layers": num_kept, "criterion": criterion, "known": list(known), "batch_tokens": batch_tokens}
        facts["samples"] = token_digest(samples)
    num_gone = num_layers - num_kept
    order = list(known)[:num_gone]
    if len(order) == num_gone:
        return order
    if criterion == "influence":
        visits = [nullcontext(_influence)] * num_layers
        sums = visit_blocks(comm, model, samples, visits, progress, offload=offload, batch_tokens=batch_tokens)
        influences = [float(of_layer) for of_layer in sums]
        return sorted(range(num_layers), key=lambda index: (influences[index], index))[:num_gone]
    tried = samples[:_MOST_SAMPLES]

    def on_walk() -> None:
        if progress is not None:
            progress(len(order) + 1, num_gone)

    # Each sample without its last token, after which none is predicted.
    with walking(comm, model, tried[:, :-1], offload=offload, batch_tokens=batch_tokens, num_copies=1) as walk:
        while len(order) < num_gone:
            left = [index for index in range(num_layers) if index not in order]
            losses = losses_without(comm, walk, tried[:, 1:], left, on_walk)
            for index, loss in losses.items():
                if not math.isfinite(loss):  # the same on every rank
                    raise ValueError(f"the loss without layers {sorted([*order, index])} is {loss}")
            order.append(min(losses, key=lambda index: (losses[index], index)))
    return order


def losses_without(
    comm: Communicator,
    walk: Walk,
    targets: torch.Tensor,
    left: Sequence[int],
    on_walk: Callable[[], object] = lambda: None,
) -> dict[int, float]:
    """Return, for each of the layers ``left``, the loss of the model that has all of them but this one.

    ``walk`` is the one of the samples, before the first layer; ``targets`` (num_samples, length) are those of all
    ranks. ``on_walk`` is called when all streams are run. Every rank must call it. Rounds: 2 of 64 bytes and 1 for each
    layer, times the walks that the batches take, and 1 of 8 bytes for each layer.
    """
    losses: list[tuple[int, torch.Tensor]] = []  # of a batch without the layer of that number
    for batches in _walked_together(walk, len(targets), len(left) + 1):
        with together(comm):
            streams = replace(
                walk,
                hidden=[walk.hidden[batch].clone() for batch in batches],
                batches=[walk.batches[batch] for batch in batches],
            )
        for index in left:
            _run(comm, streams, index, len(batches))
        with together(comm), past_blocks(streams) as logits_of:
            for number, hidden in enumerate(streams.hidden[len(batches) :]):
                layer, place = divmod(number, len(batches))
                logits = logits_of(place, hidden)
                if (windows := walk.batches[batches[place]].windows) and walk.sample_group.rank == 0:
                    wanted = sent(targets[list(windows)].flatten(), logits.device)
                    losses.append((layer, cross_entropy(logits.flatten(0, 1), wanted)))

    def fill(words: torch.Tensor) -> None:
        for (layer, _), loss in zip(losses, fetched([loss for _, loss in losses]), strict=True):
            words[layer] += loss
        on_walk()

    return dict(zip(left, sum_together(comm, (len(left),), fill, torch.float64).tolist(), strict=True))


def _walked_together(walk: Walk, num_samples: int, num_streams: int) -> list[range]:
    """Return which of this rank's batches are walked together: as many as ``_MOST_BYTES`` hold, or one. Local.

    The same on every rank, since all have as many.
    """
    of_sample = walk.hidden[0].nbytes // len(walk.batches[0].inputs["input_ids"])
    of_batch = of_sample * math.ceil(num_samples / (walk.sample_group.num_groups * walk.num_batches))
    step = max(_MOST_BYTES // (num_streams * of_batch), 1)
    return [range(start, min(start + step, walk.num_batches)) for start in range(0, walk.num_batches, step)]


def _run(comm: Communicator, streams: Walk, index: int, num: int) -> None:
    """Run layer ``index`` on all streams; the first, of ``num`` batches, also goes on without it."""
    without: list[torch.Tensor] = []

    def on_batch(batch: int, given: torch.Tensor, output: torch.Tensor) -> None:  # noqa: ARG001
        if batch < num:
            without.append(given.clone())

    streams.advance(index, comm, end=on_batch, checks=False)  # the loss says what is NaN
    streams.hidden += without
    streams.batches += streams.batches[:num]


@contextmanager
def skipping(model: nn.Module, indices: Set[int]) -> Iterator[None]:
    """Let the decoder layers ``indices`` of ``model`` hand on what they are given while this lasts. Local.

    Hooks, and what FSDP2 gathers, are as before. Of a kind of layer the first one runs once, to show what it puts out.
    """
    known: dict[type, Any] = {}
    skipped = [block for index, (_, block) in enumerate(decoder_blocks(model)) if index in indices]
    with replacing_forwards(skipped, lambda block: partial(_hand_on, block.forward, known, type(block))):
        yield


def _hand_on(forward: Callable[..., Any], known: dict[type, Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    """Return the hidden states that a block is given, as it puts them out."""
    if kind not in known:
        known[kind] = forward(*args, **kwargs)
    return with_hidden(known[kind], args[0] if args else kwargs["hidden_states"])


def _influence(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return 1 - cos of what a layer is given and puts out, summed over tokens, (1,)."""
    cosines = nn.functional.cosine_similarity(given.double(), output.to(given.device).double(), dim=-1)
    return (1 - cosines).sum()[None]
