"""Tiny random causal language models of every architecture that one-shot pruning is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.worlds import drawing

__all__ = ["ONE_SHOT_ARCHITECTURES", "VOCABULARY", "samples", "tiny_model"]

VOCABULARY = 97

_ROTARY = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED = {**_ROTARY, "num_key_value_heads": 1}
_EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}

# Inputs of every Linear in a block are multiples of 8, so that 2:4 and 4:8 fit; 24 and 40 are no powers of two.
ONE_SHOT_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "num_hidden_layers": 3},
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},  # heads smaller than hidden_size / num_heads: o_proj is 24 x 16
    "gemma": {**_GROUPED, "head_dim": 16},  # larger: o_proj is 24 x 32
    "phi": _ROTARY,
    "opt": {
        "hidden_size": 24,
        "word_embed_proj_dim": 16,  # other than hidden_size: projections before the first block and after the last
        "ffn_dim": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {**_ROTARY, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 24, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mixtral": {**_GROUPED, **_EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {
        **_GROUPED,
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],  # a dense block beside one of experts
    },
}


def tiny_model(architecture: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a random float32 model in evaluation mode, its weights large enough that every layer matters.

    It is the same on every rank. ``changes`` are to its configuration.
    """
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **{**ONE_SHOT_ARCHITECTURES.get(architecture, {}), **changes},
    )
    with drawing(seed):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def samples(num_samples: int, length: int = 16, seed: int = 1) -> torch.Tensor:
    """Return random token ids, (num_samples, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (num_samples, length), generator=generator)
