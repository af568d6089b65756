"""A checksum tells tensors apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from distprune.shards import checksum as checksums, device


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    return int(checksums.checksum(tensors))


def test_one_bit_and_order_tell() -> None:
    torch.manual_seed(0)
    values = torch.randn(140_000)
    base = checksum([values])
    assert checksum([values.clone()]) == base
    swapped, flipped = values.clone(), values.clone()
    swapped[[5, 139_000]] = values[[139_000, 5]]
    flipped.view(torch.int32)[136_000] ^= 1
    assert len({base, checksum([swapped]), checksum([flipped])}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_signs_tell(dtype: torch.dtype) -> None:
    """Also where an even number of them differs."""
    values = torch.randn(1000).to(dtype)
    two = values.clone()
    two[[3, 8]] *= -1
    assert len({checksum([values]), checksum([-values]), checksum([two])}) == 3


def test_several_tensors_and_their_order_tell() -> None:
    first, second = torch.ones(3), torch.tensor([True, False])
    assert len({checksum([first]), checksum([first, second]), checksum([second, first]), checksum([])}) == 4


def test_what_is_not_contiguous() -> None:
    values = torch.arange(200_000.0).view(400, 500)
    assert checksum([values.t()]) == checksum([values.t().clone()])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_both_parts_of_complex_numbers_tell(dtype: torch.dtype) -> None:
    values = torch.randn(1000, dtype=dtype)
    imaginary, swapped = values.clone(), values.clone()
    imaginary[900] += 1e-3j
    swapped[[5, 900]] = values[[900, 5]]
    assert len({checksum([tensor]) for tensor in (values, imaginary, swapped)}) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex64])
def test_chunks_do_not_count(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas may lie on devices of different kinds. What is read stays as it is."""
    values = torch.randn(1000).to(dtype)
    before, whole = values.clone(), checksum([values, values])
    monkeypatch.setattr(device, "_HOST_CHUNK", 7)
    assert checksum([values, values]) == whole
    assert torch.equal(values, before)
