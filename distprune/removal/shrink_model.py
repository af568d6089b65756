"""A smaller model in memory: what stays is chosen, what reads the rest refitted, and parameters cut where they lie."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.catch_inputs import Progress
from distprune.calibration.own_words import samples_of
from distprune.calibration.token_ids import TokenIds, as_windows
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.formatting import count, one_line
from distprune.hints import with_hints
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import count_parameters
from distprune.models.units import UNIT_KINDS, UnitKind, find_units
from distprune.oneshot.plan import check_predicts, check_samples
from distprune.oneshot.recipe import TargetsOf, chosen
from distprune.oneshot.report import BlockReport, OneShotReport
from distprune.removal.choose_units import check_biases, choose_units, resolved_refit
from distprune.removal.criteria import Criterion, CriterionName, criterion_of
from distprune.removal.experts import ExpertCriterion, choose_experts
from distprune.removal.layers import LayerCriterion, order_layers
from distprune.removal.readers import find_readers
from distprune.removal.rebuild import Kept, check_layers, remove_layers, remove_units
from distprune.removal.remover import Refit
from distprune.removal.sizes import Budget, Sizes
from distprune.removal.trials import Division, Recall, divide_budget


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
        units = dict.fromkeys(f"{kind.replace('_', ' ')} {len(index):,}" for (_, kind, _), index in self.kept.items())
        return (
            f"{count(self.num_parameters)} of {count(self.num_parameters_before)} parameters are left\n"
            f"  {', '.join([f'{len(self.layers)} layers', *units])}\n" + textwrap.indent(str(self.report), "  ")
        )


class BlockRecords(Protocol):
    """Blocks of a job: read back if they are done, and written with what stays of each."""

    def finished(self, index: int) -> bool: ...
    def on_block(self, index: int, report: BlockReport, **more: Any) -> None: ...
    def reports(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class ShrinkHooks:
    """What goes on around :func:`shrink_model`; by default nothing. Every rank calls all of it.

    ``recall`` returns what was made under a name before the job was killed. ``say`` is told what was found out, and
    ``stage``, a context, of which part (key, name, unit) it is. ``blocks`` makes the records of the layers that stay.
    ``budget``: of the sizes, where they were checked before.
    """

    recall: Recall = lambda _, make: make()
    say: Callable[[str], object] = lambda _: None
    stage: Callable[[str, str, str], AbstractContextManager[Progress]] = lambda *_: nullcontext()
    blocks: Callable[[nn.Module, Sequence[int]], BlockRecords] | None = None
    budget: Budget | None = None


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
    job: ShrinkHooks | None = None,
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
            all. Nothing makes up for experts: they leave first, and targets are of the model without them.
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
        job: what goes on around it, in a job that can be killed and go on.

    Every rank of ``group`` must call it, with equal arguments. Nothing is gathered. Rounds: those of
    ``choose_experts``, ``order_layers``, ``choose_units``, ``remove_layers`` and ``remove_units``, and with
    ``parameters`` of ``divide_budget``.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: sizes that are not possible, a budget that cannot be
            met, units that cannot be removed, samples that do not fit, and what the walk meets. But for the last, and
            for layers that are chosen and cannot leave when experts have left already, nothing is changed.
    """
    comm, job = communicator(group), job or ShrinkHooks()
    model = getattr(model, "_orig_mod", model)  # of torch.compile, which sees that what it wraps has changed
    sizes = Sizes(mlp=mlp, heads=heads, kv_groups=kv_groups, experts=experts, layers=layers, parameters=parameters)
    with together(comm, **vars(sizes), samples=isinstance(samples, str)):
        budget = job.budget or sizes.check(model)
        fitted, _ = resolved_refit(refit, targets, target_share)
        criterion = criterion_of(criterion)
        chosen("layer_criterion", layer_criterion, LayerCriterion)
        chosen("expert_criterion", expert_criterion, ExpertCriterion)
        said = {*sizes.of_units, *(budget.options if budget else ())} - {"experts"}
        for kind in (kind for kind in UNIT_KINDS if fitted == "bias" and kind in said):
            check_biases(find_readers(model, {kind: 1.0}, None, heals=False).asked, fitted)
    samples = samples_of(comm, model, samples)
    with together(comm):
        token_ids = as_windows(samples)
        check_samples(model, token_ids)
        if budget is not None and min(token_ids.shape) < 2:
            raise ValueError(
                "parameters: what leaves is said by held-out samples: 2 of 2 tokens are the least, not "
                f"{tuple(token_ids.shape)}"
            )
        if layers is not None and layer_criterion == "loss":
            check_predicts(token_ids)
        num_all, num_parameters_before = len(decoder_blocks(model)), count_parameters(model)
    walked: dict[str, Any] = {"group": comm, "offload": offload, "batch_tokens": batch_tokens}
    how: dict[str, Any] = {"criterion": criterion, "targets": targets, "target_share": target_share, **walked}
    order: Callable[..., list[int]] = partial(order_layers, model, token_ids, criterion=layer_criterion, **walked)
    experts_left: dict[str, list[Entry]] = {}
    if experts is not None:  # which cannot be zeroed

        def rank_experts() -> dict[str, list[Entry]]:
            with job.stage("choose", "choosing experts", ""):
                chosen = choose_experts(model, token_ids, experts, criterion=expert_criterion, **walked)
            return _entries(model, chosen)

        experts_left = job.recall("experts", rank_experts)
        with together(comm):
            chosen_experts = _kept(experts_left)
        remove_units(model, chosen_experts, group=comm)
    division = Division(sizes)
    if budget is not None:
        # A fit of whole blocks would change all weights.
        trying = partial(choose_units, model, refit="least_squares" if fitted == "block" else fitted, **how)
        with job.stage("divide", "trying sizes", ""):
            division = divide_budget(
                model, token_ids, sizes, budget, trying, order, recall=job.recall, say=job.say, group=comm
            )
        job.say(f"sizes: {division.sizes}")
    sizes = division.sizes

    def rank_layers() -> list[int]:
        num_layers, gone = sizes.num_layers(model), list[int]()
        if num_layers < num_all:
            with job.stage("choose", "choosing layers", "layers") as progress:
                gone = order(num_layers, known=division.layers_gone, progress=progress)
        chosen = [layer for layer in range(num_all) if layer not in gone]
        with together(comm):
            if gone:
                _check_chosen(model, chosen)
        return chosen

    left = job.recall("layers", rank_layers)
    if len(left) < num_all:
        job.say(f"layers that stay: {_as_text(left)}")
    blocks = None if job.blocks is None else job.blocks(model, left)
    entries: dict[str, list[Entry]] = {}

    def on_block(index: int, report: BlockReport, stays: Kept) -> None:
        entries[report.name] = experts_left.get(report.name, []) + _entries(model, stays).get(report.name, [])
        if blocks is not None:
            blocks.on_block(index, report, kept=entries[report.name])

    with job.stage("shrink", "shrinking block by block", ""):
        removal = choose_units(
            model,
            token_ids,
            {kind: size for kind, size in sizes.of_units.items() if kind != "experts"},
            layers=left,
            refit=refit,
            finished=None if blocks is None else blocks.finished,
            on_block=on_block,
            **how,
        )
        with together(comm):
            for block in () if blocks is None else blocks.reports():  # with those that were restored
                entries[block["name"]] = block["kept"]
            kept = _kept(entries)
        cut_model(model, {key: index for key, index in kept.items() if key[1] != "experts"}, left, group=comm)
    return Shrunk(
        kept,
        tuple(left),
        count_parameters(model),
        num_parameters_before,
        removal.report,
        None if budget is None else division,
    )


