"""Smaller models: which channels, heads, layers and experts go, what reads them, refitted; and what is left, cut."""

from distprune.removal.budget import Budget
from distprune.removal.choose_units import (
    OnBlockUnits,
    Removal,
    choose_units,
    default_targets_of,
    refit_in_trials,
    refit_of_units,
)
from distprune.removal.criteria import (
    OBS,
    Activation,
    Criterion,
    CriterionName,
    Fluctuation,
    UnitEvidence,
    UnitMagnitude,
    UnitTaylor,
)
from distprune.removal.experts import ExpertCriterion, choose_experts
from distprune.removal.layers import LayerCriterion, order_layers, skipping
from distprune.removal.plan import Kept, plan_units
from distprune.removal.rebuild import check_layers, remove_layers, remove_units
from distprune.removal.remover import Refit
from distprune.removal.shrink_model import Shrunk, cut_model, shrink_model
from distprune.removal.sizes import Sizes
from distprune.removal.trials import Division, Trial, divide_budget, find_budget

__all__ = [
    "OBS",
    "Activation",
    "Budget",
    "Criterion",
    "CriterionName",
    "Division",
    "ExpertCriterion",
    "Fluctuation",
    "Kept",
    "LayerCriterion",
    "OnBlockUnits",
    "Refit",
    "Removal",
    "Shrunk",
    "Sizes",
    "Trial",
    "UnitEvidence",
    "UnitMagnitude",
    "UnitTaylor",
    "check_layers",
    "choose_experts",
    "choose_units",
    "cut_model",
    "default_targets_of",
    "divide_budget",
    "find_budget",
    "order_layers",
    "plan_units",
    "refit_in_trials",
    "refit_of_units",
    "remove_layers",
    "remove_units",
    "shrink_model",
    "skipping",
]
