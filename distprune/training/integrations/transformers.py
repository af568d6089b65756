"""Sparse training in the ``Trainer`` of transformers."""

from __future__ import annotations

from typing import Any, final

from torch import nn
from typing_extensions import override

from distprune.checkpoint.optional_packages import import_extra
from distprune.training.integrations.attached import Attached
from distprune.training.optimizers import Optimizers
from distprune.training.sparse_training import SparseTraining

__all__ = ["SparseTrainingCallback"]

TrainerCallback: Any = import_extra("transformers", "hf").TrainerCallback
_NAME = "distprune.SparseTraining"  # in the state of a Trainer; the name of a class would make a Trainer rebuild it


@final
class SparseTrainingCallback(Attached, TrainerCallback):  # type: ignore[misc]
    """Prune over time while a ``Trainer`` trains, and hold what is pruned.

    >>> from transformers import Trainer
    >>> from distprune import cubic
    >>> callback = SparseTrainingCallback(cubic(0.8, stop=1000, every=10))
    >>> trainer = Trainer(model, callbacks=[callback])  # doctest: +SKIP

    Plain, DDP or FSDP2. ``schedule`` and the other arguments are those of :class:`distprune.SparseTraining`;
    without a schedule, the zeros that are there are held (:func:`distprune.hold_zeros`). Training begins after a
    checkpoint is loaded, and goes on at the step that the checkpoint was saved at. A step is a step of the optimizer,
    as it is for the learning rate; :class:`distprune.SparseTraining` says which count of those that a GradScaler skips.
    A checkpoint that was saved without this callback goes on at its ``global_step``.

    Checkpoints keep the -0.0 of weights that are not held, so that they can be resumed. When ``train()`` returns, every
    -0.0 is 0.0, so ``save_model()`` after it writes none. ``load_best_model_at_end`` may choose a checkpoint that was
    saved before the end of the schedule; where hardly any of its weights are zero, those of the end become zero, with a
    warning. Sums of :class:`distprune.Movement` are not in a Trainer's checkpoint: they begin anew, with a warning.

    The logs have a ``sparsity``, and when it changes ``sparsity/NAME`` of each parameter, unless ``log_parameters`` is
    False. A Trainer calls a user's callbacks after its own, such as TensorBoard's and wandb's: :meth:`put_first` lets
    those see it. The one of all is in ``trainer.state.log_history`` in any case.

    Every rank must have it: it communicates as :class:`distprune.SparseTraining`, and two rounds at the beginning.

    Raises:
        TypeError: an argument that needs a schedule, and there is none.
        ValueError: as ``train()`` begins, or at a step: as :class:`distprune.SparseTraining`; there is neither a
            schedule nor a zero.
    """

    def put_first(self, trainer: Any) -> None:
        """Put this callback before all others of ``trainer``, so that what it logs reaches TensorBoard and wandb.

        >>> callback.put_first(trainer)  # doctest: +SKIP
        """
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]

    @override
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Optimizers, **_: Any
    ) -> None:
        training = self.begin(model, optimizer)
        if isinstance(training, SparseTraining) and (saved := state.stateful_callbacks.get(_NAME)):
            training.load_state_dict(saved)
        elif isinstance(training, SparseTraining):
            training.step = state.global_step  # of a checkpoint without this, which may be dense

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        done = {"step": self.training.step} if isinstance(self.training, SparseTraining) else {}
        state.stateful_callbacks[_NAME] = done  # saved after this

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if self.training is not None:
            logs["sparsity"] = state.log_history[-1]["sparsity"] = self.sparsity
            logs.update(self.news())

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training is not None:
            self.training.finish()
