"""What a job that makes a model smaller is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from distprune.jobs.run import Job
from distprune.jobs.unfinished import check_unfinished
from distprune.oneshot import TargetsOf
from distprune.removal import CriterionName, ExpertCriterion, LayerCriterion, Refit, Sizes

__all__ = ["ShrinkJob"]


@dataclass(frozen=True, kw_only=True)
class ShrinkJob(Job):
    """Make a model smaller; the fields of :class:`Job`, and those of :func:`distprune.shrink_model`.

    Args:
        mlp, heads, kv_groups, experts, layers: how many stay in each place, or as a float which share; ``None``: all.
        parameters: at most as many stay of all parameters, or which share; what leaves is then found by trials, of the
            kinds of which nothing is said.
        calibration: a text or JSON-lines file, from all over which ``samples`` windows of ``sequence_length`` tokens
            are drawn; ``None``: all of them.
        offload: keep activations on the CPU between blocks.
        speed: measure the model before and after in plain transformers, on the first rank's machine, one after the
            other; each must fit into its memory.
        resume: go on where a job that was killed has stopped.
    """

    mlp: int | float | None = None
    heads: int | float | None = None
    kv_groups: int | float | None = None
    experts: int | float | None = None
    layers: int | float | None = None
    parameters: int | float | None = None
    calibration: str
    criterion: CriterionName = "obs"
    layer_criterion: LayerCriterion = "loss"
    expert_criterion: ExpertCriterion = "output"
    refit: Refit = "least_squares"
    targets: TargetsOf | None = None
    target_share: float = 0.5
    samples: int | None = 128
    sequence_length: int = 2048
    offload: bool = False
    speed: bool = True
    resume: bool = False

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            mlp=self.mlp,
            heads=self.heads,
            kv_groups=self.kv_groups,
            experts=self.experts,
            layers=self.layers,
            parameters=self.parameters,
        )

    @override
    def check(self) -> None:
        check_unfinished(self, self.resume)
        self.sizes.check_asked()
        super().check()

    @override
    def inputs(self) -> list[str]:
        return [*super().inputs(), self.calibration]
