"""Sparse training in the ``Trainer`` of torchtitan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from distprune.training.hold import Hold
from distprune.training.integrations.attached import Attached, Options
from distprune.training.schedules import Schedule
from distprune.training.sparse_training import SparseTraining

__all__ = ["train_sparsely"]


def train_sparsely(
    trainer: Any, schedule: Schedule | Mapping[str, Schedule] | None = None, **options: Unpack[Options]
) -> SparseTraining | Hold:
    """Prune over time while ``trainer`` trains, and hold what is pruned.

    Call it between the two lines of a torchtitan program: ::

        trainer = config.build()
        training = train_sparsely(trainer, cubic(0.8, stop=1000, every=10))
        trainer.train()

    ``schedule`` and the other arguments are those of :class:`distprune.SparseTraining`; without a schedule, the zeros
    that are there are held (:func:`distprune.hold_zeros`). The checkpointer saves and loads the step, as
    ``sparse_training``. Zeros that ``train()`` loads from a checkpoint are held.

    It reads ``trainer.model_parts``, ``optimizers`` and ``checkpointer``. It is no model converter: those of torchtitan
    0.2.2 see neither the optimizer nor the checkpointer, and 0.3.0 has none. Tests run it with 0.3.0's optimizers and
    checkpointer over FSDP2 on gloo; a whole ``Trainer``, which needs triton, was not run.

    Every rank must call it; what is communicated, and raised, is as for :class:`distprune.SparseTraining`.

    Raises:
        NotImplementedError: several pipeline stages on a rank.
        TypeError: an argument that needs a schedule, and there is none.
    """
    if len(trainer.model_parts) != 1:
        raise NotImplementedError(
            f"sparse training takes one pipeline stage a rank, not {len(trainer.model_parts)}; use a schedule without "
            "interleaving"
        )
    training = Attached(schedule, **options).begin(trainer.model_parts[0], trainer.optimizers, loads_later=True)
    if isinstance(training, SparseTraining) and trainer.checkpointer.enable:
        trainer.checkpointer.states["sparse_training"] = training
    return training
