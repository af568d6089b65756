"""How many units of each kind, and how many layers, a smaller model is to have; checked before anything is computed.

A *budget* of parameters is divided over the kinds of which it is not said how much stays: MLP channels, query heads or
KV groups (one of the two: the same linear layer reads them) and decoder layers. No communication.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import nn
from typing_extensions import override

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import check_model, count_parameters
from distprune.models.units import UNIT_KINDS, UnitKind, Units, find_all_units
from distprune.removal.readers import num_to_keep, number_of
from distprune.removal.rebuild import Kept, check_layers, cut_shapes, plan_units, select_units, step_of
from distprune.removal.smaller_config import shapes_of

_EVEN = 16  # MLP widths are multiples of it, as far as those before are: matrix products are faster


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
        return _in_words({kind: size for kind, size in vars(self).items() if size is not None})

    @property
    def of_units(self) -> dict[UnitKind, int | float]:
        """What is said of units, by kind."""
        return {kind: size for kind in UNIT_KINDS if (size := getattr(self, kind)) is not None}

    def check_asked(self) -> None:
        """Raise a ValueError or a TypeError unless something is to be removed that can be in one go. Local."""
        if all(size is None for size in vars(self).values()):
            sizes = ", ".join(f"{name}=..." for name in vars(self))
            raise ValueError(f"there is nothing to remove: say what stays, by one of {sizes}")
        if self.heads is not None and self.kv_groups is not None:
            raise ValueError(
                "heads=... and kv_groups=... are inputs of one linear layer: remove one of them, then the other"
            )
        if isinstance(self.parameters, bool) or not isinstance(self.parameters, Integral | float | None):
            raise TypeError(f"parameters: a number or a share of them, not {self.parameters!r}")
        most = 1 if isinstance(self.parameters, float) else math.inf
        if self.parameters is not None and not 0 < self.parameters <= most:
            raise ValueError(f"parameters: {self.parameters} is neither a number from 1 on nor a share in (0, 1]")

    def num_layers(self, model: nn.Module) -> int:
        """Return how many decoder layers of ``model`` stay. Local.

        Raises:
            ValueError: none, or more than are there.
        """
        num_all = len(decoder_blocks(model))
        return num_all if self.layers is None else number_of(self.layers, num_all, "layers")

    def some_units(self, model: nn.Module) -> Kept:
        """Return units of ``model`` as many as are to stay, the first of each group. Local.

        Raises:
            ValueError, TypeError, NotImplementedError: sizes that are not possible, units that cannot be removed.
        """
        kept: dict[tuple[str, UnitKind, str], torch.Tensor] = {}
        for kind, size in self.of_units.items():
            for name, of_block in find_all_units(model, kind):
                for units in of_block:
                    num = num_to_keep(units, size, f"{name}.{units.name}")
                    groups = torch.arange(units.num_units, device="cpu").view(units.num_groups, -1)
                    kept[name, kind, units.name] = groups[:, : num // units.num_groups].flatten()
        return kept

    def check(self, model: nn.Module) -> Budget | None:
        """Check that ``model`` can have these sizes, in the layout it is in; return their budget, if there is one.

        Local; nothing is changed.

        Raises:
            ValueError, TypeError: sizes that are not possible; the message says which are; a budget that cannot be met.
            NotImplementedError: units that cannot be removed from this model, or a layout in which they cannot.
        """
        check_model(model)
        self.check_asked()
        selections, _ = plan_units(model, self.some_units(model))
        if (num_layers := self.num_layers(model)) < len(decoder_blocks(model)):
            _check_some_layers(model, num_layers)
        elif self.parameters is None and cut_shapes(model, selections) == shapes_of(model):
            raise ValueError(f"{self}: as many as the model has: there is none to remove")
        return None if self.parameters is None else Budget.of(model, self)


def _check_some_layers(model: nn.Module, num: int) -> None:
    """Raise as :func:`check_layers` does unless the last ``num`` layers can stay, or the first. Local."""
    num_all = len(decoder_blocks(model))
    if not _is_possible(check_layers, model, range(num_all - num, num_all)):
        check_layers(model, range(num))


def _in_words(sizes: Mapping[str, int | float]) -> str:
    return ", ".join(f"{kind} {size}" for kind, size in sizes.items())


def _is_possible(check: Callable[..., object], *args: object) -> bool:
    try:
        check(*args)
    except (ValueError, NotImplementedError):
        return False
    return True


Chosen = dict[str, int | float]  # what stays, by kind; of the others all

_EXCLUSIVE = {"heads", "kv_groups"}


@dataclass(frozen=True)
class Budget:
    """At most ``limit`` parameters: ``num_outside`` of the decoder blocks, and ``num_inside`` each at the sizes said.

    ``num_layers`` stay, or as many as one of the ``options``: by kind its sizes, from the most to the least, each with
    how many parameters of each block it removes (of layers none). The smallest blocks are counted as those that leave:
    the limit holds whichever do.
    """

    limit: int
    num_outside: int
    num_inside: Sequence[int]
    num_layers: int
    options: Mapping[str, Mapping[int | float, Sequence[int]]]

    @classmethod
    def of(cls, model: nn.Module, sizes: Sizes) -> Budget:
        """Return the budget of ``sizes.parameters``, an int or a share of those of ``model``, that it must have. Local.

        Raises:
            ValueError: it cannot be met, and what the least is; or nothing would have to leave.
        """
        assert sizes.parameters is not None
        num_all, said = count_parameters(model), sizes.of_units
        limit = int(sizes.parameters * num_all) if isinstance(sizes.parameters, float) else sizes.parameters
        if limit >= num_all:
            raise ValueError(f"parameters: the model has {num_all:,}, not more than {limit:,}: there is none to remove")
        num_layers, inside = sizes.num_layers(model), _block_numels(model, sizes)
        out: set[str] = {"experts", *said, *(_EXCLUSIVE if _EXCLUSIVE & said.keys() else ())}
        places: dict[UnitKind, list[Units]] = {}
        for kind in UNIT_KINDS:
            with suppress(NotImplementedError):
                places[kind] = [units for _, of_block in find_all_units(model, kind) for units in of_block]
        heads, groups = ([units.num_units for units in places.get(kind, ())] for kind in ("heads", "kv_groups"))
        if heads == groups:  # of one head each: they are the heads
            out.add("kv_groups")
        options: dict[str, dict[int | float, Sequence[int]]] = {
            kind: of_kind
            for kind, of_all in places.items()
            if kind not in out and (of_kind := _options(model, kind, of_all, sizes, inside))
        }
        # Whichever leave: the first one is tried, and the last.
        if sizes.layers is None and num_layers > 1 and _is_possible(_check_some_layers, model, num_layers - 1):
            options["layers"] = dict.fromkeys(range(num_layers - 1, 0, -1), ())
        budget = cls(limit, num_all - sum(_block_numels(model, Sizes())), inside, num_layers, options)
        smallest = ({kind: [*options[kind]][-1] for kind in kinds} for kinds in budget._together())
        least = min(smallest, key=budget.left)
        if (num := budget.left(least)) > limit:
            how = _in_words(least) or "nothing else can leave"
            raise ValueError(f"parameters: {limit:,} cannot be met; the least possible is {num:,} ({how})")
        return budget

    def left(self, chosen: Mapping[str, int | float]) -> int:
        """Return how many parameters are left."""
        inside = self.num_inside
        for kind, size in chosen.items():
            if removed := self.options[kind][size]:
                inside = [num - gone for num, gone in zip(inside, removed, strict=True)]
        return self.num_outside + sum(heapq.nlargest(int(chosen.get("layers", self.num_layers)), inside))

    def removed(self, chosen: Mapping[str, int | float]) -> int:
        """Return how many parameters leave if ``chosen`` stay, of the other kinds what is said."""
        return self.left({}) - self.left(chosen)

    def is_met(self, chosen: Mapping[str, int | float]) -> bool:
        """Return whether at most ``limit`` parameters are left."""
        return self.left(chosen) <= self.limit

    def mixes(self) -> Iterator[Chosen]:
        """Yield sizes that meet the limit: of each combination of all kinds but the one with the most sizes, with the
        most that can stay of that one.
        """
        for kinds in self._together():
            filled = max(kinds, key=lambda kind: len(self.options[kind]), default="")
            others = [kind for kind in kinds if kind != filled]
            for sizes in itertools.product(*([None, *self.options[kind]] for kind in others)):
                mix = {kind: size for kind, size in zip(others, sizes, strict=True) if size is not None}
                falling = [mix, *({**mix, filled: size} for size in self.options.get(filled, ()))]
                first = bisect_left(falling, True, key=self.is_met)
                if first < len(falling):
                    yield falling[first]

    def _together(self) -> Iterator[list[str]]:
        """Yield the kinds that can leave together: heads or KV groups, not both."""
        for out in sorted(_EXCLUSIVE) if self.options.keys() >= _EXCLUSIVE else [""]:
            yield [kind for kind in self.options if kind != out]


def _options(
    model: nn.Module, kind: UnitKind, places: Sequence[Units], sizes: Sizes, num_inside: Sequence[int]
) -> dict[int | float, Sequence[int]]:
    """Return the sizes that ``kind`` can have in this layout, and how many parameters of each block they remove.

    Numbers; where places have unequal numbers, shares. An MLP width is a multiple of 16, as far as the one before is.
    """
    common = math.gcd(*(units.num_units // units.num_groups for units in places))
    nums, step = list({units.num_units for units in places}), step_of(model, kind)
    if kind == "mlp" and len(nums) == 1:
        step = math.lcm(step, math.gcd(_EVEN, *nums))
    parts: dict[int | float, int] = {}  # by size, of ``common``
    for part in range(common - 1, 0, -1):
        kept = [num * part // common for num in nums]
        if all(num % step == 0 for num in kept):
            parts[kept[0] if len(nums) == 1 else part / common] = part
    if kind == "mlp":  # all or none
        parts = parts if parts and _is_possible(Sizes(mlp=next(iter(parts))).check, model) else {}
    else:
        parts = {size: part for size, part in parts.items() if _is_possible(Sizes(**{kind: size}).check, model)}
    if not parts:
        return {}
    least, part = [*parts.items()][-1]
    num_left = _block_numels(model, replace(sizes, **{kind: least}))
    of_a_part = [(num - left) // (common - part) for num, left in zip(num_inside, num_left, strict=True)]
    return {size: [(common - part) * num for num in of_a_part] for size, part in parts.items()}


def _block_numels(model: nn.Module, sizes: Sizes) -> list[int]:
    """Return how many parameters each block has at ``sizes``."""
    shapes = cut_shapes(model, select_units(model, sizes.some_units(model))[0])
    return [
        sum(math.prod(shapes[f"{name}.{path}"]) for path, _ in block.named_parameters())
        for name, block in decoder_blocks(model)
    ]
