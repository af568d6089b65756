"""Train a small Llama on text, byte by byte, with the Trainer of transformers, and prune it to 80 % on the way.

torchrun --nproc-per-node 2 launch/trainer_sparse.py --text speeches.txt --output trained
python launch/trainer_sparse.py --steps 100 --output trained  # one process, on this file
python launch/trainer_sparse.py --output trained --resume  # goes on from the last checkpoint
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import distprune as prune
from distprune.training.integrations.transformers import SparseTrainingCallback

NUM_TOKENS = 128

parser = argparse.ArgumentParser(description="Sparse training with a Trainer")
parser.add_argument("--text", type=Path, default=Path(__file__))
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()
set_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
)
text = torch.frombuffer(bytearray(arguments.text.read_bytes()), dtype=torch.uint8).long()
windows = text[: len(text) // NUM_TOKENS * NUM_TOKENS].view(-1, NUM_TOKENS)

dataset = [{"input_ids": window, "labels": window} for window in windows]
options = TrainingArguments(
    output_dir=str(arguments.output),
    max_steps=arguments.steps,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=max(arguments.steps // 20, 1),
    save_steps=max(arguments.steps // 4, 1),
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
)

schedule = prune.cubic(0.8, start=arguments.steps // 5, stop=arguments.steps * 4 // 5, every=10)
callback = SparseTrainingCallback(schedule)
trainer = Trainer(model=LlamaForCausalLM(config), args=options, train_dataset=dataset, callbacks=[callback])
trainer.train(resume_from_checkpoint=arguments.resume or None)
trainer.save_model()
sparsity = prune.sparsity(trainer.model)
if trainer.is_world_process_zero():
    print(f"{sparsity:.1%} of the weights in the layers are zero")
if dist.is_initialized():
    dist.destroy_process_group()
