"""What a job that makes a model smaller is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from typing_extensions import override

from distprune.jobs.options import CalibratedJob, Option, ask, parse_budget, parse_size
from distprune.jobs.unfinished import check_unfinished
from distprune.removal import CriterionName, ExpertCriterion, LayerCriterion, Refit, Sizes

__all__ = ["ShrinkJob"]


def _size(help: str) -> dict[str, Option]:
    return ask(help, parse=parse_size, metavar="N|SHARE")


@dataclass(frozen=True, kw_only=True)
class ShrinkJob(CalibratedJob):
    """Make a model smaller, as :func:`distprune.shrink_model` does."""

    mlp: int | float | None = field(default=None, metadata=_size("MLP channels that stay, such as 0.75 of them."))
    heads: int | float | None = field(default=None, metadata=_size("Query heads that stay, as many of each KV group."))
    kv_groups: int | float | None = field(
        default=None, metadata=_size("KV heads that stay, each with its query heads.")
    )
    experts: int | float | None = field(default=None, metadata=_size("Experts that stay of each mixture."))
    layers: int | float | None = field(default=None, metadata=_size("Decoder layers that stay, such as 24."))
    parameters: int | float | None = field(
        default=None,
        metadata=ask(
            "At most as many parameters stay, such as 100M. What leaves, of all of which nothing is said but experts, "
            "is found by trials on --calibration.",
            parse=parse_budget,
            metavar="N[K|M|B]|SHARE",
        ),
    )
    criterion: CriterionName = field(
        default="obs",
        metadata=ask("How units are chosen. obs: by what the least squares fit of the rest loses."),
    )
    layer_criterion: LayerCriterion = field(
        default="loss",
        metadata=ask(
            "How layers are chosen. loss: one by one, by the loss without each; influence: by angles.",
            needs=("layers", "parameters"),
        ),
    )
    expert_criterion: ExpertCriterion = field(
        default="output",
        metadata=ask(
            "How experts are chosen. output: by what they put out; usage: by how many tokens they get.",
            needs=("experts",),
        ),
    )
    refit: Refit = field(
        default="least_squares",
        metadata=ask("What becomes of the layers that read what goes: fitted anew, their bias alone, or none."),
    )
    speed: bool = field(
        default=True,
        metadata=ask(
            "Measure tokens per second and memory before and after; both models must fit on one rank.", in_card=False
        ),
    )

    @property
    def sizes(self) -> Sizes:
        return Sizes(**{of.name: getattr(self, of.name) for of in fields(Sizes)})

    @override
    def check_asked(self) -> None:
        super().check_asked()
        self.sizes.check_asked()

    @override
    def check(self) -> None:
        check_unfinished(self, self.resume)
        super().check()
