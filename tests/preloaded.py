"""What test processes are born with: imports that take seconds, once for all of them."""

import matplotlib.backends.backend_agg
import matplotlib.figure
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import distprune.cli.main

__all__ = ["AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "distprune", "matplotlib", "torch"]
