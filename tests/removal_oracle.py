"""Units of a decoder removed in one process, written plainly: each cost is that of a refit from scratch, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from distprune.models.decoder_blocks import decoder_blocks
from tests.allocation_oracle import sensitivities
from tests.oneshot_oracle import Linear2d, first_inputs, linears, move, run_block, want

__all__ = ["Reader", "plain_removal"]

UnitKind = Literal["mlp", "heads", "kv_groups"]


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads units: unit u owns ``width`` inputs from u * width on; as many of each group go."""

    kind: UnitKind
    name: str  # of the linear layer in the block
    num_units: int
    width: int
    num_groups: int = 1
    cuts: tuple[tuple[str, int, int], ...] = ()  # what else leaves: parameter, dim, indices of a unit


@torch.no_grad()
def plain_removal(
    model: Any,
    samples: torch.Tensor,
    readers: Sequence[Reader],
    keep: Mapping[UnitKind, int],
    *,
    criterion: str = "obs",
    refit: str = "least_squares",
    share: float = 0.5,
    own_heads: bool = False,
    damping: float = 0.1,
    num_steps: int = 16,
    layers: Sequence[int] | None = None,
) -> dict[tuple[str, str, str], list[int]]:
    """Zero what reads units that go, refit what is left, and return which stay, by (block, kind, reader).

    ``share`` is of the way to dense targets, 0: there are none; nor with ``own_heads`` for what reads heads. Of
    ``layers`` that go nothing is changed.
    """
    with torch.enable_grad():
        gradients = sensitivities(model, samples) if criterion == "taylor" else {}
    blocks = decoder_blocks(model)
    calls = [first_inputs(model, blocks[0][1], tokens[None]) for tokens in samples]
    hidden = [args[0] for args, _ in calls]
    dense_hidden = hidden
    kept: dict[tuple[str, str, str], list[int]] = {}
    left = list(range(len(blocks))) if layers is None else list(layers)
    behind = dict(itertools.pairwise([*left, len(blocks)]))
    for index in left:
        name, block = blocks[index]
        found = linears(block)
        for earlier, _ in enumerate(blocks[:index]):
            if index == left[0]:
                dense_hidden = _advanced(blocks[earlier][1], dense_hidden, calls)
        dense = [run_block(block, found, x, call) for x, call in zip(dense_hidden, calls, strict=True)]
        dense_after = [given.output for given in dense]
        for skipped in range(index + 1, behind[index]):
            dense_after = _advanced(blocks[skipped][1], dense_after, calls)
        heals = share > 0 and behind[index] > index + 1
        for reader in readers:
            linear = found[reader.name]
            is_healed = heals and reader.kind == "mlp"
            if reader.kind not in keep and not is_healed:
                continue
            xs, dense_weight = [], linear.weight.clone()
            of_reader = 0.0 if own_heads and reader.kind == "heads" else share
            for place, (x, call) in enumerate(zip(hidden, calls, strict=True)):
                given = run_block(block, found, x, call)
                if reader.name not in given.inputs:
                    continue
                xs.append(given.inputs[reader.name].double())
                linear.add(given.inputs[reader.name], with_hessian=True)
                if is_healed:
                    of_token = given.output.shape[-1]
                    linear.want(given.inputs[reader.name], (dense_after[place] - given.output).view(-1, of_token))
                elif of_reader:
                    want(reader.name, linear, (x, given), (dense_hidden[place], dense[place]))
            if is_healed:
                move(linear, 1.0, 1.0)
            elif of_reader:
                move(linear, of_reader, 0.3)
            if reader.kind in keep:
                all_x = torch.cat(xs) if xs else torch.zeros(0, linear.weight.shape[1]).double()
                rows = gradients.get(f"{name}.{reader.name}", (None, None))[1]
                settle = _Settled(block, reader, linear, dense_weight, all_x, rows, damping)
                kept[name, reader.kind, reader.name] = settle.choose(keep[reader.kind], criterion, num_steps)
                settle.refit(kept[name, reader.kind, reader.name], refit)
        hidden = _advanced(block, hidden, calls)
        dense_hidden = dense_after
    return kept


def _advanced(block: nn.Module, hidden: Sequence[torch.Tensor], calls: Sequence[Any]) -> list[torch.Tensor]:
    return [run_block(block, (), x, call).output for x, call in zip(hidden, calls, strict=True)]


