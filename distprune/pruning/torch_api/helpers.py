"""What people's own subclasses import from ``torch.nn.utils.prune`` beside its public names, under the same names.

Errors and texts are PyTorch's. They refuse what it lets through by mistake: an amount that is NaN, and a dim below
``-t.dim()``. Nothing is communicated.
"""

from __future__ import annotations

import numbers

import torch
from torch.distributed.tensor import DTensor

__all__ = [
    "_compute_norm",
    "_compute_nparams_toprune",
    "_validate_pruning_amount",
    "_validate_pruning_amount_init",
    "_validate_pruning_dim",
    "_validate_structured_pruning",
]


def _validate_pruning_amount_init(amount: int | float) -> None:
    """Raise unless ``amount`` is an int >= 0 or a float in [0, 1].

    Raises:
        TypeError: it is no real number.
        ValueError: it is out of range.
    """
    if not isinstance(amount, numbers.Real):
        raise TypeError(f"Invalid type for amount: {amount}. Must be int or float.")
    if not (amount >= 0 if isinstance(amount, numbers.Integral) else 0.0 <= float(amount) <= 1.0):
        raise ValueError(f"amount={amount} should either be a float in the range [0, 1] or a non-negative integer")


def _validate_pruning_amount(amount: int | float, tensor_size: int) -> None:
    """Raise if an int ``amount`` is more than the ``tensor_size`` units there are.

    Raises:
        ValueError: it is.
    """
    if isinstance(amount, numbers.Integral) and amount > tensor_size:
        raise ValueError(f"amount={amount} should be smaller than the number of parameters to prune={tensor_size}")


def _validate_structured_pruning(t: torch.Tensor) -> None:
    """Raise unless ``t`` has channels: two dims or more.

    Raises:
        ValueError: it has fewer.
    """
    if t.dim() <= 1:
        raise ValueError(
            "Structured pruning can only be applied to multidimensional tensors. Found tensor of shape "
            f"{t.shape} with {t.dim()} dims"
        )


def _compute_nparams_toprune(amount: int | float, tensor_size: int) -> int:
    """Return how many of ``tensor_size`` units ``amount`` says: an int that many, a float that fraction, rounded."""
    return amount if isinstance(amount, numbers.Integral) else round(amount * tensor_size)


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
    others = [other for other in range(t.dim()) if other != dim % t.dim()]
    if isinstance(t, DTensor):
        held = [p for p in t.placements if not p.is_replicate() and not p.is_shard(dim % t.dim())]
        if held:
            raise NotImplementedError(
                f"channels along dim {dim} are cut over ranks ({', '.join(map(str, held))}); rank them with "
                "distprune.ln_structured, which adds up over ranks"
            )
    norm: torch.Tensor = torch.norm(t, p=n, dim=others)
    return norm
