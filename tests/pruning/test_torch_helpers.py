"""What people's own methods import from ``torch.nn.utils.prune`` beside its public names, and masks they compute."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distprune
from tests.pruning.test_torch_parity import distinct
from tests.worlds import run_threads

theirs: Any = torch.nn.utils.prune
ours: Any = distprune

HELPERS: dict[str, list[tuple[Any, ...]]] = {
    "_validate_pruning_amount_init": [(a,) for a in ("0.5", None, 1.1, -0.1, math.inf, -1, 0, 0.0, 1, 1.0, 1500, 0.34)],
    "_validate_pruning_amount": [(20, 19), (19, 19), (0, 0), (0.3, 0), (1.0, 0)],
    "_validate_structured_pruning": [(torch.ones(shape),) for shape in ((), (3,), (2, 3), (2, 0, 3))],
    "_compute_nparams_toprune": [(0, 15), (10, 15), (1, 15), (1.0, 15), (0.4, 17), (0.5, 5), (0.5, 7), (20, 15)],
    "_validate_pruning_dim": [(torch.ones(2, 3), dim) for dim in (-2, -1, 0, 1, 2)],
    "_compute_norm": [
        (distinct((3, 2, 4)), n, dim) for n in (1, 2, 0.5, math.inf, -math.inf, "fro", "nuc") for dim in (-1, 0, 1, 2)
    ],
}


def outcome(helper: Callable[..., object], arguments: tuple[Any, ...]) -> Any:
    try:
        found = helper(*arguments)
    except Exception as error:
        return type(error), str(error)
    return found.tolist() if isinstance(found, torch.Tensor) else (type(found), found)


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_of_peoples_own_methods(name: str) -> None:
    assert list(inspect.signature(getattr(ours, name)).parameters) == list(
        inspect.signature(getattr(theirs, name)).parameters
    )
    for arguments in HELPERS[name]:
        assert outcome(getattr(ours, name), arguments) == outcome(getattr(theirs, name), arguments), arguments


def test_helpers_refuse_what_pytorch_lets_through() -> None:
    with pytest.raises(ValueError, match=r"amount=nan should either be a float in the range \[0, 1\]"):
        ours._validate_pruning_amount_init(math.nan)
    for helper in (ours._validate_pruning_dim, lambda t, dim: ours._compute_norm(t, 2, dim)):
        with pytest.raises(IndexError, match="Invalid index -3 for tensor of size"):
            helper(torch.ones(2, 3), -3)


def helpers_on_rank(_: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = distinct((3, 4))
    rows, whole_everywhere = (
        distribute_tensor(whole, mesh, [placement], src_data_rank=None) for placement in (Shard(0), Replicate())
    )
    ours._validate_structured_pruning(rows)
    ours._validate_pruning_dim(rows, -2)
    assert torch.equal(ours._compute_norm(rows, 2, 0).full_tensor(), theirs._compute_norm(whole, 2, 0))
    assert torch.equal(ours._compute_norm(whole_everywhere, 2, 1).to_local(), theirs._compute_norm(whole, 2, 1))
    with pytest.raises(NotImplementedError, match=r"along dim -1 are cut over ranks \(S\(0\)\).*ln_structured"):
        ours._compute_norm(rows, 2, -1)


def test_helpers_on_shards() -> None:
    run_threads(2, helpers_on_rank)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda module: module.L1Unstructured(3), torch.int64),
        (lambda module: module.L1Unstructured(3), torch.float32),
        (lambda module: module.LnStructured(1, 2, 0), torch.float32),
    ],
)
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float64])
def test_masks_computed_by_hand(dtype: torch.dtype, mask_dtype: torch.dtype, make: Callable[[Any], Any]) -> None:
    """Of integers too; a container's in the dtype of what it prunes."""
    t, default = torch.tensor([[1, -2, 3], [-4, 5, 6]]).to(dtype), torch.tensor([[0, 1, 1], [1, 1, 1]]).to(mask_dtype)
    found = []
    for module in (ours, theirs):
        container, method = module.PruningContainer(), make(module)
        container._tensor_name = method._tensor_name = "t"
        container.add_pruning_method(method)
        found.append((method.compute_mask(t, default), container.compute_mask(t, default)))
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)
        assert mine.dtype == wanted.dtype
