"""Tiny random language models on disk, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["ARCHITECTURES", "TEXT", "make_model", "make_tokenizer"]

TEXT = "the state of the union is strong and the people of the nation are at work " * 40

# Sizes that no number of ranks from 2 to 4 divides evenly.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "gpt2": {"n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "bloom": {"hidden_size": 20, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt_neox": {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
    "opt": {
        "hidden_size": 20,
        "word_embed_proj_dim": 20,
        "ffn_dim": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    # Its experts are stored apart, and one parameter in the model.
    "mixtral": {
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 5,
    },
}


def make_model(
    folder: Path,
    architecture: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    max_shard_size: str = "5GB",
    seed: int = 0,
    **sizes: int,
) -> Path:
    """Write a random model and return its directory; weights are rounded so that many are equal."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        architecture,
        vocab_size=67,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=tied,
        **{**ARCHITECTURES[architecture], **sizes},
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 16).round() / 32)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters into a model directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    characters = ["<unk>", *sorted(set(TEXT))]
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    (folder / "tokenizer_config.json").write_text(text)
