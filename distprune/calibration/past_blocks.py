"""What a model makes of hidden states after its last decoder block: final norm and output head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from distprune.calibration.data import device_of
from distprune.calibration.stand_in import standing_in
from distprune.calibration.walk import Walk, with_hidden
from distprune.shards.fsdp2_forward import kept_gathered


@contextmanager
def past_blocks(walk: Walk) -> Iterator[Callable[[int, torch.Tensor], torch.Tensor]]:
    """Yield a function that returns the logits, (samples, length, vocabulary), of a batch and of its hidden states.

    These are what the last block puts out. The model is run with stand-ins for its blocks, so that none of them is
    gathered. Under FSDP2 what is around them is gathered (inside torch), once for all runs: embeddings, too. Every rank
    must call it. No gradients.
    """
    device = device_of(walk.model)
    last = torch.empty(0, dtype=torch.float32, device="cpu")

    def logits(batch: int, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = hidden.to(device)
        with torch.no_grad(), walk.sample_group.passing():
            of_batch: torch.Tensor = walk.model(**walk.batches[batch]).logits
        return of_batch

    with standing_in(walk.model, walk.blocks, lambda *_: with_hidden(walk.output, last)), kept_gathered(walk.model):
        yield logits
