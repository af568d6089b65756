"""How many units of each kind, and how many layers, a smaller model is to have; checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import nn
from typing_extensions import override

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import check_model
from distprune.models.units import UNIT_KINDS, UnitKind, find_all_units
from distprune.removal.plan import plan_units
from distprune.removal.readers import num_to_keep
from distprune.removal.rebuild import check_layers


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What stays: a number, or as a float a share of what is there; ``None``: all.

    MLP channels, query heads (as many of each KV group), KV groups with their query heads, experts, decoder layers.
    ``parameters``: at most as many of all parameters; see :class:`Budget`.
    """

    mlp: int | float | None = None
    heads: int | float | None = None
    kv_groups: int | float | None = None
    experts: int | float | None = None
    layers: int | float | None = None
    parameters: int | float | None = None

    @override
    def __str__(self) -> str:
        return ", ".join(f"{kind} {size}" for kind, size in vars(self).items() if size is not None)

    @property
    def of_units(self) -> dict[UnitKind, int | float]:
        """What is said of units, by kind."""
        return {kind: size for kind in UNIT_KINDS if (size := getattr(self, kind)) is not None}

    @property
    def in_walk(self) -> dict[UnitKind, int | float]:
        """What is chosen block after block, by kind."""
        return {kind: size for kind, size in self.of_units.items() if kind != "experts"}

    def check_asked(self) -> None:
        """Raise a ValueError unless something is to be removed that can be in one go. Local."""
        if all(size is None for size in vars(self).values()):
            sizes = ", ".join(f"{name}=..." for name in vars(self))
            raise ValueError(f"there is nothing to remove: say what stays, by one of {sizes}")
        if self.heads is not None and self.kv_groups is not None:
            raise ValueError(
                "heads=... and kv_groups=... are inputs of one linear layer: remove one of them, then the other"
            )
        most = 1 if isinstance(self.parameters, float) else inf
        if self.parameters is not None and not 0 < self.parameters <= most:
            raise ValueError(f"parameters: {self.parameters} is neither a number from 1 on nor a share in (0, 1]")

    def num_layers(self, model: nn.Module) -> int:
        """Return how many decoder layers of ``model`` stay. Local.

        Raises:
            ValueError: none, or more than are there.
        """
        num_all = len(decoder_blocks(model))
        if self.layers is None:
            return num_all
        if isinstance(self.layers, float) and not 0 < self.layers <= 1:
            raise ValueError(f"layers: the share {self.layers} is not in (0, 1]")
        num = max(1, round(self.layers * num_all)) if isinstance(self.layers, float) else self.layers
        if not 1 <= num <= num_all:
            raise ValueError(f"layers: {num} of {num_all} cannot stay; possible are 1 to {num_all}")
        return num

    def check(self, model: nn.Module) -> None:
        """Check that ``model`` can have these sizes, in the layout it is in. Local; nothing is changed.

        Raises:
            ValueError, TypeError: sizes that are not possible; the message says which are.
            NotImplementedError: units that cannot be removed from this model, or a layout in which they cannot.
        """
        check_model(model)
        self.check_asked()
        kept: dict[tuple[str, UnitKind, str], torch.Tensor] = {}
        for kind, size in self.of_units.items():
            for name, of_block in find_all_units(model, kind):
                for units in of_block:
                    num = num_to_keep(units, size, f"{name}.{units.name}")
                    # Which ones does not matter: as many of each group.
                    groups = torch.arange(units.num_units, device="cpu").view(units.num_groups, -1)
                    kept[name, kind, units.name] = groups[:, : num // units.num_groups].flatten()
        plan_units(model, kept)
        if (num_layers := self.num_layers(model)) < len(decoder_blocks(model)):
            check_layers(model, range(num_layers))
