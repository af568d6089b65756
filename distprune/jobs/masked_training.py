"""Steps of AdamW over a sharded model whose zeros are held, and all that a killed job needs to go on with them.

Nouns: the *state* is the weights and AdamW's two moments, in float32, which any number of ranks can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator, out_of_step
from distprune.jobs.training_state import read_state, write_state
from distprune.models.evaluating import evaluating
from distprune.pruning.agreement import agree_on_model
from distprune.shards.checksum import checksum
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import LocalShard, bits_of, count_zeros
from distprune.training.hold import Hold, hold_zeros

_BETAS = (0.9, 0.95)
_LONGEST_GRADIENT = 1.0  # longer ones are cut to this norm
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MaskedTraining:
    """Training of ``model``, in float32, whole on one rank or sharded by FSDP2 over those of ``comm``.

    With a ``teacher``, towards what it predicts, and not towards the text. Every zero is held, in every parameter, and
    one that is all zeros stays so. Without dropout, so that a step follows from its batch.

    Every rank must make one: six rounds, two of them of 16 bytes a parameter at most.
    """

    def __init__(
        self, comm: Communicator, model: nn.Module, teacher: nn.Module | None, compute_dtype: torch.dtype
    ) -> None:
        self._comm, self.model, self._teacher, self._compute_dtype = comm, model, teacher, compute_dtype
        agreed = agree_on_model(comm, model, "*", ())
        place = agreed.roster.index()

        def fill(words: torch.Tensor) -> None:
            self._shards = agreed.shards()
            owned = [shard for shard in self._shards if shard.owned]
            for shard, num in zip(owned, count_zeros([shard.local for shard in owned]), strict=True):
                words[place[shard.name]] = torch.tensor([num, shard.local.numel()], dtype=torch.int64, device="cpu")

        counts: list[list[int]] = sum_together(comm, (len(place), 2), fill).tolist()
        dead = [name for name, i in place.items() if counts[i][0] == counts[i][1]]
        trained = [shard.tensor for shard in self._shards if shard.name not in dead and shard.tensor is not None]
        self._trained = [tensor for tensor in trained if tensor.requires_grad]
        self.num_zeros, self.num_elements = map(sum, zip(*counts, strict=True))
        with together(comm):
            self._optimizer = torch.optim.AdamW(self._trained, lr=0.0, betas=_BETAS, weight_decay=0.0, fused=True)
            self.set_step(0)
            self._held = [shard.local for shard in self._shards if shard.name not in dead]
            self._zeros_before = _checksums([local == 0 for local in self._held])
        self._hold: Hold = hold_zeros(model, self._optimizer, include="*", exclude=dead, group=comm)

    def set_step(self, num_steps: int) -> None:
        """Have the optimizer know that so many steps are done; its moments are zero. Local."""
        for tensor in self._trained:
            self._optimizer.state[tensor] = {
                "step": torch.tensor(float(num_steps), dtype=torch.float32, device=local_of(tensor).device),
                **{name: torch.zeros_like(tensor) for name in _MOMENTS},
            }

    def backward(self, batch: torch.Tensor) -> tuple[float, float]:
        """Add up the gradients of the batch (windows, tokens). Return this rank's part of two sums over ranks.

        They are the mean loss of a token, and the squared norm of the gradient. Every rank must call it, with the same
        batch: it runs its part of it. Communicates what FSDP2 does. What it raises it raises at once, on its rank: the
        others may be in one of FSDP2's collectives, where they can be told only that the rank has ended.
        """
        with out_of_step() if self._comm.size > 1 else nullcontext():
            return self._backward(batch)

    def _backward(self, batch: torch.Tensor) -> tuple[float, float]:
        rank, num_ranks = self._comm.rank, self._comm.size
        mine = batch[rank::num_ranks]
        # A rank without a window keeps the others company: a sharded forward needs every rank.
        share = num_ranks / batch[:, 1:].numel() if len(mine) else 0.0
        windows = (mine if len(mine) else batch[:1]).to(local_of(self._trained[0]).device)
        with evaluating(self.model):
            loss = self._loss(windows) * share  # FSDP2 divides gradients by the number of ranks
            loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm(self._gradients())
        return float(loss.detach()) / num_ranks, float(norm) ** 2

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens."""
        on_one_rank = self._comm.size == 1 and self._compute_dtype != torch.float32
        with torch.autocast(windows.device.type, self._compute_dtype, enabled=on_one_rank):
            logits = self.model(input_ids=windows, use_cache=False).logits
        predicted = logits[:, :-1].flatten(0, 1).float()
        if self._teacher is None:
            return nn.functional.cross_entropy(predicted, windows[:, 1:].flatten(), reduction="sum")
        with torch.no_grad(), evaluating(self._teacher):
            wanted = self._teacher(input_ids=windows, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        return nn.functional.kl_div(predicted.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True)

    def step(self, learning_rate: float, norm: float) -> None:
        """Move the weights by the gradients, of this ``norm`` over all ranks, and forget them. Local."""
        for gradient in self._gradients():
            gradient.mul_(min(1.0, _LONGEST_GRADIENT / (norm + 1e-6)))
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _gradients(self) -> list[torch.Tensor]:
        return [local_of(tensor.grad) for tensor in self._trained if tensor.grad is not None]

    def finish(self) -> list[LocalShard]:
        """Hold the zeros no longer, and return all parameters. The gradients and the moments are gone. Local.

        Raises:
            RuntimeError: the zeros are not those of the beginning.
        """
        if _checksums([bits_of(local) == 0 for local in self._held]) != self._zeros_before:
            raise RuntimeError("zeros were not held: this is a bug of distprune")
        self._hold.finish()
        self._optimizer.state.clear()
        self.model.zero_grad()
        return self._shards

    def write(self, folder: Path) -> None:
        """Write the state into the new directory ``folder``. Every rank must call it; raises as :func:`write_state`."""
        with together(self._comm):
            state = self._state()
        write_state(self._comm, state, folder)

    def read(self, folder: Path, num_steps: int) -> None:
        """Read the state after ``num_steps`` steps. Every rank must call it; raises as :func:`read_state`."""
        with together(self._comm):
            self.set_step(num_steps)
            state = self._state()
        read_state(self._comm, state, folder)

    def _state(self) -> dict[str, torch.Tensor]:
        """Return weights and moments, which are views; not what follows from the number of steps."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, moments = get_state_dict(self.model, self._optimizer, options=options)
        found = {**{shard.name: weights[shard.name] for shard in self._shards}, **moments}  # tied ones once
        return {name: of for name, of in found.items() if isinstance(of, torch.Tensor) and of.dim()}


def _checksums(zeros: Sequence[torch.Tensor]) -> list[int]:
    """Return for each parameter a number that says where its zeros are on this rank."""
    return [int(checksum([where])) for where in zeros]