class _Settled:
    """One reader's turn."""

    def __init__(
        self,
        block: nn.Module,
        reader: Reader,
        linear: Linear2d,
        dense: torch.Tensor,
        x: torch.Tensor,
        rows: Any,
        damping: float,
    ) -> None:
        self.block, self.reader, self.linear, self.dense, self.x, self.rows = block, reader, linear, dense, x, rows
        self.damping = damping
        module = block.get_submodule(reader.name) if "." not in reader.name or not reader.name[-1].isdigit() else None
        self.bias: Any = None if module is None else module.bias
        centered = x - x.mean(0) if self.bias is not None and len(x) else x
        self.a = centered.T @ centered if len(x) else torch.eye(linear.weight.shape[1]).double()

    def features(self, units: Sequence[int]) -> list[int]:
        width = self.reader.width
        return [unit * width + i for unit in units for i in range(width)]

    def coefficients(self, gone: list[int], stays: list[int]) -> torch.Tensor:
        a = self.a + self.damping * self.a.diagonal().diag()
        inverse: torch.Tensor = torch.linalg.pinv(a[stays][:, stays], hermitian=True)  # of inputs always 0, too
        return a[gone][:, stays] @ inverse

    def cost(self, units: Sequence[int]) -> float:
        """Return what the damped outputs lose if ``units`` go at once and the weights are refitted."""
        gone = self.features(units)
        stays = [i for i in range(len(self.a)) if i not in set(gone)]
        a = self.a + self.damping * self.a.diagonal().diag()
        lost = a[gone][:, gone] - self.coefficients(gone, stays) @ a[stays][:, gone]
        weight = self.linear.weight.double()[:, gone]
        return float((weight @ lost @ weight.T).diagonal().sum())

    def scores(self, criterion: str, gone: Sequence[int]) -> list[float]:
        reader, w = self.reader, self.linear.weight.double()
        if criterion == "obs":
            base = self.cost(gone) if gone else 0.0
            return [self.cost([*gone, u]) - base if u not in gone else 0.0 for u in range(reader.num_units)]
        if criterion == "magnitude":
            sums = []
            for unit in range(reader.num_units):
                parts = [self.dense.double()[:, self.features([unit])]]
                for name, dim, per_unit in reader.cuts:
                    parts.append(self.block.get_parameter(name).double().narrow(dim, unit * per_unit, per_unit))
                sums.append(sum(float(part.square().sum()) for part in parts))
            return sums
        squares = w.square().sum(0)
        if criterion == "taylor":
            by_feature = (w.square() * self.rows[:, None]).sum(0) * self.x.square().mean(0)
        else:
            by_feature = squares * self.x.var(0, correction=0) if criterion == "fluctuation" else self.x.abs().mean(0)
        return [float(of_unit) for of_unit in by_feature.view(reader.num_units, -1).sum(1)]

    def choose(self, num_kept: int, criterion: str, num_steps: int) -> list[int]:
        reader = self.reader
        size = reader.num_units // reader.num_groups
        left = [(reader.num_units - num_kept) // reader.num_groups] * reader.num_groups
        step = -(-sum(left) // num_steps) if criterion == "obs" else sum(left)
        gone: list[int] = []
        while sum(left):
            scores = self.scores(criterion, gone)
            chosen: list[int] = []
            for unit in sorted(range(reader.num_units), key=lambda u: (scores[u], u)):
                if unit not in gone and left[unit // size] and len(chosen) < step:
                    chosen.append(unit)
                    left[unit // size] -= 1
            gone += chosen
        return [unit for unit in range(reader.num_units) if unit not in gone]

    def refit(self, kept: Sequence[int], how: str) -> None:
        weight, stays = self.linear.weight, self.features(kept)
        gone = [i for i in range(weight.shape[1]) if i not in set(stays)]
        before = weight.double()
        after = torch.zeros_like(before)
        after[:, stays] = before[:, stays]
        if how == "least_squares":
            after[:, stays] += before[:, gone] @ self.coefficients(gone, stays)
        if how != "none" and self.bias is not None:
            self.bias += ((before - after) @ self.x.mean(0)).float()
        weight.copy_(after)
