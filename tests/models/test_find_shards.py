"""Which parameters are meant, and what the caller must know to decide for all ranks together."""

from __future__ import annotations

from torch import nn

from distprune.models import find_shards


def stage(num_blocks: int) -> nn.ModuleDict:
    parts: dict[str, nn.Module] = {"norm": nn.LayerNorm(4), "head": nn.Linear(4, 9)}
    if num_blocks:
        parts["layers"] = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(num_blocks))
    return nn.ModuleDict(parts)


def test_a_stage_says_whether_it_has_blocks() -> None:
    """A stage of the norm and the head alone would prune its head; the caller hears of other ranks' blocks."""
    first, last = find_shards(stage(2)), find_shards(stage(0))
    assert [shard.name for shard in first.shards] == ["layers.0.0.weight", "layers.1.0.weight"]
    assert (first.by_default, first.has_blocks) == (True, True)
    assert [shard.name for shard in last.shards] == ["head.weight"]
    assert (last.by_default, last.has_blocks) == (True, False)
    said = find_shards(stage(0), include=["head.*"])
    assert (said.by_default, said.has_blocks) == (False, False)


def test_a_bare_pattern_is_a_list_of_one() -> None:
    model = stage(2)
    found = find_shards(model, "layers.*", "*.bias")
    assert [shard.name for shard in found.shards] == ["layers.0.0.weight", "layers.1.0.weight"]
    assert found.patterns == [("layers.*", 4), ("*.bias", 4)]
    head = find_shards(model, model["head"])
    assert [shard.name for shard in head.shards] == ["head.weight"]
    assert head.patterns == [(model["head"], 1)]
