"""Counts over a shard, by value."""

from __future__ import annotations

import torch

from distprune.shards import Census, LocalShard, checksum, local_shard, take_census


def replica(tensor: torch.Tensor) -> LocalShard:
    return local_shard("w", tensor).owned_by(0, 0, 2)


def census_of(tensor: torch.Tensor) -> Census:
    shard = replica(tensor)
    return take_census(shard, zeros_of=shard.local)


def test_counts() -> None:
    values = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, torch.nan])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        census = census_of(values.to(dtype))
        assert (census.num_nans, census.num_zeros) == (2, 2)
    assert census_of(torch.tensor([0, 3, 0])).num_zeros == 2
    assert census_of(torch.empty(0)).num_zeros == 0


def test_counts_of_what_is_not_contiguous() -> None:
    values = torch.arange(200_000.0).view(400, 500) % 7
    assert census_of(values.t()).num_zeros == int((values == 0).sum())


def test_zeros_of_a_mask() -> None:
    values, mask = torch.tensor([0.0, 1.0, torch.nan]), torch.tensor([True, False, False])
    census = take_census(replica(values), zeros_of=mask)
    assert (census.num_nans, census.num_zeros) == (1, 2)
    unread = take_census(replica(values), zeros_of=mask, reads_values=False)
    assert (unread.num_nans, unread.num_zeros) == (0, 2)
    assert unread.checksum == checksum(mask) != checksum(~mask)
    assert take_census(replica(values)).num_zeros == 0


def test_checksum_tells_one_bit_and_order() -> None:
    torch.manual_seed(0)
    values = torch.randn(70_000)
    base = take_census(replica(values)).checksum
    assert take_census(replica(values.clone())).checksum == base
    swapped, flipped = values.clone(), values.clone()
    swapped[[5, 69_000]] = values[[69_000, 5]]
    flipped.view(torch.int32)[66_000] ^= 1
    assert len({base, take_census(replica(swapped)).checksum, take_census(replica(flipped)).checksum}) == 3


def test_no_checksum_where_nobody_else_holds_it() -> None:
    assert take_census(local_shard("w", torch.ones(3)).owned_by(0, 0, 1)).checksum == 0
