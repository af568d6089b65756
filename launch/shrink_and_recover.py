"""Remove a quarter of a language model's MLP channels, then train what is left towards the model it was.

torchrun --nproc-per-node 2 launch/shrink_and_recover.py MODEL --text speeches.txt --output smaller
python launch/shrink_and_recover.py MODEL --text speeches.txt --output smaller --steps 10  # one process
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import kl_div
from transformers import AutoTokenizer

import distprune as prune

parser = argparse.ArgumentParser(description="Shrink, then recover")
parser.add_argument("model", help="a Hugging Face directory")
parser.add_argument("--text", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--mlp", type=float, default=0.75, help="the share of channels that stay")
parser.add_argument("--samples", type=int, default=128)
parser.add_argument("--sequence-length", type=int, default=512)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=4, help="windows of each rank")
arguments = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group()

# On several ranks both are in FSDP2 shards.
model, teacher = (prune.load(arguments.model, dtype=torch.float32) for _ in range(2))
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
num_windows = 8 + 2 * arguments.samples
windows = prune.calibration_windows(arguments.text, tokenizer, num_windows, arguments.sequence_length)
held_out, samples, to_train = windows[:8], windows[8::2], windows[9::2]  # what was fitted to teaches less
dense = prune.perplexity(model, held_out)
shrunk = prune.shrink_model(model, samples, mlp=arguments.mlp)
before = prune.perplexity(model, held_out)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # made now: the parameters are new ones
generator = torch.Generator().manual_seed(rank)  # every rank reads other windows
for step in range(arguments.steps):
    batch = to_train[torch.randint(len(to_train), (arguments.batch_size,), generator=generator)]
    with torch.no_grad():
        wanted = teacher(input_ids=batch).logits.log_softmax(dim=-1).flatten(0, 1)
    found = model(input_ids=batch).logits.log_softmax(dim=-1).flatten(0, 1)
    loss = kl_div(found, wanted, reduction="batchmean", log_target=True)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 20 == 0:
        print(f"step {step}: {loss.item():.3f} nats from the dense model", flush=True)

after = prune.perplexity(model, held_out)
prune.save(model, arguments.output, source=arguments.model)
if rank == 0:
    print(f"{shrunk.num_parameters:,} of {shrunk.num_parameters_before:,} parameters are left; perplexity {dense:.2f}")
    print(f"before, {before:.2f} without these channels, {after:.2f} after {arguments.steps} steps")
if dist.is_initialized():
    dist.destroy_process_group()
