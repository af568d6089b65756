"""What a model is made of: decoder blocks, linear layers, experts; and which parameters to prune. No communication."""

from distprune.models.cross_entropy import cross_entropy
from distprune.models.decoder_blocks import check_one_stack, decoder_blocks, other_blocks, warn_of_other_blocks
from distprune.models.evaluating import evaluating, keeping_weights, needing_gradients, replacing_forwards
from distprune.models.experts import check_experts, expert_gradients, expert_inputs, expert_matrix
from distprune.models.find_shards import (
    Found,
    NamePattern,
    bare_model,
    check_model,
    count_parameters,
    find_shards,
    is_sharded,
)
from distprune.models.linear_layers import UNUSUAL, LinearLayer, dense_weights, expert_place, linear_layers
from distprune.models.named_model import model_of_names
from distprune.models.runnable import check_not_offloaded, check_runs_on_tokens
from distprune.models.sizes import num_bytes, text_config
from distprune.models.units import UNIT_KINDS, Cut, UnitKind, Units, find_all_units, find_units, head_dim
from distprune.models.weights import expert_weights, matrix_of_weight

__all__ = [
    "UNIT_KINDS",
    "UNUSUAL",
    "Cut",
    "Found",
    "LinearLayer",
    "NamePattern",
    "UnitKind",
    "Units",
    "bare_model",
    "check_experts",
    "check_model",
    "check_not_offloaded",
    "check_one_stack",
    "check_runs_on_tokens",
    "count_parameters",
    "cross_entropy",
    "decoder_blocks",
    "dense_weights",
    "evaluating",
    "expert_gradients",
    "expert_inputs",
    "expert_matrix",
    "expert_place",
    "expert_weights",
    "find_all_units",
    "find_shards",
    "find_units",
    "head_dim",
    "is_sharded",
    "keeping_weights",
    "linear_layers",
    "matrix_of_weight",
    "model_of_names",
    "needing_gradients",
    "num_bytes",
    "other_blocks",
    "replacing_forwards",
    "text_config",
    "warn_of_other_blocks",
]
