"""What a one-shot call asks for: checked, and put together; nothing changes here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from distprune.calibration.data import check_fit, token_digest
from distprune.calibration.sample_group import Axis, shared_axis
from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.calibration.token_ids import TokenIds, as_windows
from distprune.models.decoder_blocks import check_one_stack, decoder_blocks, warn_of_other_blocks
from distprune.models.find_shards import check_model
from distprune.models.runnable import check_runs_on_tokens
from distprune.oneshot.admm import ADMM
from distprune.oneshot.block import WalkOptions
from distprune.oneshot.block_layers import BlockLayers, find_layers
from distprune.oneshot.scored import Scored
from distprune.oneshot.solver import Solver
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.patterns.as_pattern import as_pattern
from distprune.patterns.base import Pattern, own_share
from distprune.patterns.n_by_m import NByM
from distprune.pruning.agreement import check_seed, with_seed
from distprune.scores.as_score import Magnitude, Wanda
from distprune.scores.base import Score
from distprune.scores.random import Random
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.layouts import find_flat_parts, local_shard
from distprune.shards.local_shard import LocalShard

OneShotMethod = Literal["admm", "sparsegpt", "wanda", "magnitude", "random"]
Sequential = Literal["block", "layer"]
TargetsOf = Literal["own", "dense"]
BlockRefit = Literal["block", "none"]
Permute = Literal["channels", "none"]

_TARGET_SHARE = 0.5  # of the way to dense targets


@dataclass(frozen=True)
class OneShotPlan:
    """What a call comes to, before anything has changed or was communicated."""

    samples: torch.Tensor  # (num_samples, length) int64
    solver: Solver[Any]
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


def make_plan(
    model: nn.Module,
    samples: TokenIds,
    method: OneShotMethod | Score | Solver[Any],
    pattern: Pattern | str,
    sparsity: float | Mapping[str, float] | None,
    seed: int | None,
    sequential: Sequential | None = None,
    targets: TargetsOf | None = None,
    target_share: float | None = None,
    expert_memory: int = EXPERT_MEMORY,
    refit: BlockRefit | None = None,
    permute: Permute | None = None,
) -> OneShotPlan:
    """Check the arguments. Changes nothing, communicates nothing."""
    check_model(model)
    check_seed(seed)
    if isinstance(expert_memory, bool) or not isinstance(expert_memory, int):
        raise TypeError(f"expert_memory must be a number of bytes, not {expert_memory!r}")
    if expert_memory <= 0:
        raise ValueError(f"{expert_memory=} must be more than 0; one expert at a time has as much as it needs")
    solver = solver_of(method, seed)
    pattern = as_pattern(pattern, sparsity)
    pattern = pattern.within("tensor") if pattern.has_scope else pattern
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
        solver.stages(linear.num_in, pattern)
        if path not in shards:
            shards[path] = local_shard(path, linear.parameter)
    sequential = sequential or default_sequential(method)
    if sequential not in get_args(Sequential):
        raise ValueError(f"{sequential=} is none of {', '.join(get_args(Sequential))}")
    share = share_of_targets(targets or default_targets(method), target_share)
    refit = refit_of(refit, method, targets)
    permutes = permuted_for(permute, method, targets, pattern)
    options = WalkOptions(
        solver.needs,
        sequential == "layer",
        share,
        expert_memory=expert_memory,
        fits=refit == "block",
        seed=seed or 0,
        permutes=permutes,
    )
    facts = {
        "method": method if isinstance(method, str) else type(method).__name__,
        "pattern": repr(pattern),
        "seed": repr(seed),
        "samples": token_digest(token_ids),
        "sequential": sequential,
        "target_share": repr(share),
        "refit": refit,
        "permute": repr(permutes),
        "expert_memory": repr(expert_memory),
    }
    axis = shared_axis(model)
    return OneShotPlan(token_ids, solver, pattern, options, of_blocks, list(shards.values()), axis, facts)


def refit_of(
    refit: BlockRefit | None, method: OneShotMethod | Score | Solver[Any], targets: TargetsOf | None
) -> BlockRefit:
    """Return whether blocks are fitted as a whole; by default they are where targets are dense. Local.

    Raises:
        ValueError: no such fit; one without a dense stream, or in torch's inference mode, which knows no gradients.
    """
    targets = targets or default_targets(method)
    if refit is None:
        return "block" if fits_by_default(targets) else "none"
    if refit not in get_args(BlockRefit):
        raise ValueError(f"{refit=} is none of {', '.join(get_args(BlockRefit))}")
    if refit == "block":
        check_can_fit(targets)
    return refit


def fits_by_default(targets: TargetsOf) -> bool:
    """Return whether blocks are fitted as a whole where nothing is said: wherever ``targets`` are dense. Local.

    Not in torch's inference mode, of which it warns.
    """
    can_fit = not torch.is_inference_mode_enabled()
    if targets == "dense" and not can_fit:
        warnings.warn("blocks are not fitted as a whole: in inference mode nothing can be", stacklevel=2)
    return targets == "dense" and can_fit


def permuted_for(
    permute: Permute | None,
    method: OneShotMethod | Score | Solver[Any],
    targets: TargetsOf | None,
    pattern: Pattern,
) -> NByM | None:
    """Return the pattern for which channels change places, if they do; by default N:M where targets are dense. Local.

    Raises:
        ValueError: no such choice, or another pattern than N:M.
    """
    if permute is None:
        return pattern if isinstance(pattern, NByM) and (targets or default_targets(method)) == "dense" else None
    if permute not in get_args(Permute):
        raise ValueError(f"{permute=} is none of {', '.join(get_args(Permute))}")
    if permute == "none":
        return None
    if not isinstance(pattern, NByM):
        raise ValueError(f"{permute=} is for patterns such as '2:4', in whose groups channels meet, not {pattern!r}")
    return pattern


def check_can_fit(targets: TargetsOf) -> None:
    """Raise a ValueError unless blocks can be fitted as a whole. Local."""
    if targets != "dense":
        raise ValueError(f"refit='block' fits blocks to the dense model's: it needs targets='dense', not {targets!r}")
    if torch.is_inference_mode_enabled():
        raise ValueError("refit='block' needs gradients: call it outside of torch.inference_mode()")


def updates_weights(method: OneShotMethod, targets: TargetsOf | None) -> bool:
    """Return whether weights that stay are changed, too. Local."""
    return method in ("admm", "sparsegpt") or targets == "dense"


def default_targets(method: OneShotMethod | Score | Solver[Any]) -> TargetsOf:
    """Return what layers are to put out where nothing is said. Local."""
    return "dense" if _is_admm(method) else "own"


def default_sequential(method: OneShotMethod | Score | Solver[Any]) -> Sequential:
    """Return which layers are pruned at once where nothing is said. Local."""
    return "layer" if _is_admm(method) else "block"


def _is_admm(method: OneShotMethod | Score | Solver[Any]) -> bool:
    return method == "admm" or isinstance(method, ADMM)


def share_of_targets(targets: TargetsOf, target_share: float | None) -> float:
    """Return the share of the way to ``targets``, 0 where they are layers' own.

    Raises:
        ValueError, TypeError: no such targets, no share, or one that says nothing.
    """
    if targets not in get_args(TargetsOf):
        raise ValueError(f"{targets=} is none of {', '.join(get_args(TargetsOf))}")
    if target_share is None:
        return _TARGET_SHARE if targets == "dense" else 0.0
    if isinstance(target_share, bool) or not isinstance(target_share, int | float):
        raise TypeError(f"target_share must be a number, not {target_share!r}")
    if not 0 < target_share <= 1:
        raise ValueError(f"{target_share=} is not in (0, 1]; without targets say targets='own'")
    if targets == "own":
        raise ValueError(f"{target_share=} is of the way to targets='dense', and the targets are 'own'")
    return float(target_share)


def solver_of(method: OneShotMethod | Score | Solver[Any], seed: int | None) -> Solver[Any]:
    if isinstance(method, Solver):
        return method
    if isinstance(method, Score):
        return Scored(with_seed(method, seed))
    solvers: dict[str, Solver[Any]] = {
        "admm": ADMM(),
        "wanda": Scored(Wanda(), by_row=True),
        "sparsegpt": SparseGPT(),
        "magnitude": Scored(Magnitude()),
        "random": Scored(with_seed(Random(), seed)),
    }
    if method not in solvers:
        raise ValueError(f"method={method!r} is none of {', '.join(solvers)}, a Score or a Solver")
    return solvers[method]
