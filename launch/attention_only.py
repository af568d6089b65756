"""Prune the attention of a language model alone, each matrix by itself, and leave everything else dense.

torchrun --nproc-per-node 2 launch/attention_only.py MODEL --output pruned
python launch/attention_only.py MODEL --output pruned --sparsity 0.3  # one process
"""

import argparse
import os

import torch.distributed as dist

import distprune as prune

parser = argparse.ArgumentParser(description="Pruning of attention alone")
parser.add_argument("model", help="a Hugging Face directory")
parser.add_argument("--output", required=True)
parser.add_argument("--sparsity", type=float, default=0.5)
arguments = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group()

model = prune.load(arguments.model)  # on several ranks in FSDP2 shards
# A module stands for its weights; a text such as "*.self_attn.*_proj.weight" names parameters.
attention = [module for name, module in model.named_modules() if name.endswith(("attn", "attention"))]
prune.prune_model(model, arguments.sparsity, scope="tensor", include=attention)
of_attention, of_others = prune.sparsity(model, include=attention), prune.sparsity(model, exclude=attention)
prune.save(model, arguments.output)
if rank == 0:
    print(f"{of_attention:.1%} of the attention's weights are zero, and {of_others:.1%} of the others")
if dist.is_initialized():
    dist.destroy_process_group()
