"""Which experts of a mixture go: by how many tokens the router sends them, or by what they put out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from distprune.calibration.catch_inputs import visit_blocks
from distprune.calibration.data import device_of, token_digest
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.models.experts import expert_inputs, expert_matrix
from distprune.models.matrices import expert_weights
from distprune.models.units import Units, find_all_units
from distprune.oneshot.plan import blocks_to_walk, check_samples
from distprune.oneshot.recipe import chosen
from distprune.removal.readers import num_to_keep
from distprune.removal.rebuild import Kept
from distprune.shards.device import are_finite

ExpertCriterion = Literal["output", "usage"]
_INDEX, _SHARES = "top_k_index", "top_k_weights"  # of every experts module of transformers 5


def choose_experts(
    model: nn.Module,
    samples: torch.Tensor,
    keep: int | float,
    *,
    criterion: ExpertCriterion = "output",
    group: Group = None,
    offload: bool = False,
    batch_tokens: int | None = None,
) -> Kept:
    """Return which experts stay in each decoder block of ``model``, which is left as it was.

    An expert cannot be zeroed (the router would still choose it): cut those that go before anything else is chosen.

    Args:
        model, samples, group, offload, batch_tokens: as of :func:`distprune.prune_blocks`.
        keep: how many experts stay in each block, or which share of them; as many of each of the router's groups.
        criterion: ``"output"``: those go whose outputs are the smallest, by the norm times the router's share, summed
            over tokens (REAP, arXiv 2510.13999, by the sum); ``"usage"``: those to which the fewest tokens go. Of
            equals the first goes.

    Every rank of ``group`` must call it, with equal arguments, and all come to the same experts, as one rank does.
    Rounds: those of :func:`visit_blocks`, and 2 of 64 bytes.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank: what ``prune_blocks`` refuses; more experts than are
            there, or not as many in each group; no experts, or such that cannot be removed, by name; outputs that are
            NaN or infinite, by block.
    """
    comm = communicator(group)
    with together(comm) as facts:
        check_samples(model, samples)
        chosen("expert_criterion", criterion, ExpertCriterion)
        blocks = blocks_to_walk(model)
        places = [
            (name, units, num_to_keep(units, keep, f"{name}.{units.name}"))
            for name, of_block in find_all_units(model, "experts")
            for units in of_block
        ]
        visits = [
            _scoring(block, [units for place, units, _ in places if place == name], criterion) for name, block in blocks
        ]
        facts |= {"keep": repr(keep), "criterion": criterion, "batch_tokens": batch_tokens}
        facts["samples"] = token_digest(samples)
    scores = list(visit_blocks(comm, model, samples, visits, offload=offload, batch_tokens=batch_tokens))
    kept: dict[Any, torch.Tensor] = {}
    with together(comm):
        by_place = torch.split(torch.cat(scores), [units.num_units for _, units, _ in places])
        for (name, units, num_kept), of_place in zip(places, by_place, strict=True):
            if not are_finite(of_place):
                raise ValueError(f"experts of block {name!r} put out NaN or Inf")
            kept[name, "experts", units.name] = _highest(of_place, units, num_kept)
    return kept


@contextmanager
def _scoring(
    block: nn.Module, places: Sequence[Units], criterion: ExpertCriterion
) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Score the experts of all places of a block, batch by batch."""
    sizes = [units.num_units for units in places]
    device = device_of(block)
    scores = torch.zeros(sum(sizes), dtype=torch.float64, device=device)

    def measure(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        of_batch = scores.clone()
        scores.zero_()  # they begin anew with the next batch
        return of_batch

    with ExitStack() as stack:
        for units, of_units in zip(places, torch.split(scores, sizes), strict=True):
            hook = partial(_score, of_units, criterion)
            stack.callback(block.get_submodule(units.name).register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield measure


def _score(
    scores: torch.Tensor, criterion: ExpertCriterion, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add to ``scores`` what experts ``module``, called like this, put out, or how many tokens they are given."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    last = expert_weights(module)[-1]
    for name, (tokens, x) in expert_inputs(module, args, kwargs).items():
        parameter, _, number = name.rpartition(".")
        if parameter != last:
            continue
        expert = int(number)
        if criterion == "usage":
            scores[expert] += len(x)
            continue
        if not {_INDEX, _SHARES} <= given.keys():
            raise NotImplementedError(
                f"a {type(module).__name__} is not called with {_INDEX} and {_SHARES}: what its experts put out is "
                "not known; use criterion='usage'"
            )
        put_out = x @ expert_matrix(module, last, expert).detach().t()
        shares = (given[_SHARES] * (given[_INDEX] == expert)).sum(dim=1)[tokens]
        norms = torch.linalg.vector_norm(put_out, dim=1, dtype=torch.float64) * shares.double().abs()
        scores[expert] += norms.sum()


def _highest(scores: torch.Tensor, units: Units, num_kept: int) -> torch.Tensor:
    """Return the units that stay, ascending: of each group the highest, of equals the last."""
    by_score = torch.sort(scores.view(units.num_groups, -1), dim=1, stable=True).indices
    num_gone = (units.num_units - num_kept) // units.num_groups
    groups = torch.arange(units.num_units, device="cpu").view(units.num_groups, -1)
    return groups.gather(1, by_score[:, num_gone:].sort(dim=1).values).flatten()
