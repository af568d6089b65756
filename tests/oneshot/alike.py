"""What a pruned model is compared with: the counts the pattern asks for, and the model that one rank pruned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distprune import Block, NByM, PerRow, Unstructured
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import OneShotReport
from distprune.patterns.base import Pattern
from tests import oneshot_oracle as oracle
from tests.architectures import samples
from tests.removal.layouts import shard
from tests.wrapped import whole

# The method as it is by default, or "sequential targets" in front of it; "permuted" before all.
Case: TypeAlias = tuple[str, Pattern]
Pruned: TypeAlias = tuple[dict[str, torch.Tensor], OneShotReport]  # all weights, whole

TOKENS = samples(5)
PLAIN: dict[str, Any] = {"refit": "none", "permute": "none"}  # layer by layer, as the oracle
HALF, BLOCKS = Unstructured(0.5), Block(4, 0.4)
CASES: list[Case] = [
    ("wanda", HALF),
    ("wanda", NByM(2, 4)),
    ("sparsegpt", HALF),
    ("sparsegpt", NByM(2, 4)),
    ("sparsegpt", PerRow(0.3)),
    ("admm", HALF),
    ("admm", NByM(2, 4)),
    ("magnitude", HALF),
    ("magnitude", PerRow(0.3)),
    ("random", HALF),
    ("random", NByM(4, 8)),
    ("wanda", BLOCKS),
    ("sparsegpt", BLOCKS),
    ("magnitude", BLOCKS),
    ("random", BLOCKS),
]
TARGETS: list[Case] = [
    ("layer dense wanda", HALF),
    ("layer dense sparsegpt", NByM(2, 4)),
    ("block dense sparsegpt", HALF),
    ("layer own sparsegpt", BLOCKS),
    ("block own admm", HALF),
    ("admm", PerRow(0.3)),
    ("admm", BLOCKS),
    ("permuted wanda", NByM(2, 4)),
    ("permuted admm", NByM(2, 4)),
]
CASES += TARGETS
FEW: list[Case] = [("wanda", HALF), ("sparsegpt", HALF), ("admm", HALF)]


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every linear layer of the blocks as (out, in)."""
    return {
        f"{block_name}.{name}": linear.weight
        for block_name, block in decoder_blocks(model)
        for name, linear in oracle.linears(block).items()
    }


def share_alike(model: nn.Module, masks: dict[str, torch.Tensor]) -> float:
    found = matrices(model)
    assert found.keys() == masks.keys()
    alike = sum(int(((found[name] != 0) == keep).sum()) for name, keep in masks.items())
    return alike / sum(keep.numel() for keep in masks.values())


def options(method: str) -> dict[str, Any]:
    """Return the arguments of ``prune_blocks`` that a case's text stands for."""
    *how, method = method.split()
    permute = {"permute": "channels"} if "permuted" in how else {}
    how = [word for word in how if word != "permuted"]
    return {"method": method, **permute, **dict(zip(("sequential", "targets"), how, strict=False))}


def check_counts(model: nn.Module, report: OneShotReport, method: str, pattern: Any) -> None:
    """To the element: per matrix, per row, per group, per block of columns."""
    method = options(method)["method"]
    found = matrices(model)
    linears = {of_layer.name: of_layer for block in report.blocks for of_layer in block.layers}
    assert found.keys() == linears.keys()
    for name, weight in found.items():
        zeros = weight == 0
        num_in = weight.shape[1]
        of_layer = linears[name]
        assert of_layer.num_elements == weight.numel()
        assert of_layer.num_zeros == int(zeros.sum())
        if of_layer.num_zeros != of_layer.num_pruned:
            continue  # dead inputs: zero without being pruned
        own = pattern.of(name)
        if isinstance(own, NByM):
            assert (zeros.reshape(-1, own.m).sum(1) == own.m - own.n).all()
        elif isinstance(own, Block):
            size = own.size
            of_block = zeros.reshape(len(zeros) // size, size, num_in // size, size).sum((1, 3))  # zeros of every block
            num_gone = int((of_block == size * size).sum())
            width = 128 // size if method == "sparsegpt" else of_block.shape[1]  # blocks that compete, across
            assert isinstance(own.sparsity, float)
            wanted = [round(own.sparsity * some.numel()) for some in torch.split(of_block, width, dim=1)]
            assert num_gone == sum(wanted)
            assert num_gone * size * size == of_layer.num_pruned
        elif isinstance(own, PerRow) or method in ("wanda", "admm"):
            assert (zeros.sum(1) == round(own.sparsity * num_in)).all()
        elif method == "sparsegpt":
            for columns in torch.split(zeros, 128, dim=1):
                assert int(columns.sum()) == round(own.sparsity * columns.numel())
        else:
            assert of_layer.num_pruned == round(own.sparsity * weight.numel())


def pruned(model: nn.Module, case: Case, tokens: torch.Tensor = TOKENS) -> Pruned:
    """Prune ``model`` and return its weights, whole. Every rank must call it."""
    method, pattern = case
    report = prune_blocks(model, tokens, **{**PLAIN, **options(method)}, pattern=pattern, seed=3)
    return {name: whole(p) for name, p in model.named_parameters()}, report


def sharded(model: nn.Module, mesh_shape: tuple[int, ...] | None = None) -> nn.Module:
    """Apply FSDP2, or HSDP on a mesh of two axes, to each block and the root."""
    shape = mesh_shape or (torch.distributed.get_world_size(),)
    return shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))


def check_ranks(
    everywhere: list[list[Pruned]],
    make: Callable[[], nn.Module],
    cases: list[Case],
    tokens: torch.Tensor = TOKENS,
    least: float = 1.0,
) -> None:
    """Check what all ranks pruned against what one rank does with all samples.

    ``least`` is the share of Wanda's mask that must be equal: all of it where the activations are the same bits.
    """
    for index, (method, pattern) in enumerate(cases):
        alone = make()
        report = prune_blocks(alone, tokens, **{**PLAIN, **options(method)}, pattern=pattern, seed=3)
        check_counts(alone, report, method, pattern)
        weights, of_ranks = everywhere[0][index]
        together: Any = make()
        together.load_state_dict(weights, strict=False)
        check_counts(together, of_ranks, method, pattern)
        kept = {name: weight != 0 for name, weight in matrices(alone).items()}
        updates = method.endswith(("sparsegpt", "admm")) or "dense" in method or "permuted" in method
        assert share_alike(together, kept) >= (0.999 if updates else least if method == "wanda" else 1.0)
        assert perplexity(together) == pytest.approx(perplexity(alone), rel=1e-3)
        for name, weight in matrices(together).items():
            wanted = matrices(alone)[name]
            assert float((weight - wanted).norm() / wanted.norm()) < 0.02
        for of_rank in everywhere[1:]:
            assert all(torch.equal(weight, weights[name]) for name, weight in of_rank[index][0].items())
            assert [block.layers for block in of_rank[index][1].blocks] == [block.layers for block in of_ranks.blocks]
        for block, wanted_block in zip(of_ranks.blocks, report.blocks, strict=True):
            for of_layer, one in zip(block.layers, wanted_block.layers, strict=True):
                assert (of_layer.name, of_layer.num_tokens, of_layer.damping) == (one.name, one.num_tokens, one.damping)
                assert of_layer.relative_error == pytest.approx(one.relative_error, rel=0.02)


def perplexity(model: Any) -> float:
    """On tokens that no calibration saw."""
    tokens = samples(8, 32, seed=2)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return float(loss.exp())
