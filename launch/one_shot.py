"""Prune a language model in one shot from Python, in shards, and say what that costs on windows it has not seen.

torchrun --nproc-per-node 2 launch/one_shot.py MODEL --text speeches.txt --output pruned
python launch/one_shot.py MODEL --text speeches.txt --output pruned --pattern 2:4  # one process
"""

import argparse
import os

import torch.distributed as dist
from transformers import AutoTokenizer

import distprune as prune

parser = argparse.ArgumentParser(description="One-shot pruning from Python")
parser.add_argument("model", help="a Hugging Face directory")
parser.add_argument("--text", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--sparsity", type=float, default=0.5)
parser.add_argument("--pattern", default="unstructured", help="or 2:4, which says itself how much is pruned")
parser.add_argument("--samples", type=int, default=128)
parser.add_argument("--sequence-length", type=int, default=512)
arguments = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group()

model = prune.load(arguments.model)  # on several ranks in FSDP2 shards
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
num_windows = arguments.samples + 8
windows = prune.calibration_windows(arguments.text, tokenizer, num_windows, arguments.sequence_length)
held_out, samples = windows[:8], windows[8:]

before = prune.perplexity(model, held_out)
sparsity = None if ":" in arguments.pattern else arguments.sparsity
report = prune.prune_blocks(model, samples, sparsity, pattern=arguments.pattern)
after = prune.perplexity(model, held_out)
prune.save(model, arguments.output)  # from_pretrained reads it
if rank == 0:
    print(report)
    print(f"{report.sparsity:.1%} of the weights are zero; perplexity {before:.2f} before, {after:.2f} after")
if dist.is_initialized():
    dist.destroy_process_group()
