"""Which decoder layers go: by how little each changes hidden states, or by what the loss says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from distprune.calibration.data import token_digest
from distprune.calibration.sample_group import find_sample_group, shared_axis
from distprune.calibration.visit import visit_blocks, walking
from distprune.calibration.walk import with_hidden
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import Group, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.evaluating import replacing_forwards
from distprune.oneshot.plan import blocks_to_walk, check_samples
from distprune.removal.left_out import LeftOut

LayerCriterion = Literal["loss", "influence"]
_MOST_SAMPLES = 16  # whose loss is tried: the time grows with them
Progress = Callable[[int, int], None] | None


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
        progress: called with (layers run, number to run) on this rank.

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
    with together(comm):
        check_samples(model, samples)
        num_layers = len(blocks_to_walk(model))
        if isinstance(num_kept, bool) or not isinstance(num_kept, int):
            raise TypeError(f"num_kept must be a number of layers, not {num_kept!r}")
        if not 1 <= num_kept <= num_layers:
            raise ValueError(f"{num_kept=} layers of {num_layers} cannot stay")
        if criterion not in ("loss", "influence"):
            raise ValueError(f"{criterion=} is none of loss, influence")
        if criterion == "loss" and samples.shape[1] < 2:
            raise ValueError(f"samples of {samples.shape[1]} token have none to predict; two are the least")
        digest = token_digest(samples)
        facts = {"layers": num_kept, "criterion": criterion, "known": list(known), "batch_tokens": batch_tokens}
    agree(comm, {**facts, "samples": digest})
    order = list(known)[: num_layers - num_kept]
    if len(order) == num_layers - num_kept:
        return order
    if criterion == "influence":
        sums = visit_blocks(
            comm,
            model,
            samples,
            [nullcontext(_influence)] * num_layers,
            progress,
            offload=offload,
            batch_tokens=batch_tokens,
        )
        influences = [float(of_layer) for of_layer in sums]
        by_influence = sorted(range(num_layers), key=lambda index: (influences[index], index))
        return by_influence[: num_layers - num_kept]
    with together(comm):
        axis = shared_axis(model)
    sample_group = find_sample_group(comm, axis)
    tried = samples[:_MOST_SAMPLES]
    # Each sample without its last token, after which none is predicted.
    with walking(comm, sample_group, model, tried[:, :-1], offload=offload, batch_tokens=batch_tokens) as walk:
        num_run, num_to_run = 0, 0

        def on_layer() -> None:
            nonlocal num_run
            num_run += 1
            if progress is not None:
                progress(num_run, num_to_run)

        trials = LeftOut(comm, walk, tried[:, 1:], on_layer)
        num_to_run = sum(num * len(trials.parts(num)) for num in range(num_kept + 1, num_layers - len(order) + 1))
        while len(order) < num_layers - num_kept:
            losses = trials.losses([index for index in range(num_layers) if index not in order])
            for index, loss in losses.items():
                if not math.isfinite(loss):  # the same on every rank
                    raise ValueError(f"the loss without layers {sorted([*order, index])} is {loss}")
            order.append(min(losses, key=lambda index: (losses[index], index)))
    return order


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
