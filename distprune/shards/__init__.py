"""Where my elements sit: every layout reduced to flat indices. No communication."""

from distprune.shards.census import Census, take_census
from distprune.shards.decoder_blocks import decoder_blocks
from distprune.shards.geometry import Geometry, Runs, Split, runs_of_splits
from distprune.shards.layouts import is_held, local_shard
from distprune.shards.local_shard import LocalShard, chunk_size, flat_chunk, flat_chunks

__all__ = [
    "Census",
    "Geometry",
    "LocalShard",
    "Runs",
    "Split",
    "chunk_size",
    "decoder_blocks",
    "flat_chunk",
    "flat_chunks",
    "is_held",
    "local_shard",
    "runs_of_splits",
    "take_census",
]
