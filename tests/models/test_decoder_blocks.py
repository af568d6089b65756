"""Blocks are found by structure, wherever a model keeps them; what is left beside them is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from distprune import NByM
from distprune.models.decoder_blocks import decoder_blocks, warn_of_other_blocks
from distprune.models.find_shards import find_shards
from distprune.oneshot.prune_blocks import prune_blocks
from tests.architectures import VOCABULARY, samples
from tests.families import family_model


def block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))


def model(**parts: nn.Module) -> nn.Module:
    return nn.ModuleDict({"embed": nn.Embedding(9, 4), **parts, "head": nn.Linear(4, 9)})


def numbered(*keys: str) -> nn.ModuleDict:
    return nn.ModuleDict({key: block() for key in keys})


def names(of: nn.Module) -> list[str]:
    return [shard.name for shard in find_shards(of).shards]


def test_a_list_and_a_dictionary_with_numbered_keys() -> None:
    two = model(layers=nn.ModuleList([block(), block()]))
    assert [name for name, _ in decoder_blocks(two)] == ["layers.0", "layers.1"]
    stage = model(layers=numbered("4", "5"))  # as torchtitan keeps them, on the second of two stages
    assert [name for name, _ in decoder_blocks(stage)] == ["layers.4", "layers.5"]
    assert names(stage) == ["layers.4.0.weight", "layers.5.0.weight"]  # and not the head


def test_a_dictionary_of_parts_is_no_list() -> None:
    with pytest.raises(ValueError, match="no decoder blocks in Linear"):
        decoder_blocks(nn.Linear(2, 2))
    tower = model(encoder=block(), trunk=nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": nn.ModuleList([block()])}))
    assert [name for name, _ in decoder_blocks(tower)] == ["trunk.h.0"]


def test_experts_inside_blocks_are_no_blocks() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.ModuleList(block(8) for _ in range(3))) for _ in range(2))
    of = model(layers=layers)
    assert [name for name, _ in decoder_blocks(of)] == ["layers.0", "layers.1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_blocks(of)


def test_a_second_tower_is_named() -> None:
    two = model(vision=nn.ModuleList([block()]), text=nn.ModuleList([block(), block()]))
    with pytest.warns(UserWarning, match=r"blocks of 'text' are pruned; those of 'vision' are left .*include"):
        assert names(two) == ["text.0.0.weight", "text.1.0.weight"]
    assert len(find_shards(two, "*.0.weight").shards) == 3  # no warning: said what is meant


def test_a_larger_tower_of_vision() -> None:
    """The configuration says where text is read."""
    git = family_model("git", vision_config={"num_hidden_layers": 9})
    assert {name.rpartition(".")[0] for name, _ in decoder_blocks(git)} == {"git.encoder.layer"}


def test_towers_of_transformers() -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model("t5", d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCABULARY)
    with torch.random.fork_rng():
        t5 = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.warns(UserWarning, match=r"'decoder.block' are pruned; those of 'encoder.block' are left"):
        found = find_shards(t5)
    assert found.shards
    assert all(shard.name.startswith("decoder.block.") for shard in found.shards)
    with pytest.warns(UserWarning, match="'encoder.block' are left"), pytest.raises(ValueError, match="input_ids"):
        prune_blocks(t5, samples(1), method="wanda", pattern=NByM(2, 4))
