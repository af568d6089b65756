"""Every family of causal language models is pruned whole, with all its weights accounted for, or refused.

The account is taken without the library: which parameters a forward multiplies by, along which dim, and what each
matrix is given (``tests/products.py``).
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import BlockReport, OneShotReport
from tests.families import FAMILIES, NOT_BUILT, REFUSED, family_model, tokens
from tests.products import Products

# Run without --whole: one for each thing that families differ in.
SAMPLE = (
    "bart",  # cross-attention that waits for an encoder
    "deepseek_v4",  # hidden states of more dims; a linear layer in groups
    "gemma4",  # a tower of vision beside
    "hrm_text",  # two stacks in turn
    "inkling_text",  # experts that all tokens go to, beside others
    "jetmoe",  # a module for each matrix of the experts
    "llama4_text",  # experts that are given their tokens in turn, kept as (in, out)
    "mamba",  # a matrix with two inputs
    "xlnet",  # no limit to positions; parameters that are no linear layer's weight
    "zamba",  # two blocks share their weights
    "zaya",  # blocks that hand over more than hidden states
    "prophetnet",  # runs a layer several times in a block
)
TOKENS = tokens()
WARNED = ("does not fit", "that this library knows", "in groups", "no token reached")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in SAMPLE else pytest.mark.whole) for family in FAMILIES]
)
def test_every_weight_is_pruned_or_named(family: str) -> None:
    if family in NOT_BUILT:
        with pytest.raises(Exception):  # noqa: B017, PT011
            forward(family_model(family))
        return
    dense, seen = family_model(family), None
    targets = "own" if family in ("zamba", "zamba2") else None  # blocks that share weights have no others
    for method, pattern, how in (("wanda", "2:4", {}), ("admm", "row", {"targets": targets})):
        model = copy.deepcopy(dense)
        if family in REFUSED:
            with pytest.raises((ValueError, NotImplementedError), match=REFUSED[family]):
                prune(model, method, pattern, **how)
            check_untouched(model, dense, set())
            continue
        report, said = prune(model, method, pattern, **how)
        seen = seen or Seen(dense, report)
        check_account(seen, model, report, said)
        check_zeros(seen, model, report, pattern)
        if method == "wanda":
            check_inputs(seen, report)


def prune(model: nn.Module, method: Any, pattern: str, **options: Any) -> tuple[OneShotReport, list[str]]:
    """Return the report, and what was warned of."""
    sparsity = None if ":" in pattern else 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = prune_blocks(model, TOKENS, method=method, pattern=pattern, sparsity=sparsity, **options)
    return report, [str(warning.message) for warning in caught]


def forward(model: nn.Module) -> None:
    with torch.no_grad():
        for sample in TOKENS:
            model(input_ids=sample[None], use_cache=False)


class Seen:
    """What a forward of the dense model shows: its weights in blocks, and what they are given."""

    def __init__(self, dense: Any, report: OneShotReport) -> None:
        self.dense = dense
        blocks = [block.name for block in report.blocks]
        inside = tuple(f"{name}." for name in blocks)
        self.weights = {
            name: p
            for name, p in dense.named_parameters(remove_duplicate=False)
            if p.ndim > 1 and name.startswith(inside)
        }
        called: list[str] = []
        handles = [
            dense.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
            for name in blocks
        ]
        dense.set_experts_implementation("eager")
        self.products = Products(self.weights)
        with self.products:
            forward(dense)
        for handle in handles:
            handle.remove()
        assert called == blocks * len(TOKENS)  # each once, in order


def pruned_weights(model: nn.Module, block: BlockReport) -> dict[str, int]:
    """Return by parameter how many of its matrices were pruned."""
    found: dict[str, int] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for of_layer in block.layers:
        weight = f"{of_layer.name}.weight"
        name = weight if weight in parameters else of_layer.name.rpartition(".")[0]
        assert of_layer.num_elements <= parameters[name].numel()
        found[name] = found.get(name, 0) + 1
    return found


def check_account(seen: Seen, model: nn.Module, report: OneShotReport, said: list[str]) -> None:
    pruned: set[str] = set()
    for block in report.blocks:
        of_block = pruned_weights(model, block)
        assert all(block.dense.values())
        assert not of_block.keys() & block.dense.keys()
        wanted = {name for name in seen.weights if name.startswith(f"{block.name}.")}
        assert of_block.keys() | block.dense.keys() == wanted
        for name, num_matrices in of_block.items():
            is_stack = seen.weights[name].ndim == 3  # of experts, some of which no token may reach
            assert is_stack or name in seen.products.in_dim
            assert num_matrices == (len(seen.weights[name]) if is_stack else 1)
        for name, reason in block.dense.items():
            if any(words in reason for words in WARNED):
                assert any(reason in text for text in said), name
        pruned |= of_block.keys()
        if block.fit is not None:
            pruned |= {
                name for name, p in model.named_parameters() if p.ndim == 1 and name.startswith(f"{block.name}.")
            }
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.search(r"\.\d+\.", name) and f"{name}.weight" not in seen.weights:
            assert name.startswith(tuple(f"{other}." for other in report.other_blocks)), name
    check_untouched(model, seen.dense, pruned)


def check_untouched(model: nn.Module, dense: nn.Module, pruned: set[str]) -> None:
    values = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in pruned}
    before = dense.state_dict()
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) in values or torch.equal(value, before[name]), name


def check_zeros(seen: Seen, model: nn.Module, report: OneShotReport, pattern: str) -> None:
    for block in report.blocks:
        assert all(2 * of_layer.num_pruned == of_layer.num_elements for of_layer in block.layers)
        for name in pruned_weights(model, block):
            in_dim = seen.products.in_dim.get(name, -1)
            zeros = model.get_parameter(name).transpose(in_dim, -1) == 0
            if pattern == "2:4":
                assert (zeros.reshape(*zeros.shape[:-1], -1, 4).sum(-1) == 2).all(), name
            else:  # weights of dead inputs are zero besides
                assert (2 * zeros.sum(-1) >= zeros.shape[-1]).all(), name
                assert (zeros & ~zeros.all(dim=-2, keepdim=True)).sum() * 2 <= zeros.numel(), name


def check_inputs(seen: Seen, report: OneShotReport) -> None:
    """The masks of the first block, and of the last one alone, are Wanda's, by what a forward of the model shows."""
    for first_block in (0, len(report.blocks) - 1):
        model = copy.deepcopy(seen.dense)
        block = prune(model, "wanda", "2:4", finished=lambda index, first=first_block: index < first)[0].blocks[0]
        for name, square_sum in inputs_of(seen, pruned_weights(model, block)):
            parameter, offset = name
            matrix = seen.products.matrix(seen.dense.get_parameter(parameter), parameter, offset)
            after = seen.products.matrix(model.get_parameter(parameter), parameter, offset)
            groups = (matrix.abs() * square_sum.sqrt()).reshape(len(matrix), -1, 4)
            keep = torch.zeros_like(groups).scatter(-1, groups.topk(2).indices, 1).reshape(matrix.shape)
            assert float(((after != 0) == keep.bool()).double().mean()) > 0.98, name


def inputs_of(seen: Seen, pruned: Mapping[str, int]) -> list[tuple[tuple[str, int], torch.Tensor]]:
    """Return what the matrices of ``pruned`` are given, but for those that are given zeros alone: there all ties."""
    return [(key, sums) for key, sums in seen.products.square_sums.items() if key[0] in pruned and bool(sums.any())]
