"""A budget of parameters: which sizes meet it, and which of those cost least. No communication.

A budget is divided over the kinds of which it is not said how much stays: MLP channels, query heads or KV groups (one
of the two: the same linear layer reads them) and decoder layers. What several cost is expected to be the sum of what
each does.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distprune.models import UNIT_KINDS, UnitKind, Units, decoder_blocks, find_all_units
from distprune.removal.plan import step_of
from distprune.removal.readers import num_to_keep
from distprune.removal.rebuild import check_layers
from distprune.removal.sizes import Sizes

__all__ = ["BlockCounts", "Budget", "Chosen", "KindOptions", "can_lose_layers", "cost_curve", "possible_sizes"]

_EVEN = 16  # MLP widths are multiples of it, as far as those before are: matrix products are faster


class BlockCounts:
    """Counts the parameters of each decoder block, of whatever sizes."""

    def __init__(self, model: nn.Module) -> None:
        self.found = {kind: found for kind in UNIT_KINDS if (found := _find(model, kind))}
        self._blocks: list[list[tuple[torch.Size, dict[tuple[int, UnitKind], tuple[Units, int]]]]] = []
        for index, (_, block) in enumerate(decoder_blocks(model)):
            cuts: dict[str, dict[tuple[int, UnitKind], tuple[Units, int]]] = {}
            for kind, of_kind in self.found.items():
                for units in of_kind[index][1]:
                    for cut in units.cuts:  # each slice of 3-D weights gets as small as the others
                        cuts.setdefault(cut.parameter, {})[cut.dim, kind] = units, cut.index.shape[1]
            self._blocks.append([(p.shape, cuts.get(name, {})) for name, p in block.named_parameters()])

    def num_units(self, kind: UnitKind) -> list[int]:
        """Return how many units each place has."""
        return [units.num_units for _, of in self.found.get(kind, ()) for units in of]

    def numels(self, sizes: Mapping[UnitKind, int | float]) -> list[int]:
        """Return how many parameters each block has when ``sizes`` stay, of other kinds all."""
        return [sum(_numel(*part, sizes) for part in block) for block in self._blocks]


def possible_sizes(model: nn.Module, kind: UnitKind, found: Sequence[tuple[str, Sequence[Units]]]) -> list[int | float]:
    """Return the sizes that the units ``found`` of ``kind`` can have in this layout, from the most to the least.

    Numbers; where places have unequal numbers, shares. An MLP width is a multiple of 16, as far as the one before is.
    """
    step, places = step_of(model, found), [units for _, of in found for units in of]
    common = math.gcd(*(units.num_units // units.num_groups for units in places))
    sizes: list[int | float] = []
    for part in range(common - 1, 0, -1):
        kept = {units.num_units: units.num_units * part // common for units in places}
        even = math.gcd(_EVEN, *kept) if kind == "mlp" and len(kept) == 1 else 1
        if all(num % math.lcm(step, even) == 0 for num in kept.values()):
            sizes.append(next(iter(kept.values())) if len(kept) == 1 else part / common)
    if kind == "mlp":  # all or none
        return sizes if sizes and _is_possible(model, kind, sizes[0]) else []
    return [size for size in sizes if _is_possible(model, kind, size)]


def can_lose_layers(model: nn.Module) -> bool:
    """Return whether a decoder layer of ``model`` can leave, the first one say."""
    try:
        check_layers(model, range(1, len(decoder_blocks(model))))
    except (ValueError, NotImplementedError):
        return False
    return True


def _find(model: nn.Module, kind: UnitKind) -> list[tuple[str, list[Units]]]:
    try:
        return find_all_units(model, kind)
    except NotImplementedError:
        return []


def _is_possible(model: nn.Module, kind: UnitKind, size: int | float) -> bool:
    try:
        Sizes(**{kind: size}).check(model)
    except (ValueError, NotImplementedError):
        return False
    return True


def _numel(
    shape: torch.Size, cuts: Mapping[tuple[int, UnitKind], tuple[Units, int]], sizes: Mapping[UnitKind, int | float]
) -> int:
    left = list(shape)
    for (dim, kind), (units, width) in cuts.items():
        if kind in sizes:
            left[dim] -= (units.num_units - num_to_keep(units, sizes[kind], units.name)) * width
    return math.prod(left)


Chosen = dict[str, int | float]  # what stays, by kind; of the others all

_EXCLUSIVE = {"heads", "kv_groups"}
_LEAST = 1e-3  # a cost, in log-perplexity: no measurement tells less from nothing
_POWER = 1.5  # of a cost in the number of parameters, as long as it is known of one number alone
_POWERS = (1.0, 2.5)  # the least and the greatest


@dataclass(frozen=True)
class KindOptions:
    """The ``sizes`` of a kind, from the most to the least, and how many parameters of each block ``removed`` are."""

    sizes: Sequence[int | float]
    removed: Sequence[Sequence[int]] = ()  # of layers none: blocks leave


@dataclass(frozen=True)
class Budget:
    """At most ``limit`` parameters: ``num_outside`` of the decoder blocks, and ``num_inside`` each at the sizes said.

    ``num_layers`` stay, or as many as one of the ``options``. The smallest blocks are counted as those that leave: the
    limit holds whichever do.
    """

    limit: int
    num_outside: int
    num_inside: Sequence[int]
    num_layers: int
    options: Mapping[str, KindOptions]

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
        counts, said, num_layers = BlockCounts(model), sizes.of_units, sizes.num_layers(model)
        inside, options = counts.numels(said), dict[str, KindOptions]()
        for kind, found in counts.found.items():
            is_out = kind in {*said, "experts"} or (kind in _EXCLUSIVE and _EXCLUSIVE & said.keys())
            if kind == "kv_groups" and "heads" in options and counts.num_units("heads") == counts.num_units(kind):
                is_out = True  # of one head each: they are the heads
            if not is_out and (possible := possible_sizes(model, kind, found)):
                left = [counts.numels({**said, kind: size}) for size in possible]
                options[kind] = KindOptions(possible, [[a - b for a, b in zip(inside, of, strict=True)] for of in left])
        if sizes.layers is None and num_layers > 1 and can_lose_layers(model):
            options["layers"] = KindOptions(range(num_layers - 1, 0, -1))
        budget = cls(limit, num_all - sum(counts.numels({})), inside, num_layers, options)
        least = min(budget._alternatives(lambda sizes: sizes[-1:]), key=budget.left)
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

    def with_size(self, kind: str, size: int | float | None) -> Budget:
        """Return the budget that is left where ``size`` of ``kind`` stays; ``None``: all of it."""
        options = {other: of for other, of in self.options.items() if other != kind}
        if size is None:
            return dataclasses.replace(self, options=options)
        if kind == "layers":
            return dataclasses.replace(self, num_layers=int(size), options=options)
        if kind in _EXCLUSIVE:
            options = {other: of for other, of in options.items() if other not in _EXCLUSIVE}
        return dataclasses.replace(self, num_inside=self._inside({kind: size}), options=options)

    def cheapest(self, cost: Callable[[str, int | float], float]) -> Chosen | None:
        """Return the sizes that meet the limit whose costs have the least sum; of equal ones, those that leave most.

        ``cost`` must not fall where less of a kind stays. ``None``: none meet it.
        """
        # Combinations of all kinds but the one with the most sizes, of which the first that meets the limit is found.
        filled = max(self.options, key=lambda kind: len(self.options[kind].sizes), default="")
        found: list[tuple[float, int, Chosen]] = []
        for chosen in self._alternatives(lambda sizes: [None, *sizes], without=filled):
            falling = [chosen]
            if filled and not {filled, *chosen} >= _EXCLUSIVE:
                falling += [{**chosen, filled: size} for size in self.options[filled].sizes]
            first = bisect_left(falling, True, key=self.is_met)
            for best in falling[first : first + 1]:
                found.append((math.fsum(itertools.starmap(cost, best.items())), -self.left(best), best))
        return min(found, key=lambda of: of[:2])[2] if found else None

    def is_met(self, chosen: Mapping[str, int | float]) -> bool:
        """Return whether at most ``limit`` parameters are left."""
        return self.left(chosen) <= self.limit

    def _inside(self, chosen: Mapping[str, int | float]) -> Sequence[int]:
        """Return how many parameters are left in each block."""
        inside = self.num_inside
        for kind, size in chosen.items():
            if removed := self.options[kind].removed:
                of_size = removed[self.options[kind].sizes.index(size)]
                inside = [num - gone for num, gone in zip(inside, of_size, strict=True)]
        return inside

    def _alternatives(
        self, some: Callable[[Sequence[int | float]], Sequence[int | float | None]], without: str = ""
    ) -> Iterator[Chosen]:
        """Yield the combinations of ``some`` sizes of each kind (``None``: all of it stays) but ``without``."""
        for out in sorted(_EXCLUSIVE) if self.options.keys() >= _EXCLUSIVE else [""]:
            kinds = [kind for kind in self.options if kind not in (without, out)]
            for sizes in itertools.product(*(some(self.options[kind].sizes) for kind in kinds)):
                yield {kind: size for kind, size in zip(kinds, sizes, strict=True) if size is not None}


def cost_curve(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Return the cost by the number of parameters removed: through ``points`` (number, cost), and never falling.

    Between points it is linear; from 0 to the first and behind the last a power of the number, as the first two say.
    """
    ascending = sorted(points)
    costs = itertools.accumulate((max(cost, _LEAST) for _, cost in ascending), max)
    known = [(number, cost) for (number, _), cost in zip(ascending, costs, strict=True)]
    power = _POWER
    if len(known) > 1:
        (x, y), (x2, y2) = known[:2]
        power = min(max(math.log(y2 / y) / math.log(x2 / x), _POWERS[0]), _POWERS[1])

    def cost(number: int) -> float:
        place = bisect_left(known, number, key=lambda of: of[0])
        if 0 < place < len(known):
            (x, y), (x2, y2) = known[place - 1 : place + 1]
            return y + (y2 - y) * (number - x) / (x2 - x)
        x, y = known[min(place, len(known) - 1)]
        return y * math.pow(number / x, power)

    return cost
