"""The linear layers of a decoder block: whatever multiplies its input by a weight matrix.

Noun: a *linear layer* is one matrix (out, in) and where it lives: the weight of an ``nn.Linear``, that of
transformers' ``Conv1D`` (GPT-2), which is kept as (in, out), or one expert's slice of the 3-D weights
into which transformers 5 puts all experts of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from distprune.models.matrices import find_routers, is_linear, matrices_of, own_parameters
from distprune.models.weights import check_unscaled, list_parameters, why_no_weights
from distprune.shards.geometry import Runs

_UNKNOWN = "not the weight of a linear layer that this library knows"
_GROUPED = "a linear layer in groups, each with inputs of its own"
UNUSUAL = (_UNKNOWN, _GROUPED)  # why weights stay dense that one may expect to be pruned


def expert_place(runs: Runs, expert: int) -> int | None:
    """Return where ``expert`` is among those that ``runs`` cover; ``None``: it is not. Local."""
    held = [number for start, stop in runs for number in range(start, stop)]
    return held.index(expert) if expert in held else None


@dataclass(frozen=True)
class LinearLayer:
    """One matrix of a block. ``name`` is the parameter's within the block, without ``.weight``, plus ``.e`` of an
    expert ``e``; ``transposed`` says that it is kept as (in, out), ``is_routed`` that only some tokens reach it."""

    name: str
    module: nn.Module
    parameter_name: str
    num_out: int
    num_in: int
    transposed: bool = False
    expert: int | None = None
    is_routed: bool = False

    @property
    def parameter_path(self) -> str:
        """The parameter's name within the block."""
        if self.expert is not None:
            return self.name.rpartition(".")[0]
        return f"{self.name}.{self.parameter_name}" if self.name else self.parameter_name

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now: under FSDP2 the shards, and the whole while the block runs."""
        parameter = getattr(self.module, self.parameter_name)
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"{self.name!r} is held by a {type(parameter).__name__}, not a parameter")
        return parameter

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that is added to what this matrix alone puts out, where there is one."""
        bias = None if self.expert is not None else getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None


def linear_layers(block: nn.Module) -> dict[str, LinearLayer]:
    """Return the weights of ``block`` that are linear layers, by name, in the order of its modules.

    Global shapes; no communication.

    Raises:
        TypeError: one is quantized (see :func:`check_unscaled`).
    """
    return _sorted_weights(block)[0]


def dense_weights(block: nn.Module) -> dict[str, str]:
    """Return why the other parameters (two dims or more) of ``block`` stay dense, by name. Local."""
    return _sorted_weights(block)[1]


def _sorted_weights(block: nn.Module) -> tuple[dict[str, LinearLayer], dict[str, str]]:
    (_, by_module), experts = list_parameters(block), find_routers([*block.modules()])[1]
    reasons = why_no_weights([block], by_module, is_block=True)
    layers: dict[str, LinearLayer] = {}
    dense: dict[str, str] = {}
    for path, module in block.named_modules():
        matrices = matrices_of(module, own_parameters(module))
        for attribute, held in by_module[module].items():
            name = f"{path}.{attribute}" if path else attribute
            if len(held.shape) < 2:
                continue
            if reasons[held]:
                dense[name] = reasons[held]
                continue
            if attribute not in matrices:
                is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
                unusual = _GROUPED if isinstance(module, nn.Linear) else _UNKNOWN
                dense[name] = "a convolution" if is_convolution else unusual
                continue
            matrix = matrices[attribute]
            check_unscaled(name, module, attribute)
            numbers: Iterable[int | None] = (None,) if is_linear(module) else range(matrix.num_matrices)
            for expert in numbers:
                layer_name, is_routed = (path, module in experts) if expert is None else (f"{name}.{expert}", True)
                layers[layer_name] = LinearLayer(
                    layer_name, module, attribute, matrix.num_out, matrix.num_in, matrix.transposed, expert, is_routed
                )
    return layers, dense
