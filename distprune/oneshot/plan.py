"""What a one-shot call asks for: checked, and put together; nothing changes here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from distprune.calibration.data import check_fit, token_digest, tokens_together
from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.calibration.token_ids import TokenIds, as_windows
from distprune.models.decoder_blocks import check_one_stack, decoder_blocks, shared_by_blocks, warn_of_other_blocks
from distprune.models.find_shards import check_model
from distprune.models.runnable import check_runs_on_tokens
from distprune.oneshot.block_layers import BlockLayers, find_layers
from distprune.oneshot.recipe import Recipe
from distprune.patterns.base import Pattern, own_share
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.layouts import find_flat_parts, local_shard
from distprune.shards.local_shard import LocalShard


@dataclass(frozen=True)
class WalkPlan:
    """What a walk prunes of each block, and how; nothing has changed or was communicated.

    The layers ``towards_own``, by their names in the model, have no targets. Blocks in ``skipped`` are passed over by
    all but the dense stream; ``healed`` names the layer of a block before them whose target is what the dense stream
    is behind them.
    """

    samples: torch.Tensor  # (num_samples, length) int64
    recipe: Recipe  # resolved
    linears: Sequence[BlockLayers]  # of each block
    shards: list[LocalShard]  # this rank's parts of the parameters that are pruned or read
    offload: bool = False
    batch_tokens: int | None = None
    towards_own: Set[str] = frozenset()
    skipped: Set[int] = frozenset()
    healed: Mapping[int, str] = field(default_factory=dict)
    expert_memory: int = EXPERT_MEMORY  # bytes of the sums of routed layers that a rank has at a time

    @cached_property
    def owned(self) -> dict[str, bool]:
        """Whether this rank counts a parameter, by its name in the model."""
        return {shard.name: shard.owned for shard in self.shards}

    @property
    def facts(self) -> dict[str, str]:
        """What ranks must agree on."""
        where = {"expert_memory": self.expert_memory, "offload": self.offload, "batch_tokens": self.batch_tokens}
        facts = {name: repr(value) for name, value in {**vars(self.recipe), **where}.items()}
        return facts | {"method": self.recipe.method_name, "samples": token_digest(self.samples)}


def check_samples(model: nn.Module, samples: torch.Tensor) -> None:
    """Raise a TypeError or a ValueError unless ``samples`` are token ids that fit ``model``. Local."""
    if not isinstance(samples, torch.Tensor) or samples.dtype != torch.int64:
        raise TypeError(f"samples must be a tensor of int64 token ids, not {getattr(samples, 'dtype', type(samples))}")
    if samples.ndim != 2 or samples.numel() == 0:
        raise ValueError(f"samples must be (num_samples, length), not {tuple(samples.shape)}")
    check_fit(samples, model)


def check_predicts(samples: torch.Tensor) -> None:
    """Raise a ValueError if ``samples`` (num_samples, length) have no token to predict. Local."""
    if samples.shape[1] < 2:
        raise ValueError(f"samples of {samples.shape[1]} token have none to predict; two are the least")


def blocks_to_walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the decoder blocks of ``model``, in its shards; warn of other lists. Local.

    Raises:
        ValueError, NotImplementedError: a walk cannot go through them.
    """
    check_runs_on_tokens(model)
    if find_flat_parts(model):
        raise NotImplementedError("FSDP1 holds parts of rows; shard the model with fully_shard (FSDP2) instead")
    blocks = decoder_blocks(model)
    listed = model.get_submodule(blocks[0][0].rpartition(".")[0])._modules.values()
    if sum(block is not None for block in listed) != len(blocks):
        raise NotImplementedError(
            f"a block is in {type(model).__name__}'s list more than once, which a walk from block to block cannot "
            "follow; prune_model prunes by the weights alone"
        )
    check_one_stack(model)
    warn_of_other_blocks(model)
    reset_forward(model)
    return blocks


def make_plan(
    model: nn.Module,
    samples: TokenIds,
    recipe: Recipe,
    expert_memory: int = EXPERT_MEMORY,
    offload: bool = False,
    batch_tokens: int | None = None,
) -> WalkPlan:
    """Check the arguments of ``prune_blocks``. Changes nothing, communicates nothing."""
    check_model(model)
    if isinstance(expert_memory, bool) or not isinstance(expert_memory, int):
        raise TypeError(f"expert_memory must be a number of bytes, not {expert_memory!r}")
    if expert_memory <= 0:
        raise ValueError(f"{expert_memory=} must be more than 0; one expert at a time has as much as it needs")
    tokens_together(model, batch_tokens)
    recipe, token_ids = recipe.resolved(), as_windows(samples)
    check_samples(model, token_ids)
    blocks, pattern = blocks_to_walk(model), recipe.pattern
    assert isinstance(pattern, Pattern)
    if recipe.has_targets and (shared := shared_by_blocks(blocks)):
        raise NotImplementedError(
            f"{shared}: when it is pruned in the first block, what the dense model puts out behind the second is lost; "
            "take targets='own'"
        )
    linears = find_layers(blocks, pattern)
    paths: dict[str, str] = {}  # of parameters, by their layers
    shards: dict[str, LocalShard] = {}
    for (block, _), of_block in zip(blocks, linears, strict=True):
        for layer, linear in of_block.linears.items():
            path = paths[f"{block}.{layer}"] = f"{block}.{linear.parameter_path}"
            if path not in shards:
                shards[path] = local_shard(path, linear.parameter)
    pattern = pattern.with_shares(  # of layers, by their own names or those of their parameters
        lambda shares: {name: own_share(shares, name if name in shares else path) for name, path in paths.items()}
    )
    parts, recipe = list(shards.values()), replace(recipe, pattern=pattern)
    return WalkPlan(token_ids, recipe, linears, parts, offload, batch_tokens, expert_memory=expert_memory)
