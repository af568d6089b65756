"""Prune a language model by a score of your own: the squared change of the loss, from gradients on a text.

torchrun --nproc-per-node 2 launch/own_score.py MODEL --text speeches.txt --output pruned
python launch/own_score.py MODEL --text speeches.txt --output pruned  # one process
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from typing_extensions import override

import distprune as prune
from distprune.scores.base import Elements


class Fisher(prune.Score):
    """(w g)**2, higher = keep. It works element by element, so it is the same in every layout."""

    needs = ("gradient",)  # by default those that the parameters have

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return (elements.weight * elements["gradient"]).square()


parser = argparse.ArgumentParser(description="Pruning by a score of your own")
parser.add_argument("model", help="a Hugging Face directory")
parser.add_argument("--text", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--sparsity", type=float, default=0.5)
parser.add_argument("--samples", type=int, default=16)
parser.add_argument("--sequence-length", type=int, default=256)
arguments = parser.parse_args()
rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if "RANK" in os.environ:
    dist.init_process_group()

model = prune.load(arguments.model, dtype=torch.float32)  # on several ranks in FSDP2 shards
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
windows = prune.calibration_windows(arguments.text, tokenizer, arguments.samples, arguments.sequence_length)
if len(windows) % num_ranks:
    raise ValueError(f"--samples {len(windows)} does not divide over {num_ranks} ranks")
for window in windows[rank::num_ranks]:  # FSDP2 averages gradients over ranks
    torch.autograd.backward(model(input_ids=window[None], labels=window[None]).loss)
report = prune.prune_model(model, arguments.sparsity, score=Fisher())
prune.save(model, arguments.output)
if rank == 0:
    print(f"{report.sparsity:.1%} of the weights are zero by {report.score}")
if dist.is_initialized():
    dist.destroy_process_group()
