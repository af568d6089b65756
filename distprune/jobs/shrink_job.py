"""What a job that makes a model smaller is asked for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from typing_extensions import override

from distprune.jobs.calibrated import CalibratedJob
from distprune.jobs.options import ask, asked, parse_budget, parse_size
from distprune.oneshot import share_of_targets
from distprune.removal import CriterionName, ExpertCriterion, LayerCriterion, Refit, Sizes, default_targets_of

__all__ = ["ShrinkJob"]


def _size(help: str) -> Any:
    return ask(help, default=None, parse=parse_size, metavar="N|SHARE")


@asked
class ShrinkJob(CalibratedJob):
    """Make a model smaller, as :func:`distprune.shrink_model` does."""

    mlp: int | float | None = _size("MLP channels that stay, such as 0.75 of them.")
    heads: int | float | None = _size("Query heads that stay, as many of each KV group.")
    kv_groups: int | float | None = _size("KV heads that stay, each with its query heads.")
    experts: int | float | None = _size("Experts that stay of each mixture.")
    layers: int | float | None = _size("Decoder layers that stay, such as 24.")
    parameters: int | float | None = ask(
        "At most as many parameters stay, such as 100M. What leaves, of all of which nothing is said but experts, "
        "is found by trials on --calibration.",
        default=None,
        parse=parse_budget,
        metavar="N[K|M|B]|SHARE",
    )
    criterion: CriterionName = ask(
        "How units are chosen. obs: by what the least squares fit of the rest loses.", default="obs"
    )
    layer_criterion: LayerCriterion = ask(
        "How layers are chosen. loss: one by one, by the loss without each; influence: by angles.",
        default="loss",
        needs=("layers", "parameters"),
    )
    expert_criterion: ExpertCriterion = ask(
        "How experts are chosen. output: by what they put out; usage: by how many tokens they get.",
        default="output",
        needs=("experts",),
    )
    refit: Refit = ask(
        "What becomes of the layers that read what goes: fitted anew, their bias alone, or none.",
        default="least_squares",
    )
    speed: bool = ask(
        "Measure tokens per second and memory before and after; both models must fit on one rank.",
        default=True,
        in_card=False,
    )

    @property
    def sizes(self) -> Sizes:
        return Sizes(**{of.name: getattr(self, of.name) for of in fields(Sizes)})

    @override
    def check_asked(self) -> None:
        super().check_asked()
        self.sizes.check_asked()
        share_of_targets(self.targets or default_targets_of(self.refit), self.target_share)
