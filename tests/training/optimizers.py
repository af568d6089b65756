"""Every optimizer that is held to its zeros, the layouts in which torch itself can step it, and their table."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from distprune.models.find_shards import find_shards
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import ranges_of
from tests.wrapped import PRUNED

__all__ = [
    "INCLUDE",
    "NUM_RANKS",
    "OTHERS",
    "TORCHS",
    "UNABLE",
    "check_moments",
    "held_bits",
    "make_optimizer",
    "optimizer_table",
    "targets",
]

INCLUDE = [f"*.{name}.weight" for name in PRUNED]
Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

# What each one takes to move in a few steps; others take their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 1e-2, "amsgrad": True},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "ASGD": {"t0": 2},
}
TORCHS = sorted(
    name
    for name, each in vars(torch.optim).items()
    if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
)


def _schedule_free(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    import schedulefree  # type: ignore[import-untyped]

    made: Any = schedulefree.AdamWScheduleFree(parameters, lr=1e-2)
    made.train()
    return cast(torch.optim.Optimizer, made)


class EightBitSGD(torch.optim.Optimizer):
    """SGD whose momentum is kept in eight bits, with one scale a parameter: nothing in its state can be masked."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            weight, gradient, state = local_of(parameter), local_of(parameter.grad), self.state[parameter]
            momentum = gradient if not state else 0.9 * state["codes"].float() * state["scale"] + gradient
            state["scale"] = momentum.abs().max().clamp(min=1e-12) / 127 if momentum.numel() else torch.ones(())
            state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
            weight.sub_(0.1 * state["codes"].float() * state["scale"])


def _zero(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)


OTHERS: dict[str, Make] = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "ScheduleFree": _schedule_free,
    "SGD8bit": EightBitSGD,
    "ZeRO": _zero,
}
MATRICES_ALONE = ("Muon",)

# What torch itself cannot step, or not in this layout: no operator for DTensors, or for parameters of one dim.
UNABLE: dict[str, tuple[str, ...]] = {
    "plain": ("SparseAdam", "ZeRO"),
    "ddp": ("SparseAdam",),
    "fsdp1": ("SparseAdam", "ZeRO", "Muon"),
    "fsdp1 flat": ("SparseAdam", "ZeRO", "Muon"),
    "fsdp2": ("SparseAdam", "ZeRO", "Adafactor", "LBFGS", "Rprop"),
    "hsdp": ("SparseAdam", "ZeRO", "Adafactor", "LBFGS", "Rprop"),
    # Some parameters are plain here and some DTensors, which torch's lists of tensors cannot mix.
    "tp": ("SparseAdam", "ZeRO", "Adafactor", "LBFGS", "Rprop", "AdamW fused", "AdamW foreach", "ScheduleFree"),
    "fsdp-tp": ("SparseAdam", "ZeRO", "Adafactor", "LBFGS", "Rprop"),
    # LBFGS evaluates the closure as often as its own rank's loss asks for.
    "pipeline": ("SparseAdam", "ZeRO", "LBFGS"),
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if name in MATRICES_ALONE:
        parameters = [p for _, p in model.named_parameters() if p.ndim == 2]
    if name in OTHERS:
        return OTHERS[name](parameters)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **OPTIONS.get(name, {}))
    return made


NUM_RANKS = {
    "plain": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp1 flat": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tp": 2,
    "fsdp-tp": 4,
    "pipeline": 2,
}


def targets(model: nn.Module) -> list[LocalShard]:
    """Return what is held: the weights of two dims or more in the layers, biases and norms left out."""
    return find_shards(model, INCLUDE).shards


def held_bits(model: nn.Module) -> list[torch.Tensor]:
    """Return where this rank's targets are held."""
    return [shard.local.view(torch.int32) == 0 for shard in targets(model)]


# Adamax adds a constant to the one; Rprop's steps are no moments.
WITHOUT_MASK = ("exp_inf", "step_size")


def check_moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Check that per-element state is zero where weights are held, and return how many tensors were looked at."""
    inner = getattr(optimizer, "optim", optimizer)
    if isinstance(inner, torch.optim.LBFGS):
        return 0  # a history over all parameters at once
    num = 0
    for shard in targets(model):
        for parameter, state in inner.state.items():
            place = ranges_of([shard], [parameter])[0]
            if place is None:
                continue
            for name, value in state.items():
                is_moment = (
                    isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape
                )
                if is_moment and name not in WITHOUT_MASK:
                    assert not place.part_of(value)[shard.local.view(torch.int32) == 0].any(), name
                    num += 1
    return num


def optimizer_table() -> str:
    """Return the table of docs/reference/support.md: where each optimizer is tested."""
    columns = {"plain": "plain", "ddp": "DDP", "fsdp1": "FSDP1", "fsdp1 flat": "FSDP1, flat", "fsdp2": "FSDP2"}
    columns |= {"hsdp": "HSDP", "tp": "TP", "fsdp-tp": "FSDP \N{MULTIPLICATION SIGN} TP", "pipeline": "pipeline"}
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in [*TORCHS, *OTHERS]:
        marks = tuple("" if name in UNABLE[layout] else "✓" for layout in columns)
        if any(marks):
            rows.setdefault(marks, []).append(name)
    lines += [f"| {', '.join(names)} | " + " | ".join(marks) + " |" for marks, names in rows.items()]
    return "\n".join(lines)
