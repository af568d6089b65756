"""Sparse training in the ``Trainer`` of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from typing_extensions import override

from distprune.checkpoint.optional_packages import import_extra
from distprune.training.integrations.attached import Attached
from distprune.training.sparse_training import SparseTraining

__all__ = ["SparseTrainingCallback"]

Callback: Any = import_extra("lightning.pytorch", "lightning").Callback


@final
class SparseTrainingCallback(Attached, Callback):  # type: ignore[misc]
    """Prune over time while a ``Trainer`` trains, and hold what is pruned.

    >>> from lightning.pytorch import Trainer
    >>> from distprune import cubic
    >>> trainer = Trainer(callbacks=[SparseTrainingCallback(cubic(0.8, stop=1000, every=10))])  # doctest: +SKIP

    Plain, DDP or FSDP2 (``ModelParallelStrategy``). ``schedule`` and the other arguments are those of
    :class:`distprune.SparseTraining`; without a schedule, the zeros that are there are held
    (:func:`distprune.hold_zeros`). The steps are those of the first optimizer. A checkpoint has the step, and ``fit``
    with its path goes on from there; sums of :class:`distprune.Movement` begin anew then, with a warning. ``fit`` ends
    with 0.0 in the place of every -0.0, and with zeros where weights are held if ``StochasticWeightAveraging`` or
    ``WeightAveraging`` gave the model their averages. Checkpoints of ``ModelCheckpoint`` keep the -0.0 of weights that
    are not held, so that they can be resumed.

    It logs ``sparsity`` as modules log, and when it changes ``sparsity/NAME`` of each parameter to all loggers, unless
    ``log_parameters`` is False.

    Every rank must have it: it communicates as :class:`distprune.SparseTraining`, two rounds at the beginning, and one
    of 64 bytes at the end.

    Raises:
        TypeError: an argument that needs a schedule, and there is none.
        ValueError: as ``fit`` begins, or at a step: as :class:`distprune.SparseTraining`; there is neither a schedule
            nor a zero.
    """

    _loaded: Mapping[str, Any] = {}  # a checkpoint's, until training begins

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self.training.step} if isinstance(self.training, SparseTraining) else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        training = self.begin(trainer.model, trainer.optimizers)
        if isinstance(training, SparseTraining) and self._loaded:
            training.load_state_dict(self._loaded)
        self._loaded = {}

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("sparsity", self.sparsity)
        news = self.news()
        for logger in trainer.loggers if news else ():
            logger.log_metrics(news, step=trainer.global_step)

    @override
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish after all callbacks have seen the end of training: some write averages into the model there."""
        if self.training is not None:
            hold = self.training.hold if isinstance(self.training, SparseTraining) else self.training
            hold.apply_to(pl_module)
            self.training.finish()
