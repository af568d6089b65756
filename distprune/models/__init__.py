"""What a model is made of: decoder blocks, linear layers, experts; and which parameters to prune. No communication."""

from distprune.models.decoder_blocks import decoder_blocks, warn_of_other_blocks
from distprune.models.evaluating import evaluating, keeping_weights
from distprune.models.find_shards import Found, NamePattern, find_shards
from distprune.models.linear_maps import LinearMap, dense_weights, expert_inputs, linear_maps
from distprune.models.weights import EXPERT_WEIGHTS, is_experts, matrix_of_weight

__all__ = [
    "EXPERT_WEIGHTS",
    "Found",
    "LinearMap",
    "NamePattern",
    "decoder_blocks",
    "dense_weights",
    "evaluating",
    "expert_inputs",
    "find_shards",
    "is_experts",
    "keeping_weights",
    "linear_maps",
    "matrix_of_weight",
    "warn_of_other_blocks",
]