def _check_chosen(model: nn.Module, layers: Sequence[int]) -> None:
    """Check that ``layers``, the best ones, can stay alone, before any work is done for it; raises as check_layers."""
    try:
        check_layers(model, layers)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(
            f"layers {_as_text(layers)} were chosen to stay, and the model cannot be without the others: {error}; take "
            "another number of layers or another layer_criterion, or remove other units"
        ) from error


Entry = dict[str, Any]  # the units of one place that stay, as records and reports have them: as ranges


def _entries(model: nn.Module, kept: Kept) -> dict[str, list[Entry]]:
    """Return what stays of each block of ``model``, which is not cut yet, by its name."""
    nums = {  # before, by place
        (block, kind): {units.name: units.num_units for units in find_units(model.get_submodule(block), kind)}
        for block, kind in dict.fromkeys((block, kind) for block, kind, _ in kept)
    }
    entries: dict[str, list[Entry]] = {}
    for (block, kind, place), units in kept.items():
        entry = {"kind": kind, "place": place, "num_before": nums[block, kind][place], "num": len(units)}
        entries.setdefault(block, []).append({**entry, "units": _as_text(units.tolist())})
    return entries


def _kept(entries: Mapping[str, Iterable[Entry]]) -> Kept:
    """Return what stays, of what :func:`_entries` returned."""
    kept: dict[tuple[str, UnitKind, str], torch.Tensor] = {}
    for block, entry in ((block, entry) for block, of_block in entries.items() for entry in of_block):
        units = torch.tensor([*_from_text(entry["units"])], dtype=torch.int64, device="cpu")
        kept[block, entry["kind"], entry["place"]] = units
    return kept


def _as_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``"0-4,7"``."""
    # Within a run a number and its position differ by the same.
    runs = (list(run) for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


def _from_text(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


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
