"""Steps of AdamW over a sharded model whose zeros are held, and all that a killed job needs to go on with them.

Nouns: the *state* is the weights and AdamW's two moments, in float32, written by torch.distributed.checkpoint so that
any number of ranks can read it. Its files are safetensors: nothing in them is unpickled, unlike the ``.metadata`` of
DCP's own format.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distprune.checkpoint.disk import sync_file
from distprune.checkpoint.output_lock import remove_tree
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator, out_of_step
from distprune.collectives.communicator import ProcessGroup
from distprune.models.evaluating import evaluating
from distprune.pruning.agreement import NamedWeights, sum_zeros
from distprune.shards.checksum import checksum
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import LocalShard, bits_of
from distprune.training.hold import Hold, hold_zeros

_FILE_BYTES = 1 << 30  # of all ranks together: a rank has its part of a file in memory twice
_BETAS = (0.9, 0.95)
_LONGEST_GRADIENT = 1.0  # longer ones are cut to this norm
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MaskedTraining:
    """Training of ``model``, in float32, whole on one rank or sharded by FSDP2 over those of ``comm``.

    With a ``teacher``, towards what it predicts, and not towards the text. Every zero is held, in every parameter, and
    one that is all zeros stays so. Without dropout, so that a step follows from its batch.

    Every rank must make one: the rounds of agreeing and of :func:`hold_zeros`, and one of 8 bytes a parameter.
    """

    def __init__(
        self, comm: Communicator, model: nn.Module, teacher: nn.Module | None, compute_dtype: torch.dtype
    ) -> None:
        self._comm, self.model, self._teacher, self._compute_dtype = comm, model, teacher, compute_dtype
        agreed = NamedWeights(model, "*").agree(comm)

        def look() -> Mapping[str, torch.Tensor]:
            self._shards = agreed.shards()
            return {shard.name: shard.local for shard in self._shards if shard.owned}

        num_of = sum_zeros(comm, agreed.roster, look)
        numel_of = {member.name: math.prod(member.global_shape) for member in agreed.roster.members}
        self.num_zeros, self.num_elements = sum(num_of.values()), sum(numel_of.values())
        dead = [name for name, num in num_of.items() if num == numel_of[name]]
        trained = [shard.tensor for shard in self._shards if shard.name not in dead and shard.tensor is not None]
        self._trained = [tensor for tensor in trained if tensor.requires_grad]
        with together(comm):
            self._optimizer = torch.optim.AdamW(self._trained, lr=0.0, betas=_BETAS, weight_decay=0.0, fused=True)
            self.set_step(0)
            self._held = [shard.local for shard in self._shards if shard.name not in dead]
            self._zeros_before = [int(checksum([local == 0])) for local in self._held]
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
        rank, num_ranks = self._comm.rank, self._comm.size
        with out_of_step() if num_ranks > 1 else nullcontext():
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
        if [int(checksum([bits_of(local) == 0])) for local in self._held] != self._zeros_before:
            raise RuntimeError("zeros were not held: this is a bug of distprune")
        self._hold.finish()
        self._optimizer.state.clear()
        self.model.zero_grad()
        return self._shards

    def write(self, folder: Path) -> None:
        """Write the state into the new directory ``folder``, on the disk. Every rank must call it: what DCP does.

        Raises:
            OSError: on every rank: the disk is full or not writable.
        """
        with together(self._comm):
            if self._comm.rank == 0:
                remove_tree(folder)
                folder.mkdir(mode=0o700)
            state, file_of, num_bytes = self._state(), dict[str, int](), 0
            for name, tensor in state.items():
                file_of[name] = 1 + num_bytes // _FILE_BYTES
                num_bytes += tensor.numel() * tensor.element_size()
        with _causes():
            writer = HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)  # which syncs its files
            save(state, storage_writer=writer, **self._ranks())
        with together(self._comm):
            sync_file(folder)

    def read(self, folder: Path, num_steps: int) -> None:
        """Read the state after ``num_steps`` steps. Every rank must call it: what DCP communicates.

        Raises:
            OSError: on every rank: a file cannot be read.
            ValueError: on every rank: a file is damaged, or lacks something.
        """
        with together(self._comm):
            self.set_step(num_steps)
            state = self._state()
        try:
            with _causes():
                load(state, storage_reader=HuggingFaceStorageReader(str(folder)), **self._ranks())
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"{folder} is not as it was written, remove {folder.parent} and start anew: {error}"
            ) from error

    def _ranks(self) -> dict[str, Any]:
        group = self._comm.group if isinstance(self._comm, ProcessGroup) else None
        return {"process_group": group, "no_dist": self._comm.size == 1}

    def _state(self) -> dict[str, Any]:
        """Return weights and moments, which are views; not what follows from the number of steps."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, moments = get_state_dict(self.model, self._optimizer, options=options)
        state = {**{shard.name: weights[shard.name] for shard in self._shards}, **moments}  # tied ones once
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}


@contextmanager
def _causes() -> Iterator[None]:
    """Raise what one rank has met, not the exception, no ``Exception``, in which DCP carries it to all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank needs none
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
