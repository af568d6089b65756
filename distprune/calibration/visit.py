"""A walk of calibration samples through all decoder blocks, and what is measured in each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.data import device_of
from distprune.calibration.sample_group import SampleGroup, find_sample_group, shared_axis
from distprune.calibration.walk import Batch, Walk, in_steps, own_samples
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.guarded import guarding
from distprune.models.evaluating import evaluating
from distprune.shards.device import fetched

Progress = Callable[[int, int], None] | None
# Open while a block is run on all batches of this rank: what a batch adds, (n,), given what the block was given and put
# out. Local.
Visit = AbstractContextManager[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


@contextmanager
def walking(
    comm: Communicator,
    sample_group: SampleGroup,
    model: nn.Module,
    samples: torch.Tensor,
    *,
    offload: bool = False,
    has_dense: bool = False,
    batch_tokens: int | None = None,
    num_together: int | None = None,
) -> Iterator[Walk]:
    """Yield the walk of ``samples`` (num_samples, length) through ``model``, which is in evaluation mode meanwhile.

    ``has_dense``: the walk has a dense stream; ``batch_tokens`` run together, see ``tokens_together``;
    ``num_together`` consecutive samples of all make one of the walk's steps, if there are to be any. Every rank must
    call it. Rounds: those of :func:`catch_inputs`, one of 64 bytes before each of them, and one at the end.

    Raises:
        NotImplementedError: on every rank: tensor parallelism cuts hidden states between blocks.
        Exception: on every rank: what ``catch_inputs`` raises.
    """
    with ExitStack() as stack:
        with guarding(comm) as ranks:
            stack.enter_context(evaluating(model))
            batches, steps = own_samples(sample_group, model, samples, batch_tokens), list[Batch]()
            if num_together is not None:
                part = sample_group.number, sample_group.num_groups
                steps = in_steps(samples, *part, num_together, device_of(model))
            with sample_group.passing():
                walk = catch_inputs(model, batches, steps=steps, offload=offload, comm=ranks)
            walk.sample_group = sample_group
            shape, num_tokens = tuple(walk.hidden[0].shape), batches[0].inputs["input_ids"].numel()
            if sample_group.size > 1 and math.prod(shape[:-1]) != num_tokens:
                raise NotImplementedError(
                    f"hidden states of shape {shape} between blocks, for {num_tokens} tokens: a tensor-parallel "
                    "plan must leave them whole on every rank (no SequenceParallel across blocks)"
                )
            walk.dense += [hidden.clone() for hidden in walk.hidden] if has_dense else []
        yield walk


def visit_blocks(
    comm: Communicator,
    model: nn.Module,
    samples: torch.Tensor,
    visits: Sequence[Visit],
    progress: Progress = None,
    *,
    offload: bool = False,
    batch_tokens: int | None = None,
) -> Iterator[torch.Tensor]:
    """Yield for each decoder block what its visit measures, summed over all samples, float64.

    Every rank must call it. Rounds: those of a walk, and for each block 1 of 64 bytes, that of its run, and 1 of 8
    bytes a number. ``progress`` is called with the number of blocks done, and of all; ``offload``, ``batch_tokens``: as
    of :func:`walking`.

    Raises:
        ValueError, NotImplementedError, Exception: on every rank: what the walk raises, or on one a visit or
            ``progress``.
    """
    with together(comm):
        axis = shared_axis(model)
    sample_group = find_sample_group(comm, axis)
    with walking(comm, sample_group, model, samples, offload=offload, batch_tokens=batch_tokens) as walk:
        for index, visit in enumerate(visits):
            yield _visited(comm, walk, index, visit, progress)


def _visited(comm: Communicator, walk: Walk, index: int, visit: Visit, progress: Progress) -> torch.Tensor:
    measured: list[torch.Tensor] = []  # by batch

    def fill(words: torch.Tensor) -> None:
        for batch, of_batch in zip(walk.batches, fetched(measured), strict=True):
            if batch.windows and walk.sample_group.rank == 0:
                words += of_batch
        if progress is not None:
            progress(index + 1, len(walk.blocks))

    with ExitStack() as stack:
        with together(comm):
            measure = stack.enter_context(visit)
        walk.advance(index, comm, end=lambda _, given, output: measured.append(measure(given, output)))
    return sum_together(comm, measured[0].shape, fill, torch.float64)
