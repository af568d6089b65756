"""A budget of parameters: which sizes meet it, and which of those cost least. No communication.

A budget is divided over the kinds of which it is not said how much stays: MLP channels, query heads or KV groups (one
of the two: the same linear layer reads them) and decoder layers. What several cost is expected to be the sum of what
each does.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.units import UNIT_KINDS, UnitKind, Units, find_all_units
from distprune.removal.plan import step_of
from distprune.removal.readers import num_to_keep
from distprune.removal.rebuild import check_layers
from distprune.removal.sizes import Sizes

_EVEN = 16  # MLP widths are multiples of it, as far as those before are: matrix products are faster


class _BlockCounts:
    """Counts the parameters of each decoder block, of whatever sizes."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[UnitKind, list[tuple[str, list[Units]]]] = {}
        for kind in UNIT_KINDS:
            with suppress(NotImplementedError):
                self.found[kind] = find_all_units(model, kind)
        self._shapes = [{name: p.shape for name, p in block.named_parameters()} for _, block in decoder_blocks(model)]
        self._cuts = {  # by kind and block; each slice of 3-D weights gets as small as the others
            kind: [
                {(cut.parameter, cut.dim): (units, cut.index.shape[1]) for units in of_block for cut in units.cuts}
                for _, of_block in found
            ]
            for kind, found in self.found.items()
        }

    def num_units(self, kind: UnitKind) -> list[int]:
        """Return how many units each place has."""
        return [units.num_units for _, of_block in self.found[kind] for units in of_block]

    def numels(self, sizes: Mapping[UnitKind, int | float]) -> list[int]:
        """Return how many parameters each block has when ``sizes`` stay, of other kinds all."""
        left = [{name: list(shape) for name, shape in block.items()} for block in self._shapes]
        for kind, size in sizes.items():
            for block, cuts in zip(left, self._cuts[kind], strict=True):
                for (name, dim), (units, width) in cuts.items():
                    if name in block:  # no buffer
                        block[name][dim] -= (units.num_units - num_to_keep(units, size, units.name)) * width
        return [sum(map(math.prod, block.values())) for block in left]


def _possible_sizes(model: nn.Module, kind: UnitKind, found: list[tuple[str, list[Units]]]) -> list[int | float]:
    """Return the sizes that the units ``found`` of ``kind`` can have in this layout, from the most to the least.

    Numbers; where places have unequal numbers, shares. An MLP width is a multiple of 16, as far as the one before is.
    """
    places = [units for _, of_block in found for units in of_block]
    common = math.gcd(*(units.num_units // units.num_groups for units in places))
    nums, step = list({units.num_units for units in places}), step_of(model, found)
    if kind == "mlp" and len(nums) == 1:
        step = math.lcm(step, math.gcd(_EVEN, *nums))
    sizes: list[int | float] = []
    for part in range(common - 1, 0, -1):
        kept = [num * part // common for num in nums]
        if all(num % step == 0 for num in kept):
            sizes.append(kept[0] if len(nums) == 1 else part / common)
    if kind == "mlp":  # all or none
        return sizes if sizes and _is_possible(Sizes(mlp=sizes[0]).check, model) else []
    return [size for size in sizes if _is_possible(Sizes(**{kind: size}).check, model)]


def _is_possible(check: Callable[..., object], *args: object) -> bool:
    try:
        check(*args)
    except (ValueError, NotImplementedError):
        return False
    return True


Chosen = dict[str, int | float]  # what stays, by kind; of the others all

_EXCLUSIVE = {"heads", "kv_groups"}
_LEAST = 1e-3  # a cost, in log-perplexity: no measurement tells less from nothing
_POWER = 1.5  # of a cost in the number of parameters, as long as it is known of one number alone
_POWERS = (1.0, 2.5)  # the least and the greatest


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
        num_all = sum(parameter.numel() for parameter in model.parameters())
        limit = int(sizes.parameters * num_all) if isinstance(sizes.parameters, float) else sizes.parameters
        if limit >= num_all:
            raise ValueError(f"parameters: the model has {num_all:,}, not more than {limit:,}: there is none to remove")
        counts, said, num_layers = _BlockCounts(model), sizes.of_units, sizes.num_layers(model)
        inside, options = counts.numels(said), dict[str, dict[int | float, Sequence[int]]]()
        for kind, found in counts.found.items():
            is_out = kind in {*said, "experts"} or (kind in _EXCLUSIVE and _EXCLUSIVE & said.keys())
            if kind == "kv_groups" and "heads" in options and counts.num_units("heads") == counts.num_units(kind):
                is_out = True  # of one head each: they are the heads
            for size in _possible_sizes(model, kind, found) if not is_out else ():
                left = counts.numels({**said, kind: size})
                options.setdefault(kind, {})[size] = [a - b for a, b in zip(inside, left, strict=True)]
        # Whichever leave: the first one is tried.
        if sizes.layers is None and num_layers > 1 and _is_possible(check_layers, model, range(1, num_layers)):
            options["layers"] = dict.fromkeys(range(num_layers - 1, 0, -1), ())
        budget = cls(limit, num_all - sum(counts.numels({})), inside, num_layers, options)
        smallest = ({kind: [*options[kind]][-1] for kind in kinds} for kinds in budget._together())
        least = min(smallest, key=budget.left)
        if (num := budget.left(least)) > limit:
            how = ", ".join(f"{kind} {size}" for kind, size in least.items()) or "nothing else can leave"
            raise ValueError(f"parameters: {limit:,} cannot be met; the least possible is {num:,} ({how})")
        return budget

    def left(self, chosen: Mapping[str, int | float]) -> int:
        """Return how many parameters are left."""
        inside = self._inside(chosen)
        return self.num_outside + sum(heapq.nlargest(int(chosen.get("layers", self.num_layers)), inside))

    def removed(self, kind: str, size: int | float) -> int:
        """Return how many parameters leave if ``size`` of ``kind`` stays, of the other kinds what is said."""
        return self.left({}) - self.left({kind: size})

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

    def is_met(self, chosen: Mapping[str, int | float]) -> bool:
        """Return whether at most ``limit`` parameters are left."""
        return self.left(chosen) <= self.limit

    def _inside(self, chosen: Mapping[str, int | float]) -> Sequence[int]:
        """Return how many parameters are left in each block."""
        inside = self.num_inside
        for kind, size in chosen.items():
            if removed := self.options[kind][size]:
                inside = [num - gone for num, gone in zip(inside, removed, strict=True)]
        return inside

    def _together(self) -> Iterator[list[str]]:
        """Yield the kinds that can leave together: heads or KV groups, not both."""
        for out in sorted(_EXCLUSIVE) if self.options.keys() >= _EXCLUSIVE else [""]:
            yield [kind for kind in self.options if kind != out]


def cost_curve(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Return the cost by the number of parameters removed: a power of it, through the last of ``points``.

    ``points``: numbers removed and costs; which power it is, the first and the last say.
    """
    (x, y), *_, (x2, y2) = [(number, max(cost, _LEAST)) for number, cost in sorted(points)] * 2
    power = _POWER if x == x2 else min(max(math.log(y2 / y) / math.log(x2 / x), _POWERS[0]), _POWERS[1])
    return lambda number: y2 * math.pow(number / x2, power)
