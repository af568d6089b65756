"""Train a small transformer on text, byte by byte, over FSDP2, and prune it to 80 % on the way.

torchrun --nproc-per-node 2 launch/train_sparse_fsdp2.py --text speeches.txt --output trained
torchrun --nproc-per-node 4 launch/train_sparse_fsdp2.py --text speeches.txt --output trained --resume  # killed before
python launch/train_sparse_fsdp2.py --steps 100 --output trained  # one process, on this file
"""

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

import distprune as prune

WIDTH, NUM_BLOCKS, NUM_TOKENS = 128, 4, 128


class Bytes(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(NUM_TOKENS, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(block) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 256)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x: torch.Tensor = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


parser = argparse.ArgumentParser(description="Sparse training over FSDP2")
parser.add_argument("--text", type=Path, default=Path(__file__))
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoints, which all ranks see")
parser.add_argument("--save-every", type=int, default=200, help="steps")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, on any number of ranks")
arguments = parser.parse_args()
rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = Bytes()
if num_ranks > 1:
    dist.init_process_group()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = prune.cubic(0.8, start=arguments.steps // 5, stop=arguments.steps * 4 // 5, every=10)
training = prune.SparseTraining(model, optimizer, schedule=schedule)


def state() -> dict[str, Any]:
    """Return all that a run goes on from: a SparseTraining is Stateful, and its zeros are in the weights."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "training": training}


if arguments.resume:
    finished = sorted(arguments.output.glob("step-*/.metadata"))  # written last
    if not finished:
        raise FileNotFoundError(f"{arguments.output} holds no checkpoint to resume from")
    loaded = state()
    load(loaded, checkpoint_id=finished[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

text = torch.frombuffer(bytearray(arguments.text.read_bytes()), dtype=torch.uint8).long()
for step in range(training.step, arguments.steps):
    generator = torch.Generator().manual_seed(step * num_ranks + rank)  # every rank and step reads other windows
    starts = torch.randint(len(text) - NUM_TOKENS - 1, (8,), generator=generator)
    windows = torch.stack([text[start : start + NUM_TOKENS + 1] for start in starts])
    logits = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {schedule(step):.1%} zeros", flush=True)
    if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
        save(state(), checkpoint_id=arguments.output / f"step-{step + 1:06}")

training.finish()
sparsity = prune.sparsity(model)
if rank == 0:
    print(f"{sparsity:.1%} of the weights in the layers are zero")
if num_ranks > 1:
    dist.destroy_process_group()
