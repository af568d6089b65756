"""Which units of a decoder go, block after block, and what reads them, refitted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from distprune.calibration.data import tokens_together
from distprune.calibration.moments import Moments
from distprune.calibration.sensitivity import measure_sensitivities
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.models.find_shards import Found
from distprune.models.units import UnitKind
from distprune.oneshot.block import Finished, run_blocks
from distprune.oneshot.driver import Clock, prune_rows
from distprune.oneshot.plan import WalkPlan, blocks_to_walk, check_samples
from distprune.oneshot.prune_blocks import without_nans
from distprune.oneshot.recipe import Recipe, TargetsOf, check_can_fit, chosen, fits_by_default, share_of_targets
from distprune.oneshot.report import BlockReport, LayerReport, Meter, OneShotReport
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import Rows
from distprune.patterns.unstructured import Unstructured
from distprune.pruning.agreement import agreeing
from distprune.removal.criteria import Criterion, CriterionName, criterion_of
from distprune.removal.readers import Asked, find_norms, find_readers
from distprune.removal.rebuild import Kept
from distprune.removal.remover import Refit, UnitRemover
from distprune.shards.geometry import indices_of
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import cut
from distprune.shards.parts import check_parts

OnBlockUnits = Callable[[int, BlockReport, Kept], None]


def resolved_refit(
    refit: Refit | None, targets: TargetsOf | None, target_share: float | None = None
) -> tuple[Refit, float]:
    """Return how what stays is fitted, and the share of the way to dense targets. Local.

    By default each block is fitted as a whole where targets are dense, which they are where weights are fitted at all.

    Raises:
        ValueError, TypeError: no such refit, targets or share, or such that do not go together.
    """
    refit = chosen("refit", refit or ("block" if fits_by_default(targets or "dense") else "least_squares"), Refit)
    targets = targets or ("dense" if refit in ("block", "least_squares") else "own")
    if refit == "block":
        check_can_fit(targets)
    return refit, share_of_targets(targets, target_share)


def check_biases(asked: Mapping[str, Asked], refit: Refit) -> None:
    """Raise a ValueError if ``refit`` needs biases, and one of ``asked`` has none. Local."""
    if refit == "bias" and (without := [name for name, one in asked.items() if one.linear.bias is None]):
        raise ValueError(f"refit='bias' needs biases, and {without[0]!r} has none; use 'least_squares' or 'none'")


@dataclass(frozen=True)
class Removal:
    """What is left: ``kept`` units by block, kind and place; the same on every rank."""

    kept: Kept
    report: OneShotReport


def choose_units(
    model: nn.Module,
    samples: torch.Tensor,
    keep: Mapping[UnitKind, int | float],
    *,
    layers: Sequence[int] | None = None,
    criterion: CriterionName | Criterion = "obs",
    refit: Refit | None = None,
    targets: TargetsOf | None = None,
    target_share: float | None = None,
    group: Group = None,
    offload: bool = False,
    batch_tokens: int | None = None,
    finished: Finished | None = None,
    on_block: OnBlockUnits | None = None,
) -> Removal:
    """Choose the units that stay in each decoder block of ``model``, zero what reads the others, and return which stay.

    Nothing gets smaller here: the columns of the linear layers that read units (down, o) become zero where units go,
    and the columns that stay are refitted, so that the model puts out what it will once they are cut. Blocks are
    walked, and linear layers of a block pruned in turn, as by :func:`distprune.prune_blocks`, whose statistics these
    are.

    Args:
        model, samples, group, offload, batch_tokens, finished: as of ``prune_blocks``. Restored blocks are missing
            from the result.
        keep: by kind, how many units stay in each place, or which share of them: ``"mlp"`` channels, query ``"heads"``
            (as many of each KV group), ``"kv_groups"`` with their query heads. Empty: only layers go.
        layers: the decoder layers that stay, ascending; the others are passed over. With dense targets the last linear
            layer of the layer before a gap is fitted to what the dense model is behind the gap.
        criterion: ``"obs"``, ``"taylor"``, ``"fluctuation"`` (FLAP), ``"activation"`` (Minitron), ``"magnitude"``, or
            a :class:`Criterion` of one's own.
        refit: ``"least_squares"``; ``"block"``, the default unless targets are ``"own"``: then each block is fitted as
            a whole to what the dense model puts out behind it, all its linear layers, norms and biases (see
            ``oneshot.block_fit``); ``"bias"``, where linear layers have biases: those alone make up for the mean of
            what goes (FLAP); or ``"none"``.
        targets, target_share: as of ``prune_blocks``; default ``"own"`` for query heads, and with ``"bias"`` and
            ``"none"``, else ``"dense"``. (Heads that are to make up for all that was lost before may undo the
            first token's large activations, by which a model tells that there is nothing to attend to: SmolLM2-135M
            lost by it with two of three samples of calibration text.)
        on_block: called after each block with its number, its report, and which of its units stay.

    Every rank of ``group`` must call it, with equal arguments. Units are the same at any number of ranks, and weights,
    but for rounding. In memory: as ``prune_blocks``, and of the inputs that a rank is owner to twice X^T X in float64.
    Rounds: those of ``prune_blocks``; for each linear layer 1 more, and 2 of the units that stay; 2 where it has a
    bias.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, nothing changed: what ``prune_blocks`` refuses; more
            units than are there, or not as many in each group; two kinds that the same linear layer reads; units that
            cannot be removed, by name; a linear layer without a bias for ``"bias"``. With the blocks before changed:
            statistics or scores that are NaN, by block and linear layer; a linear layer that no token reached.
    """
    comm = communicator(group)
    meter = Meter(comm)
    with agreeing(comm) as agreed:
        criterion = criterion_of(criterion)
        refit, share = resolved_refit(refit, targets, target_share)
        check_samples(model, samples)
        blocks = blocks_to_walk(model)
        readers = find_readers(model, keep, layers, heals=share > 0)
        for index, (name, _) in enumerate(blocks) if share > 0 else ():
            if index + 1 in readers.skipped and index not in readers.skipped | readers.healed.keys():
                why = "has no one linear layer that could make up for the layers that go behind it"
                warnings.warn(f"block {name!r} {why}", stacklevel=2)
        asked = readers.asked
        check_biases(asked, refit)
        heads = [name for name, one in asked.items() if one.units.kind == "heads" and targets is None]
        if refit != "block" and len(heads) == len(asked):
            share = 0.0  # nothing needs the dense stream
        recipe = Recipe(
            sequential="layer", target_share=share, refit="block" if refit == "block" else "none", permute="none"
        )
        names = [f"{one.block}.{one.linear.parameter_path}" for one in asked.values()]
        if "norms" in criterion.needs:
            names += [f"{one.block}.{cut.parameter}" for one in asked.values() for cut in one.units.cuts]
        shards = [local_shard(name, model.get_parameter(name)) for name in dict.fromkeys(names)]
        agreed.found = Found(shards, has_blocks=True)
        tokens_together(model, batch_tokens)
        which = {*heads}, readers.skipped, readers.healed
        plan = WalkPlan(samples, recipe, readers.linears, shards, offload, batch_tokens, *which)
        agreed.facts = plan.facts | {
            "keep": repr(sorted(keep.items())),
            "layers": repr(None if layers is None else list(layers)),
            "criterion": criterion.name,
            "refit": refit,
            "finished": repr(finished is not None),
        }
    plan = replace(plan, shards=agreed.shards())
    check_parts(comm, agreed.roster, lambda: without_nans(plan.shards))
    if "norms" in criterion.needs and asked:
        find_norms(comm, asked.values(), {shard.name: shard for shard in plan.shards})
    if "gradients" in criterion.needs and asked:
        linears = {name: one.linear for name, one in asked.items()}
        sensitivities = measure_sensitivities(comm, model, linears, samples, batch_tokens=batch_tokens)
        for name, one in asked.items():
            one.gradients = sensitivities[name].outputs
    stays: dict[str, list[int]] = {}  # by reader
    kept: dict[tuple[str, UnitKind, str], torch.Tensor] = {}

    def remove(
        comm: Communicator, rows: Mapping[str, Rows], moments: list[Moments], clock: Clock, aim: Aim
    ) -> dict[str, LayerReport]:
        remover = UnitRemover({layer.name: asked[layer.name] for layer in rows.values()}, criterion, refit)
        reports = prune_rows(comm, rows, moments, clock, aim, solver=remover, pattern=Unstructured(0.0))
        for told in comm.gather(remover.kept):
            stays.update(told)
        _shift_biases(comm, remover)
        return reports

    def call_back(index: int, report: BlockReport) -> None:
        of_block: dict[tuple[str, UnitKind, str], torch.Tensor] = {}
        for name, one in asked.items():
            if one.block == report.name and one.units.kind in keep:
                if name not in stays:
                    raise ValueError(f"no token reached {name!r}: which of its units matter is not known")
                units = torch.tensor(stays[name], dtype=torch.int64, device="cpu")
                of_block[one.block, one.units.kind, one.units.name] = units
        kept.update(of_block)
        if on_block is not None:
            on_block(index, report, of_block)

    report = run_blocks(
        meter,
        model,
        plan,
        remove,
        finished=finished,
        on_block=call_back,
        method=criterion.name,
        pattern=", ".join(f"{kind} {share}" for kind, share in keep.items()),
        seed=None,
        other_blocks=(),
    )
    return Removal(kept, report)


def _shift_biases(comm: Communicator, remover: UnitRemover) -> None:
    """Add to biases what they gain by what ``remover`` did: they take up the mean of what went.

    Biases keep their layouts. Only the owner's offsets of a row count. Every rank must call it: a round of 8 bytes for
    each output, and one of 64.
    """
    biases = {name: one.linear.bias for name, one in remover.asked.items() if remover.shifts_bias(one)}
    if not biases:
        return
    sizes = [remover.asked[name].linear.num_out for name in biases]

    def fill(words: torch.Tensor) -> None:
        for name, part in zip(biases, torch.split(words, sizes), strict=True):
            if name in remover.offsets and (rows := remover.offsets[name][0]).owned:
                part[indices_of(rows.runs)] = remover.offsets[name][1].double().cpu()

    total = sum_together(comm, (sum(sizes),), fill, torch.float64)
    with together(comm):
        for (name, bias), gained in zip(biases.items(), torch.split(total, sizes), strict=True):
            assert bias is not None
            shard = local_shard(f"{name}.bias", bias.detach())
            gain = cut(gained, shard.geometry).to(shard.local.device)
            shard.local.copy_((shard.local.double() + gain).view_as(shard.local))
