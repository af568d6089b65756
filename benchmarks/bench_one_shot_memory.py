"""Peak memory of one-shot pruning and of removal, with few and many decoder blocks: what a rank needs beyond its shard.

python -m benchmarks.bench_one_shot_memory --output benchmarks/results/one_shot_memory_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from benchmarks.measure import heading, on_ranks, peak_memory, shard, show, table, unpin
from distprune import Unstructured
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.estimate import estimate
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import OneShotMethod, Recipe
from distprune.removal.shrink_model import shrink_model

SIZE, INNER, NUM_SAMPLES, LENGTH, VOCABULARY = 576, 1536, 16, 256, 4096  # a block of SmolLM2-135M

NUM_BLOCKS = {"shrink": (8, 30), "wanda": (4, 16, 32), "sparsegpt": (4, 16, 32), "admm": (4, 16, 32)}
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": "0"}  # glibc's variables
EXPLANATION = f"""
MiB a rank: the peak of anonymous memory beyond the model's shard, from which the call begins. First with glibc
told to return freed memory at once: what is in use. Then as it is: what has been freed stays with the
process until it is 32 MiB larger than after the first block, because every page costs time to get anew.
Beside them what the library estimates ("shrink" has no plan), and sizes: the statistics of one block (float64), one
block's weights whole (float32), the rank's share of one block's activations; the shard for comparison.
On 2 ranks FSDP2 gathers the first block into a
buffer and copies it out of it, to learn how blocks are called, so it is there twice for a moment. SparseGPT's
factors (float32) follow its statistics one by one; the rows that it sweeps are there in float32, too. ADMM prunes
layer by layer, towards the dense model's outputs: of its activations there are two streams, and four times as much of
what the layers of a block are given and add to. "shrink" is shrink_model, by OBS with its refit: a quarter of the
MLP channels goes, and parameters are cut. It needs what ADMM does, and for the choice twice X^T X more. Blocks of
SmolLM2-135M's size, {NUM_SAMPLES} samples of {LENGTH}
tokens.

"""


def run(_: int, num_ranks: int, method: str, num_blocks: int) -> dict[str, int]:
    """Prune a random Llama of ``num_blocks``, or make it smaller; return the peak and its parts, in bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if num_ranks == 1:
        unpin()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=SIZE,
        intermediate_size=INNER,
        num_hidden_layers=num_blocks,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).eval()
    linears = list(linear_layers(decoder_blocks(model)[0][1]).values())
    inputs = {of_layer.num_in for of_layer in linears}  # of the widths; three inputs share the smaller one
    block = 4 * sum(of_layer.num_out * of_layer.num_in for of_layer in linears)
    shard(model)
    samples = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what building the model left behind would hide what pruning takes
    size = 4 * sum(parameter.numel() for parameter in model.parameters()) // num_ranks
    planned = 0
    with peak_memory() as peak:
        if method == "shrink":
            shrink_model(model, samples, mlp=0.75)
        else:
            recipe = Recipe(method=cast(OneShotMethod, method), pattern=Unstructured(0.5)).resolved()
            terms = estimate(model, recipe, NUM_SAMPLES, LENGTH, num_ranks)
            planned = sum(terms.values()) - terms["shard of the weights"]
            prune_blocks(model, samples, method=cast(OneShotMethod, method), pattern=Unstructured(0.5))
    words = {
        "wanda": 0,
        "sparsegpt": 3 * min(inputs) ** 2 + max(inputs) ** 2,
        "shrink": 3 * max(inputs) ** 2 + max(inputs) * min(inputs),
        "admm": max(inputs) ** 2 + max(inputs) * min(inputs),  # of the last layer: its inputs, and its targets
    }
    return {
        "peak": peak.num_bytes,
        "planned": planned,
        "statistics": 8 * words[method],
        "block": block,
        "activations": 4 * NUM_SAMPLES // num_ranks * LENGTH * SIZE,
        "shard": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(NUM_BLOCKS), choices=NUM_BLOCKS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[tuple[Any, ...]] = []
    for method in arguments.methods:
        for num_ranks in (1, 2):
            for num_blocks in NUM_BLOCKS[method]:
                what = num_ranks, run, num_ranks, method, num_blocks
                with patch.dict(os.environ, RETURN_MEMORY):
                    in_use = max(result["peak"] for result in on_ranks(*what))
                found = max(on_ranks(*what), key=lambda result: result["peak"])
                mebi = [f"{num_bytes / 2**20:.0f}" for num_bytes in (in_use, *found.values())]
                rows.append((method, num_ranks, num_blocks, *mebi))
                print(rows[-1], flush=True)
    columns = (
        "method",
        "ranks",
        "blocks",
        "peak in use",
        "peak",
        "planned",
        "statistics",
        "block",
        "activations",
        "model shard",
    )
    text = heading("Memory of one-shot pruning and removal", "python -m benchmarks.bench_one_shot_memory")
    text += EXPLANATION + table(columns, rows)
    show(text, arguments.output)


if __name__ == "__main__":
    main()
