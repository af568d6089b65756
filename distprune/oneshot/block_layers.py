"""What is pruned of each decoder block, and what stays dense, and why; decided before anything changes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from distprune.calibration.moments import Moments
from distprune.models.experts import check_experts
from distprune.models.linear_layers import UNUSUAL, LinearLayer, dense_weights, linear_layers
from distprune.patterns.base import Pattern
from distprune.shards.matrix import Matrix

_NUM_NAMED = 3  # weights that a warning names for each reason
_UNREACHED = "no token reached it"


@dataclass(frozen=True)
class BlockLayers:
    """Of one block: its linear layers to prune, by name, and why other weights stay dense, by the parameter's name."""

    linears: Mapping[str, LinearLayer]
    dense: Mapping[str, str]


def find_layers(blocks: Sequence[tuple[str, nn.Module]], pattern: Pattern) -> list[BlockLayers]:
    """Return what is pruned of each block; warn of what stays dense although it may be a linear layer. Local.

    A layer stays dense that ``pattern`` does not fit, or whose weight an earlier layer has: that one's inputs count.

    Raises:
        ValueError: a block without linear layers, or with none that the pattern fits.
        NotImplementedError: experts that this library does not know.
    """
    of_blocks: list[BlockLayers] = []
    holders: dict[int, str] = {}  # the layer that is pruned, by the identity of its parameter
    unusual: dict[str, list[str]] = {}
    for block_name, block in blocks:
        check_experts(block, block_name)
        linears, dense, misfit = linear_layers(block), dense_weights(block), None
        if not linears:
            raise ValueError(f"block {block_name!r} holds no linear layer")
        fit: dict[str, LinearLayer] = {}
        for name, linear in linears.items():
            full_name, path = f"{block_name}.{name}", linear.parameter_path
            pattern.check_shape((linear.num_out, linear.num_in))
            holder = holders.setdefault(id(linear.parameter), f"{block_name}.{path}")
            if holder != f"{block_name}.{path}":
                dense[path] = f"its weight is that of {holder!r}: see there"
                continue
            try:
                pattern.check_fits(full_name, Matrix(linear.num_out, linear.num_in))
            except ValueError as error:
                misfit = misfit or error
                dense[path] = f"{pattern} does not fit its {linear.num_out} outputs and {linear.num_in} inputs"
                unusual.setdefault(dense[path], []).append(f"{block_name}.{path}")
                continue
            fit[name] = linear
        if misfit is not None and not fit:
            raise misfit
        for path, reason in dense.items():
            if reason in UNUSUAL:
                unusual.setdefault(reason, []).append(f"{block_name}.{path}")
        of_blocks.append(BlockLayers(fit, dense))
    _warn(unusual)
    return of_blocks


def unreached(block_name: str, linears: Mapping[str, LinearLayer], moments: Sequence[Moments]) -> dict[str, str]:
    """Return those of ``linears`` that no token reached, experts apart, with why they stay dense; warn of them. Local.

    Some models multiply by a weight without calling its module (Mamba's ``dt_proj``); some have layers that wait for
    another input than tokens (cross-attention without an encoder).
    """
    unseen = {name for m in moments if not m.num_tokens for name in m.names if not linears[name].is_routed}
    if unseen:
        _warn({_UNREACHED: [f"{block_name}.{linears[name].parameter_path}" for name in linears if name in unseen]})
    return dict.fromkeys(unseen, _UNREACHED)


@contextmanager
def naming(block_name: str) -> Iterator[None]:
    """Name the block in an error of the body, which is raised on every rank."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"block {block_name!r}: {error}") from error


def _warn(dense: Mapping[str, Sequence[str]]) -> None:
    """``dense``: names of weights, by the reason why they stay dense."""
    for reason, names in dense.items():
        names = list(dict.fromkeys(names))  # the experts of a parameter have one name
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        warnings.warn(f"{', '.join(map(repr, names[:_NUM_NAMED]))}{more} stay dense: {reason}", stacklevel=2)


def num_places(module: nn.Module) -> Counter[int]:
    """Return in how many places of ``module`` each parameter is, by its id. Local."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
