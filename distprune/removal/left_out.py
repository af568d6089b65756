"""The loss of a model without each of its decoder layers, by one walk that carries a stream for each.

Noun: a *stream* is the hidden states of some samples in a model without one of its layers. Before layer i there are
those without an earlier layer, and the one of the whole model: all are run, and the stream without layer i is a copy of
what the whole model's was before. So no layer is gathered twice, and what comes before a layer is run once for all
streams that have it in common.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distprune.calibration.past_blocks import past_blocks
from distprune.calibration.walk import Walk
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.models.cross_entropy import cross_entropy

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
        """Return which of this rank's samples are walked together when so many layers are left. Local.

        As many as ``_MOST_BYTES`` hold, or one: the same on every rank, since all have as many.
        """
        num, num_bytes = self.walk.num_samples, self.walk.hidden[0].nbytes
        step = max(_MOST_BYTES // ((num_left + 1) * num_bytes), 1)
        return [range(start, min(start + step, num)) for start in range(0, num, step)]

    def losses(self, left: Sequence[int]) -> dict[int, float]:
        """Return, for each of the layers ``left``, the loss of the model that has all of them but this one.

        Every rank must call it. Rounds: 2 of 64 bytes and 1 for each layer, times :meth:`parts`, and 1 of 8 bytes for
        each layer and each sample of all ranks. The loss of a sample does not depend on who runs it, nor with which.
        """
        found: dict[tuple[int, int], float] = {}  # by number of the layer and of the sample
        group = self.walk.sample_group
        for samples in self.parts(len(left)):
            streams = self._walked(samples, left)
            with together(self.comm), past_blocks(streams) as logits_of:
                for number, hidden in enumerate(streams.hidden[len(samples) :]):
                    layer, place = divmod(number, len(samples))
                    logits = logits_of(place, hidden)
                    if samples[place] < self.walk.num_counted and group.rank == 0:
                        sample = group.number + samples[place] * group.num_groups
                        found[layer, sample] = cross_entropy(logits[0], self.targets[sample].to(logits.device))

        def fill(words: torch.Tensor) -> None:
            for place, loss in found.items():
                words[place] = loss

        of_all = sum_together(self.comm, (len(left), len(self.targets)), fill, torch.float64)
        return dict(zip(left, map(math.fsum, of_all.tolist()), strict=True))

    def _walked(self, samples: range, left: Sequence[int]) -> Walk:
        """Return a walk of ``samples`` after ``left``: the stream of the whole model, then one without each of them."""
        with together(self.comm):
            walk = dataclasses.replace(
                self.walk,
                hidden=[self.walk.hidden[sample].clone() for sample in samples],
                calls=[self.walk.calls[sample] for sample in samples],
                batches=[self.walk.batches[sample] for sample in samples],
            )
        for index in left:
            self._run(walk, index, len(samples))
        return walk

    def _run(self, walk: Walk, index: int, num: int) -> None:
        """Run layer ``index`` on all streams; the first, of ``num`` samples, also goes on without it."""
        without: list[torch.Tensor] = []

        def on_sample(sample: int, given: torch.Tensor, output: torch.Tensor) -> None:  # noqa: ARG001
            if sample < num:
                without.append(given.clone())
            if sample == walk.num_samples - 1:
                self.on_layer()

        walk.advance(index, self.comm, end=on_sample, checks=False)  # the loss says what is NaN
        walk.hidden += without
        walk.calls += walk.calls[:num]
