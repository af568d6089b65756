"""What a model is made of: decoder blocks, linear maps, experts, and which parameters are meant. No communication."""

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import NamePattern, find_shards
from distprune.models.linear_maps import LinearMap, expert_inputs, linear_maps
from distprune.models.weights import EXPERT_WEIGHTS, is_conv1d, is_experts, matrix_of_weight

__all__ = [
    "EXPERT_WEIGHTS",
    "LinearMap",
    "NamePattern",
    "decoder_blocks",
    "expert_inputs",
    "find_shards",
    "is_conv1d",
    "is_experts",
    "linear_maps",
    "matrix_of_weight",
]
