"""A checksum tells tensors apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from distprune import shards


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    return int(shards.checksum(tensors))


def test_one_bit_and_order_tell() -> None:
    torch.manual_seed(0)
    values = torch.randn(140_000)
    base = checksum([values])
    assert checksum([values.clone()]) == base
    swapped, flipped = values.clone(), values.clone()
    swapped[[5, 139_000]] = values[[139_000, 5]]
    flipped.view(torch.int32)[136_000] ^= 1
    assert len({base, checksum([swapped]), checksum([flipped])}) == 3


def test_several_tensors_and_their_order_tell() -> None:
    first, second = torch.ones(3), torch.tensor([True, False])
    assert len({checksum([first]), checksum([first, second]), checksum([second, first]), checksum([])}) == 4


def test_what_is_not_contiguous() -> None:
    values = torch.arange(200_000.0).view(400, 500)
    assert checksum([values.t()]) == checksum([values.t().clone()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.bool])
def test_what_is_read_stays_as_it_is(dtype: torch.dtype) -> None:
    values = torch.randn(1000).to(dtype)
    before = values.clone()
    checksum([values])
    assert torch.equal(values, before)


def test_chunks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas may lie on devices of different kinds."""
    values = torch.randn(1000)
    whole = checksum([values, values])
    monkeypatch.setattr(shards.device, "_HOST_CHUNK", 7)
    assert checksum([values, values]) == whole


def digest(*tensors: torch.Tensor) -> bytes:
    checksum = shards.HostChecksum()
    for tensor in tensors:
        checksum.add(tensor)
    return checksum.digest()


def test_on_the_host_alone() -> None:
    torch.manual_seed(0)
    values = torch.randn(140_000).bfloat16()  # 280,000 bytes are five sums in every lane, and some
    bits = values.view(torch.int16)
    found = {digest(values), digest(values, values), digest(values[:-1]), digest(values[1:])}
    for place in (0, 3, 70_000, 139_999):
        flipped, negated = bits.clone(), values.clone()
        flipped[place] ^= 1
        negated[place] *= -1
        found |= {digest(flipped), digest(negated)}
    for first, second in ((0, 1), (0, 4), (5, 5 + (1 << 15)), (0, 139_999)):  # in a word, a row and a lane
        swapped = values.clone()
        swapped[[first, second]] = values[[second, first]]
        found.add(digest(swapped))
    assert len(found) == 4 + 8 + 4
    assert digest(bits.clone()) == digest(values) == digest(values.view(-1, 2).t().clone().t())


def test_on_the_host_it_does_not_matter_how_values_are_cut() -> None:
    values = torch.randn(2_200_000).bfloat16()  # over two stretches
    whole = digest(values)
    for sizes in ([1, 3, 4083, 4084, 2_000_000], [1_050_000], [7] * 1200):
        assert digest(*torch.split(values, [*sizes, len(values) - sum(sizes)])) == whole
    page, pages = 2048, values.view(torch.int16).clone()
    pages[:page], pages[2 * page : 3 * page] = values.view(torch.int16)[2 * page : 3 * page], pages[:page].clone()
    assert digest(pages) != whole
