"""Where this rank's elements sit: every layout reduced to flat indices. No communication, but to gather (FSDP2)."""

from distprune.shards.checksum import checksum
from distprune.shards.device import (
    SMALL,
    Arriving,
    all_finite,
    are_finite,
    batches,
    by_accelerator,
    chunk_size,
    count_true,
    fetched,
    is_joined,
    is_small,
    is_zero,
    on_host,
    row_chunks,
    sent,
    sent_together,
)
from distprune.shards.flat_param import find_flat_parts, is_flattened
from distprune.shards.fsdp2 import Fsdp2Params, Managed, own_params
from distprune.shards.fsdp2_forward import gather, kept_gathered, reset_forward, take_roots
from distprune.shards.fsdp2_resize import drop_modules, even_parts, resize
from distprune.shards.geometry import Geometry, Runs, Split, chunk_runs, in_order, indices_of, runs_of, runs_of_splits
from distprune.shards.in_step import in_step
from distprune.shards.layouts import (
    dtensor_like,
    is_held,
    is_laid_out_like,
    local_of,
    local_part,
    local_shard,
    ranks_along,
    splits_of,
)
from distprune.shards.local_shard import (
    LocalShard,
    Ownership,
    as_array,
    bits_of,
    bytes_of,
    count_zeros,
    cut,
    flat_chunk,
    flat_chunks,
)
from distprune.shards.matrix import LocalMatrix, Matrix
from distprune.shards.own_settings import own_settings, plain_attention
from distprune.shards.parameter_range import ParameterRange, gradients_of, ranges_of
from distprune.shards.pieces import grain_of, pieces_of, share_of, within
from distprune.shards.select import KeptIndices, select
from distprune.shards.staged import fetch_in_turn, send_in_turn
from distprune.shards.torch_private import private

__all__ = [
    "SMALL",
    "Arriving",
    "Fsdp2Params",
    "Geometry",
    "KeptIndices",
    "LocalMatrix",
    "LocalShard",
    "Managed",
    "Matrix",
    "Ownership",
    "ParameterRange",
    "Runs",
    "Split",
    "all_finite",
    "are_finite",
    "as_array",
    "batches",
    "bits_of",
    "by_accelerator",
    "bytes_of",
    "checksum",
    "chunk_runs",
    "chunk_size",
    "count_true",
    "count_zeros",
    "cut",
    "drop_modules",
    "dtensor_like",
    "even_parts",
    "fetch_in_turn",
    "fetched",
    "find_flat_parts",
    "flat_chunk",
    "flat_chunks",
    "gather",
    "gradients_of",
    "grain_of",
    "in_order",
    "in_step",
    "indices_of",
    "is_flattened",
    "is_held",
    "is_joined",
    "is_laid_out_like",
    "is_small",
    "is_zero",
    "kept_gathered",
    "local_of",
    "local_part",
    "local_shard",
    "on_host",
    "own_params",
    "own_settings",
    "pieces_of",
    "plain_attention",
    "private",
    "ranges_of",
    "ranks_along",
    "reset_forward",
    "resize",
    "row_chunks",
    "runs_of",
    "runs_of_splits",
    "select",
    "send_in_turn",
    "sent",
    "sent_together",
    "share_of",
    "splits_of",
    "take_roots",
    "within",
]
