"""What people's own subclasses import from ``torch.nn.utils.prune`` beside its public names, under the same names.

They are PyTorch's, and three of them refuse what it lets through by mistake: an amount that is NaN, and a dim below
``-t.dim()``. Nothing is communicated.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from distprune.shards.torch_private import private

_TORCH = "torch.nn.utils.prune"
_compute_nparams_toprune = private(_TORCH, "_compute_nparams_toprune")
_validate_pruning_amount = private(_TORCH, "_validate_pruning_amount")
_validate_structured_pruning = private(_TORCH, "_validate_structured_pruning")


def _validate_pruning_amount_init(amount: int | float) -> None:
    """Raise unless ``amount`` is an int >= 0 or a float in [0, 1].

    Raises:
        TypeError: it is no real number.
        ValueError: it is out of range.
    """
    private(_TORCH, "_validate_pruning_amount_init")(amount)
    if amount != amount:
        raise ValueError(f"amount={amount} should either be a float in the range [0, 1] or a non-negative integer")


def _validate_pruning_dim(t: torch.Tensor, dim: int) -> None:
    """Raise unless ``t`` has a dim ``dim``.

    Raises:
        IndexError: it has none.
    """
    if not -t.dim() <= dim < t.dim():
        raise IndexError(f"Invalid index {dim} for tensor of size {t.shape}")


def _compute_norm(t: torch.Tensor, n: float | str, dim: int) -> torch.Tensor:
    """Return the L-``n`` norm of every channel along ``dim`` of ``t``: (t.shape[dim],), a DTensor where ``t`` is one.

    Raises:
        IndexError: ``t`` has no such dim.
        NotImplementedError: ranks hold parts of a channel, whose norm would have to be communicated.
    """
    _validate_pruning_dim(t, dim)
    if isinstance(t, DTensor):
        held = [p for p in t.placements if not p.is_replicate() and not p.is_shard(dim % t.dim())]
        if held:
            raise NotImplementedError(
                f"channels along dim {dim} are cut over ranks ({', '.join(map(str, held))}); rank them with "
                "distprune.ln_structured, which adds up over ranks"
            )
    norm: torch.Tensor = private(_TORCH, "_compute_norm")(t, n, dim)
    return norm
