"""A tiny random model of every family of causal language models in transformers, and of others that speak.

Configurations have generic sizes, by what transformers calls its fields; what a family needs besides is in ``CHANGES``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto

from tests.worlds import drawing

__all__ = ["FAMILIES", "NOT_BUILT", "REFUSED", "family_model", "tokens"]

# Of those that read something beside text, or have an encoder: the ones that generic sizes build.
_IMAGES = """
aria aya_vision cosmos3_omni deepseek_vl exaone4_5 hyperclovax_vision_v2 idefics2 idefics3 internvl lfm2_vl lfm3_vl
lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3
ovis2 paligemma pp_chart2table qianfan_ocr qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm step3p7 video_llama_3 video_llava
vipllava
"""
_SPEECH = ["audioflamingo3", "glmasr", "musicflamingo", "qwen2_audio", "voxtral"]
_ENCODER_DECODERS = ["longt5", "m2m_100", "mt5", "pegasus_x", "switch_transformers", "t5", "t5gemma", "umt5"]
_AUTO: dict[str, Any] = {
    **dict.fromkeys(_IMAGES.split(), AutoModelForImageTextToText),
    **dict.fromkeys(["led", *_SPEECH, *_ENCODER_DECODERS], AutoModelForSeq2SeqLM),
}
FAMILIES = (*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_AUTO)

# Inputs of linear layers are multiples of 4, no two of them alike where that can be; three blocks, so that what the
# first one hands to all others is told from what each hands to the next.
_SIZES: list[tuple[Any, str]] = [
    (96, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"),
    (64, "max_source_positions attention_hidden_size mamba_d_ssm"),
    (48, "intermediate_size ffn_hidden_size ffn_dim d_ff dim_ff dff d_inner emb_dim feed_forward_size"),
    (48, "decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp dense_intermediate_size"),
    (32, "hidden_size d_model n_embd embedding_size embedding_dim input_embedding_size output_embedding_size"),
    (32, "word_embed_proj_dim lru_width adapter_in_dim adapter_out_dim adapter_input_size hidden_size_global"),
    (16, "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    (16, "shared_experts_intermediate_size moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank"),
    (16, "attention_head_dim router_hidden_size position_embedding_size"),
    (
        8,
        "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim swa_head_dim global_head_dim index_head_dim d_head d_kv",
    ),
    (8, "linear_head_dim linear_key_head_dim linear_value_head_dim dim_head kv_channels attention_head_size"),
    (8, "rotary_dim hidden_size_per_layer_input o_lora_rank hc_lowrank mamba_d_head mamba_head_dim mamba_d_state"),
    (8, "state_size ssm_state_size chunk_size mamba_chunk_size mamba_n_heads mamba_num_heads n_mamba_heads"),
    (8, "pronunciation_embed_dim pronunciation_vocab_size shape_embed_dim shape_vocab_size"),
    (8, "sliding_window attention_window_size window_size local_attn_chunk_length"),
    (8.0, "clip_qkv"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads"),
    (4, "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads index_n_heads"),
    (4, "linear_num_heads linear_num_value_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
    (3, "num_hidden_layers n_layer n_layers num_layers num_layers_per_stack num_blocks decoder_layers encoder_layers"),
    (3, "num_decoder_layers num_encoder_layers depth"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads linear_num_key_heads"),
    (2, "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts time_step_rank mamba_dt_rank o_groups"),
    (2, "pad_token_id zero_expert_num"),
    (
        1,
        "n_group topk_group n_groups mamba_n_groups first_k_dense_replace num_dense_layers n_shared_experts",
    ),
    (1, "eos_token_id"),
    (0, "bos_token_id"),
    (True, "is_decoder enable_moe_block"),
]
SIZES = {name: size for size, names in _SIZES for name in names.split()}

_LATENT = {"num_key_value_heads": 4}  # multi-head latent attention: one for each query head
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], **_LATENT}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _LATENT),
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "rope_parameters": {_SLIDING: _ROPE, _FULL: _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0}, "ffn_config": {"ffn_hidden_size": 16}},
    "deepseek_v4": {"num_key_value_heads": 1},
    "dots3_note": {
        "text_config": {**_LATENT, "layer_types": [_FULL] * 3},
        "vision_config": {"pyramid_num_routed": [-1, -1, -1]},
    },
    "dots3_note_text": {**_LATENT, "layer_types": [_FULL] * 3},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [_SLIDING, _FULL] * 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32, "patch_size": 4}
    },
    "gpt_neo": {"attention_types": [[["global"], 2], [["local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_HYBRID, "n_mamba_heads": 2},
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}

_DRAFTS = "drafts for another model, whose hidden states and keys it is given"
_OTHER_CONFIG = "AutoModelForCausalLM gives its decoder the configuration of the whole"
NOT_BUILT = {
    "gemma3n": "its vision tower needs timm; gemma3n_text is there",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _OTHER_CONFIG,
    "musicgen_melody": _OTHER_CONFIG,
}

_MORE = "is given more of what the one before puts out than hidden states"
_BETWEEN = "the model changes hidden states between them"
_LISTS = "hold blocks of the same kind"
REFUSED = {
    **dict.fromkeys(_ENCODER_DECODERS, "is an encoder-decoder model that does not run on input_ids alone"),
    "blt": _LISTS,
    "dbrx": "a DbrxExpertGLU, keep their weights in v1, w1, w2",
    "glm_moe_dsa": _MORE,
    "hrm_text": _LISTS,
    "hy_v4": _MORE,
    "reformer": _MORE,
    "xlm": _BETWEEN,
    "zaya": _MORE,
}


def family_model(family: str, **changes: Any) -> nn.Module:
    """Return a random float32 model in evaluation mode, its weights large enough that every layer matters.

    ``changes`` are to its configuration.
    """
    config = _config(CONFIG_MAPPING[family], {**CHANGES.get(family, {}), **changes})
    auto = _AUTO.get(family, AutoModelForCausalLM)
    with torch.device("meta"):
        num_weights = sum(p.numel() for p in auto.from_config(config).parameters())
    assert num_weights < 4e6, f"{family} is not tiny: {num_weights} weights"
    with drawing(0):
        model: nn.Module = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def tokens(num_samples: int = 2, length: int = 16) -> torch.Tensor:
    """Return random token ids that are no special ones, (num_samples, length) int64."""
    return torch.randint(3, 90, (num_samples, length), generator=torch.Generator().manual_seed(1))


def _config(kind: Any, changes: dict[str, Any]) -> Any:
    """Return a configuration of class ``kind`` in generic sizes, and so are those inside it."""
    names = {field.name for field in dataclasses.fields(kind)}
    found = {name: size for name, size in SIZES.items() if name in names}
    for name, part in kind.sub_configs.items():
        part = type(getattr(kind(), name)) if part is AutoConfig else part
        if dataclasses.is_dataclass(part):
            found[name] = _config(part, changes.get(name, {}))
    return kind(**{**found, **{name: value for name, value in changes.items() if name not in kind.sub_configs}})
