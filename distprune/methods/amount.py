"""How many: an int is that many, a float that fraction of what is still unpruned."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["check_amount", "check_seed", "num_to_prune", "seeded"]


def check_amount(amount: int | float | None) -> None:
    """Raise unless ``amount`` is an int >= 0 or a float in [0, 1]; the rule of ``torch.nn.utils.prune``.

    Raises:
        TypeError: it is no real number, or a bool.
        ValueError: it is out of range.
    """
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(f"amount must be an int (how many) or a float (which fraction), not {amount!r}")
    if isinstance(amount, numbers.Integral):
        if amount < 0:
            raise ValueError(f"amount={amount} is negative; an int says how many elements to prune")
    elif not (math.isfinite(amount) and 0.0 <= amount <= 1.0):
        raise ValueError(f"amount={amount} is outside [0.0, 1.0]; a float says which fraction to prune")


def check_seed(seed: int | None) -> None:
    """Raise unless ``seed`` is an int or ``None``.

    Raises:
        TypeError: it is neither.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int or None, not {seed!r}")


def seeded(seed: int | None) -> dict[str, Any]:
    """Return the keyword for a constructor: a method that knows nothing of seeds is not handed one nobody gave."""
    return {} if seed is None else {"seed": seed}


def num_to_prune(amount: int | float, num_unpruned: int, where: str) -> int:
    """Return how many of ``num_unpruned`` elements ``amount`` asks for, a fraction rounded by ``round()``.

    Raises:
        ValueError: more than there are; ``where`` names them.
    """
    wanted = int(amount) if isinstance(amount, numbers.Integral) else round(float(amount) * num_unpruned)
    if wanted > num_unpruned:
        raise ValueError(f"amount={amount} is more than the {num_unpruned} unpruned elements left in {where}")
    return wanted
