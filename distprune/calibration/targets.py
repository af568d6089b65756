"""What layers are to put out: what the model put out before anything was pruned.

Two streams run through the blocks: the pruned one, whose hidden states are those of the model as far as it is pruned,
and the *dense* one. A layer W that is given x, and in the dense stream x_dense, should put out W x_dense; one that adds
to hidden states should bring their sum to what it is in the dense stream. (Known from quantization: GPTAQ,
arXiv 2504.02692; Qronos, 2505.11695; LoaQ, 2509.06297.) For that the second moments alone do not do; with them go
sums over tokens of (x_dense - x)^T x, or of x^T (total_dense - total).

A block is run on the dense stream while its weights are dense; what its layers are given and add to is kept until the
block is pruned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from distprune.calibration.listening import listening
from distprune.calibration.order import BlockOrder
from distprune.calibration.sample_group import flat_local
from distprune.calibration.walk import Walk
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer


@dataclass
class Targets:
    """What the layers of one block of ``walk`` are given and add to in the dense stream.

    By batch and layer: ``inputs``, this rank's features, with the tokens that they are of, and ``totals``, the sums
    that layers add to. They are kept where the walk keeps hidden states.
    """

    walk: Walk
    order: BlockOrder
    linears: Mapping[str, LinearLayer]  # all of the block
    inputs: list[dict[str, tuple[torch.Tensor, torch.Tensor | None]]] = field(default_factory=list)
    totals: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def adding(self) -> dict[str, LinearLayer]:
        """The layers that add to hidden states."""
        return {name: linear for name, linear in self.linears.items() if name in self.order.adding}

    def run(self, comm: Communicator, index: int, linears: Mapping[str, LinearLayer]) -> None:
        """Advance the dense stream behind block ``index``, and keep what it meets there, of ``linears``' inputs.

        Every rank must call it: the rounds of :meth:`Walk.advance`.
        """
        self.inputs = [{} for _ in self.walk.batches]
        self.totals = [{} for _ in self.walk.batches]
        with listening(self.walk, linears, self, self.adding):
            self.walk.advance(index, comm, dense=True)

    def given(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None, first: str) -> None:
        # Of a module that runs several times, or not always, it is not known which inputs belong together.
        if name not in self.order.shifted or name not in self.order.called_once:
            return
        inputs = self.inputs[self.walk.running]
        if first in inputs:
            inputs[name] = inputs[first][0], tokens
        else:
            own = self.walk.sample_group.own_features(x, self.linears[name].num_in)
            inputs[name] = self.walk.kept(own), tokens

    def passed(self, name: str) -> None: ...

    def added(self, name: str, total: torch.Tensor) -> None:
        self.totals[self.walk.running][name] = self.walk.kept(flat_local(total))

    def beside(self, name: str, x: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return what stands beside ``x`` (tokens, features of this rank) of layer ``name`` in the dense stream.

        Of the batch that runs. For a token that was not routed there, that of ``x`` itself, as for all if it is not
        known which were.
        """
        dense, dense_tokens = self.inputs[self.walk.running].get(name, (x, None))
        dense = dense.to(x.device)
        if tokens is None or dense_tokens is None:
            _check_alike(name, dense, x)
            return dense
        if len(tokens) != len(x) or not len(dense_tokens):
            return x
        # Both ascend.
        places = torch.searchsorted(dense_tokens, tokens).clamp_(max=len(dense_tokens) - 1)
        is_there = dense_tokens[places] == tokens
        return torch.where(is_there[:, None], dense[places], x)

    def residual(self, name: str, total: torch.Tensor) -> torch.Tensor:
        """Return total_dense - ``total`` (tokens, out), float32, of layer ``name`` and the batch that runs."""
        dense, total = self.totals[self.walk.running][name], flat_local(total)
        _check_alike(name, dense, total)
        return dense.to(total.device).float() - total


def _check_alike(name: str, dense: torch.Tensor, own: torch.Tensor) -> None:
    if dense.shape != own.shape:
        raise NotImplementedError(
            f"{name!r} is given or puts out {tuple(own.shape)} in a pruned model, {tuple(dense.shape)} in a dense one: "
            "it takes targets='own'"
        )
