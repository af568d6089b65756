"""Fine-tune a pruned Hugging Face directory over FSDP2 with its zeros held, and show perplexity before and after.

torchrun --nproc-per-node 2 launch/finetune_pruned.py build/demo/smollm2-135m-pruned --data speeches.txt \
    --eval other_speeches.txt --teacher smollm2-135m --output finetuned
With --teacher, the model learns to predict what the dense model predicts, and not the text.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distprune as prune
from distprune.checkpoint import load_model, load_tokenizer, open_directory, resolve_model, save_model, writing
from distprune.evaluation import tokenize_file

parser = argparse.ArgumentParser(description="Fine-tuning with zeros held, over FSDP2")
parser.add_argument("model", help="a directory that distprune has written")
parser.add_argument("--data", type=Path, required=True, help="text to train on")
parser.add_argument("--eval", type=Path, required=True, help="text for perplexity")
parser.add_argument("--teacher", help="the dense model")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--samples", type=int, default=4, help="windows a rank and step")
parser.add_argument("--sequence-length", type=int, default=256)
parser.add_argument("--rate", type=float, default=1e-4)
parser.add_argument("--output", type=Path)
arguments = parser.parse_args()
rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if num_ranks > 1:
    dist.init_process_group()
mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None
source = open_directory(resolve_model(arguments.model))
model = load_model(source, mesh=mesh, dtype=torch.float32)
teacher = load_model(resolve_model(arguments.teacher), mesh=mesh, dtype=torch.float32) if arguments.teacher else None
tokenizer, length = load_tokenizer(source.path), arguments.sequence_length
text = torch.tensor(tokenizer(arguments.data.read_text("utf-8"), verbose=False)["input_ids"])
evaluated = tokenize_file(tokenizer, arguments.eval, max_tokens=8192, sequence_length=length)

before = prune.perplexity(model, evaluated, sequence_length=length)
sparsity = prune.sparsity(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 - step / (arguments.steps + 1)))
hold = prune.hold_zeros(model, optimizer)
generator = torch.Generator().manual_seed(rank)  # every rank reads other windows
started = time.perf_counter()
for step in range(arguments.steps):
    starts = torch.randint(len(text) - length, (arguments.samples,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=windows, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        wanted = windows[:, 1:].flatten()
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(input_ids=windows, use_cache=False).logits[:, :-1].flatten(0, 1).float().softmax(-1)
        loss = nn.functional.cross_entropy(logits, wanted)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    decay.step()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)
seconds = time.perf_counter() - started
hold.finish()
after, left = prune.perplexity(model, evaluated, sequence_length=length), prune.sparsity(model)
if arguments.output is not None:
    with writing(arguments.output, inputs=[source.path]) as staging:
        save_model(model, source, staging, updated=[name for name, _ in model.named_parameters()])
if rank == 0:
    print(f"perplexity {before:.2f} -> {after:.2f} in {seconds:.0f} s; zeros {sparsity:.2%} -> {left:.2%}")
if num_ranks > 1:
    dist.destroy_process_group()
