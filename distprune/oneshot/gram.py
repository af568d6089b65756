"""W^T W of rows that are spread over ranks: the same bits however they are.

Weights are rounded to a grid so coarse that all products and sums are whole numbers below 2**53, which float64 adds
without error in any order. Of a thousand rows it is finer than the largest weight times 2**-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from distprune.collectives.agree import max_together, together
from distprune.collectives.base import Communicator
from distprune.shards.device import fetched

_EXACT_BITS = 53  # of a float64
_CHUNK = 1 << 20  # weights in float64 at a time


def sum_gram(
    comm: Communicator, num_rows: int, num_in: int, make: Callable[[], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the Gram matrix (``num_in``, ``num_in``), float64 on ``device``, of all ranks' rows, ``num_rows`` in all.

    ``make`` returns this rank's, (rows, ``num_in``), replicas on one rank alone; it must not communicate. Every rank
    must call it: 3 rounds, of 8 bytes, of 64 and of the result's. What ``make`` raises on one rank is raised on all.
    One wait for a device, where it is not for what travels.

    Raises:
        ValueError: on every rank: weights are NaN or infinite.
    """
    made: list[torch.Tensor] = []

    def look(largest: torch.Tensor) -> None:
        made.append(make())
        if made[0].numel():
            largest[0] = fetched([made[0].abs().max()])[0]
        if not math.isfinite(float(largest[0])):
            raise ValueError("weights are NaN or infinite")

    largest = float(max_together(comm, (1,), look, torch.float64)[0])
    num_bits = (_EXACT_BITS - num_rows.bit_length()) // 2
    exponent = num_bits - math.frexp(largest)[1]

    with together(comm):
        total = torch.zeros((num_in, num_in), dtype=torch.float64, device=device)
        for rows in torch.split(made[0], max(1, _CHUNK // max(num_in, 1))) if made[0].numel() else ():
            whole = (rows.double() * 2.0**exponent).round_()
            total.addmm_(whole.t(), whole)
        total.mul_(2.0 ** (-2 * exponent))
    comm.reduce_(total)
    return total
