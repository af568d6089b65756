"""What a one-shot call asks for: checked, and put together; nothing changes here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from distprune.calibration.data import check_fit, token_digest
from distprune.calibration.sample_group import Axis, shared_axis
from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.calibration.token_ids import TokenIds, as_windows
from distprune.models.decoder_blocks import check_one_stack, decoder_blocks, warn_of_other_blocks
from distprune.models.find_shards import check_model
from distprune.models.runnable import check_runs_on_tokens
from distprune.oneshot.block import WalkOptions
from distprune.oneshot.block_layers import BlockLayers, find_layers
from distprune.oneshot.recipe import Recipe
from distprune.oneshot.solver import Solver
from distprune.patterns.base import Pattern, own_share
from distprune.patterns.n_by_m import NByM
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.layouts import find_flat_parts, local_shard
from distprune.shards.local_shard import LocalShard


@dataclass(frozen=True)
class OneShotPlan:
    """What a call comes to, before anything has changed or was communicated."""

    samples: torch.Tensor  # (num_samples, length) int64
    solver: Solver
    pattern: Pattern
    options: WalkOptions
    linears: list[BlockLayers]  # of each block
    shards: list[LocalShard]  # every parameter's part on this rank
    axis: Axis | None
    facts: dict[str, str]  # what ranks must agree on


def check_samples(model: nn.Module, samples: torch.Tensor) -> None:
    """Raise a TypeError or a ValueError unless ``samples`` are token ids that fit ``model``. Local."""
    if not isinstance(samples, torch.Tensor) or samples.dtype != torch.int64:
        raise TypeError(f"samples must be a tensor of int64 token ids, not {getattr(samples, 'dtype', type(samples))}")
    if samples.ndim != 2 or samples.numel() == 0:
        raise ValueError(f"samples must be (num_samples, length), not {tuple(samples.shape)}")
    check_fit(samples, model)


def blocks_to_walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the decoder blocks of ``model``, in its shards; warn of other lists. Local.

    Raises:
        ValueError, NotImplementedError: a walk cannot go through them.
    """
    check_runs_on_tokens(model)
    if find_flat_parts(model):
        raise NotImplementedError("FSDP1 holds parts of rows; shard the model with fully_shard (FSDP2) instead")
    blocks = decoder_blocks(model)
    check_one_stack(model)
    warn_of_other_blocks(model)
    reset_forward(model)
    return blocks


def make_plan(model: nn.Module, samples: TokenIds, recipe: Recipe, expert_memory: int = EXPERT_MEMORY) -> OneShotPlan:
    """Check the arguments. Changes nothing, communicates nothing."""
    check_model(model)
    if isinstance(expert_memory, bool) or not isinstance(expert_memory, int):
        raise TypeError(f"expert_memory must be a number of bytes, not {expert_memory!r}")
    if expert_memory <= 0:
        raise ValueError(f"{expert_memory=} must be more than 0; one expert at a time has as much as it needs")
    method, recipe = recipe.method, recipe.resolved()
    solver, pattern = recipe.solver, recipe.pattern
    assert isinstance(pattern, Pattern)
    solver.check(pattern)
    assert recipe.target_share is not None  # it is resolved
    token_ids = as_windows(samples)
    check_samples(model, token_ids)
    blocks = blocks_to_walk(model)
    of_blocks = find_layers(blocks, pattern)
    linears = {  # by name in the model, with the parameter's name
        f"{block_name}.{linear.name}": (f"{block_name}.{linear.parameter_path}", linear)
        for (block_name, _), of_block in zip(blocks, of_blocks, strict=True)
        for linear in of_block.linears.values()
    }
    pattern = pattern.with_shares(  # of linear layers, by their own names or those of their parameters
        lambda shares: {n: own_share(shares, n if n in shares else path) for n, (path, _) in linears.items()}
    )
    shards: dict[str, LocalShard] = {}
    for path, linear in linears.values():
        if path not in shards:
            shards[path] = local_shard(path, linear.parameter)
    options = WalkOptions(
        solver.needs,
        recipe.sequential == "layer",
        recipe.target_share,
        expert_memory=expert_memory,
        fits=recipe.refit == "block",
        seed=recipe.seed or 0,
        permutes=pattern if isinstance(pattern, NByM) and recipe.permute == "channels" else None,
    )
    facts = {name: repr(value) for name, value in vars(recipe).items()}
    facts |= {
        "method": method if isinstance(method, str) else type(method).__name__,
        "pattern": repr(pattern),
        "samples": token_digest(token_ids),
        "expert_memory": repr(expert_memory),
    }
    axis = shared_axis(model)
    return OneShotPlan(token_ids, solver, pattern, options, of_blocks, list(shards.values()), axis, facts)
