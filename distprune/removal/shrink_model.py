"""A smaller model in memory: what stays is chosen, what reads the rest refitted, and parameters cut where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.own_words import samples_of
from distprune.calibration.token_ids import TokenIds, as_windows
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.formatting import count, one_line
from distprune.hints import with_hints
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import count_parameters
from distprune.models.units import UnitKind
from distprune.oneshot.recipe import TargetsOf
from distprune.oneshot.report import OneShotReport
from distprune.removal.choose_units import Removal, choose_units, refit_in_trials
from distprune.removal.criteria import Criterion, CriterionName
from distprune.removal.experts import ExpertCriterion, choose_experts
from distprune.removal.layers import LayerCriterion, order_layers
from distprune.removal.plan import Kept
from distprune.removal.rebuild import remove_layers, remove_units
from distprune.removal.remover import Refit
from distprune.removal.sizes import Sizes
from distprune.removal.trials import Division, divide_budget, find_budget


@dataclass(frozen=True)
class Shrunk:
    """What is left of a model: the same on every rank.

    >>> shrunk = shrink_model(llama, samples, layers=1)
    >>> len(shrunk.layers), shrunk.num_parameters < shrunk.num_parameters_before
    (1, True)

    ``kept``: by block, kind and place the units that stay, ascending; blocks have the names they had before, and
    ``layers`` are their numbers. ``report``: of the walk. ``division``: of a budget, what it came to.
    """

    kept: Kept
    layers: tuple[int, ...]
    num_parameters: int
    num_parameters_before: int
    report: OneShotReport
    division: Division | None = None

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{count(self.num_parameters)} of {count(self.num_parameters_before)} parameters left")

    @override
    def __str__(self) -> str:
        """Return what is left, and the report of the walk, in at most 15 lines."""
        sizes: dict[UnitKind, set[int]] = {}
        for (_, kind, _), stays in self.kept.items():
            sizes.setdefault(kind, set()).add(len(stays))
        left = [f"{len(self.layers)} layers", *(f"{kind.replace('_', ' ')} {_range(of)}" for kind, of in sizes.items())]
        lines = [
            f"{count(self.num_parameters)} of {count(self.num_parameters_before)} parameters are left",
            f"  {', '.join(left)}",
            *(f"  {line}" for line in str(self.report).splitlines()),
        ]
        return "\n".join(lines)


@with_hints
def shrink_model(
    model: nn.Module,
    samples: TokenIds | Literal["self"],
    *,
    mlp: int | float | None = None,
    heads: int | float | None = None,
    kv_groups: int | float | None = None,
    experts: int | float | None = None,
    layers: int | float | None = None,
    parameters: int | float | None = None,
    criterion: CriterionName | Criterion = "obs",
    layer_criterion: LayerCriterion = "loss",
    expert_criterion: ExpertCriterion = "output",
    targets: TargetsOf | None = None,
    target_share: float | None = None,
    refit: Refit | None = None,
    group: Group = None,
    offload: bool = False,
    batch_tokens: int | None = None,
) -> Shrunk:
    """Make ``model`` smaller in place, in the layout it is in, and return what is left of it.

    >>> shrunk = shrink_model(llama, samples, mlp=0.5)
    >>> shrunk.num_parameters < shrunk.num_parameters_before
    True

    Its class stays, its configuration says the new sizes, and ``forward`` and ``generate`` work. Parameters are new
    ones: make the optimizer afterwards.

    Args:
        model: of transformers; layouts as for :func:`distprune.prune_blocks`.
        samples: as of :func:`distprune.prune_blocks`: token ids, or ``"self"``.
        mlp, heads, kv_groups, experts, layers: how many stay in each place, or as a float which share: MLP channels,
            query heads (as many of each KV group), KV groups with their query heads, experts, decoder layers. ``None``:
            all.
        parameters: at most as many stay of all parameters of the model, or as a float which share. The kinds of which
            nothing is said leave as it costs least, by trials on held-out samples; never experts. See ``Budget``.
        criterion: how units are chosen: ``"obs"``, ``"taylor"``, ``"fluctuation"`` (FLAP), ``"activation"``
            (Minitron), ``"magnitude"``, or a criterion of one's own.
        layer_criterion: how layers are chosen: ``"loss"`` or ``"influence"``; see ``order_layers``.
        expert_criterion: how experts are chosen: by their ``"output"`` or by ``"usage"``; see ``choose_experts``.
        targets, target_share: as of :func:`distprune.prune_blocks`. Default: ``"own"`` for query heads, and where
            ``refit`` is ``"bias"`` or ``"none"``; else ``"dense"``.
        refit: ``"least_squares"``: what reads the units is fitted to what it put out before; ``"block"``, the default
            unless targets are ``"own"``: then each block as a whole to what the dense model puts out behind it, but not
            in trials of ``parameters``; ``"bias"`` alone, where it has one; or ``"none"``.
        group, offload, batch_tokens: as of :func:`distprune.prune_blocks`.

    Every rank of ``group`` must call it, with equal arguments. Nothing is gathered. Rounds: those of
    ``choose_experts``, ``order_layers``, ``choose_units``, ``remove_layers`` and ``remove_units``, and with
    ``parameters`` of ``divide_budget``.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: sizes that are not possible, a budget that cannot be
            met, units that cannot be removed, samples that do not fit, and what the walk meets; but for the last,
            nothing is changed.
    """
    comm = communicator(group)
    sizes = Sizes(mlp=mlp, heads=heads, kv_groups=kv_groups, experts=experts, layers=layers, parameters=parameters)
    with together(comm, **vars(sizes), samples=isinstance(samples, str)):
        sizes.check(model)
    samples = samples_of(comm, model, samples)
    with together(comm):
        token_ids = as_windows(samples)
        budget = find_budget(model, token_ids, sizes)
        num_all, num_parameters_before = len(decoder_blocks(model)), count_parameters(model)
    kept: dict[tuple[str, UnitKind, str], torch.Tensor] = {}
    walked: dict[str, Any] = {"group": comm, "offload": offload, "batch_tokens": batch_tokens}
    if experts is not None:  # which cannot be zeroed
        kept |= choose_experts(model, token_ids, experts, criterion=expert_criterion, **walked)
        remove_units(model, kept, group=comm)
    choose: Callable[..., Removal] = partial(
        choose_units,
        model,
        criterion=criterion,
        refit=refit,
        targets=targets,
        target_share=target_share,
        **walked,
    )
    division = None
    if budget is not None:
        trying = partial(choose, refit=refit_in_trials(refit, targets))
        division = divide_budget(model, token_ids, sizes, budget, trying, layer_criterion=layer_criterion, **walked)
        sizes = division.sizes
    left = list(range(num_all))
    if (num_layers := sizes.num_layers(model)) < num_all:
        known = division.layers_gone if division else ()
        order = order_layers(model, token_ids, num_layers, criterion=layer_criterion, known=known, **walked)
        left = [layer for layer in left if layer not in order]
    removal = choose(token_ids, sizes.in_walk, layers=left)
    blocks = decoder_blocks(model)
    kept = {key: index for key, index in kept.items() if key[0] in {blocks[layer][0] for layer in left}}
    cut_model(model, removal.kept, left, group=comm)
    num_parameters = count_parameters(model)
    units = kept | dict(removal.kept)
    return Shrunk(units, removal.layers, num_parameters, num_parameters_before, removal.report, division)


def _range(sizes: set[int]) -> str:
    """Return one size, or the least and the most."""
    return f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"


def cut_model(model: nn.Module, kept: Kept, layers: Sequence[int], *, group: Group = None) -> None:
    """Remove all layers but ``layers`` from ``model``, and from those all units but ``kept``, in place.

    ``kept`` names blocks as they are before. Every rank must call it: as :func:`remove_layers` and
    :func:`remove_units`, which raise.
    """
    before = [name for name, _ in decoder_blocks(model)]
    if len(layers) < len(before):
        remove_layers(model, layers, group=group)
    names = dict(zip((before[index] for index in layers), (name for name, _ in decoder_blocks(model)), strict=True))
    if renamed := {(names[block], kind, place): index for (block, kind, place), index in kept.items()}:
        remove_units(model, renamed, group=group)
