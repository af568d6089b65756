"""The loss of a model without each of its decoder layers, by one walk that carries a stream for each.

Noun: a *stream* is the hidden states of some samples in a model without one of its layers. At layer i we carry one
stream for each earlier layer that was left out, and the full model's. All run layer i; a copy of the full stream skips
it. So no layer is gathered twice, and what streams have in common is run once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distprune.calibration.catch_inputs import past_blocks
from distprune.calibration.walk import Walk
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.models.cross_entropy import cross_entropy
from distprune.shards.device import fetched, sent

_MOST_BYTES = 4 << 30  # of hidden states that one walk carries


@dataclass
class LeftOut:
    """``walk`` is the one of the samples, before the first layer; ``targets`` (num_samples, length) of all ranks.

    ``on_layer`` is called after each layer that a walk has run.
    """

    comm: Communicator
    walk: Walk
    targets: torch.Tensor
    on_layer: Callable[[], object]

    def parts(self, num_left: int) -> list[range]:
        """Return which of this rank's batches are walked together when so many layers are left. Local.

        As many as ``_MOST_BYTES`` hold, or one: the same on every rank, since all have as many.
        """
        walk = self.walk
        of_sample = walk.hidden[0].nbytes // len(walk.batches[0].inputs["input_ids"])
        of_batch = of_sample * -(-len(self.targets) // (walk.sample_group.num_groups * walk.num_batches))
        step = max(_MOST_BYTES // ((num_left + 1) * of_batch), 1)
        return [range(start, min(start + step, walk.num_batches)) for start in range(0, walk.num_batches, step)]

    def losses(self, left: Sequence[int]) -> dict[int, float]:
        """Return, for each of the layers ``left``, the loss of the model that has all of them but this one.

        Every rank must call it. Rounds: 2 of 64 bytes and 1 for each layer, times :meth:`parts`, and 1 of 8 bytes for
        each layer.
        """
        losses: list[tuple[int, torch.Tensor]] = []  # of a batch without the layer of that number
        for batches in self.parts(len(left)):
            streams = self._walked(batches, left)
            with together(self.comm), past_blocks(streams) as logits_of:
                for number, hidden in enumerate(streams.hidden[len(batches) :]):
                    layer, place = divmod(number, len(batches))
                    logits = logits_of(place, hidden)
                    if (windows := self.walk.batches[batches[place]].windows) and self.walk.sample_group.rank == 0:
                        targets = sent(self.targets[list(windows)].flatten(), logits.device)
                        losses.append((layer, cross_entropy(logits.flatten(0, 1), targets)))

        def fill(words: torch.Tensor) -> None:
            for (layer, _), loss in zip(losses, fetched([loss for _, loss in losses]), strict=True):
                words[layer] += loss

        return dict(zip(left, sum_together(self.comm, (len(left),), fill, torch.float64).tolist(), strict=True))

    def _walked(self, batches: range, left: Sequence[int]) -> Walk:
        """Return a walk of ``batches`` after ``left``: the stream of the whole model, then one without each of them."""
        with together(self.comm):
            walk = dataclasses.replace(
                self.walk,
                hidden=[self.walk.hidden[batch].clone() for batch in batches],
                batches=[self.walk.batches[batch] for batch in batches],
            )
        for index in left:
            self._run(walk, index, len(batches))
        return walk

    def _run(self, walk: Walk, index: int, num: int) -> None:
        """Run layer ``index`` on all streams; the first, of ``num`` batches, also goes on without it."""
        without: list[torch.Tensor] = []

        def on_batch(batch: int, given: torch.Tensor, output: torch.Tensor) -> None:  # noqa: ARG001
            if batch < num:
                without.append(given.clone())
            if batch == walk.num_batches - 1:
                self.on_layer()

        walk.advance(index, self.comm, end=on_batch, checks=False)  # the loss says what is NaN
        walk.hidden += without
        walk.batches += walk.batches[:num]
