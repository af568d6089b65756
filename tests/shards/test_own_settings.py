"""Our own arithmetic has its own settings, and the process gets its own back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from distprune.shards import device
from distprune.shards.device import ordered_attention, own_settings

BACKENDS: Any = torch.backends
OURS = ("ieee", "ieee", torch.float32)


def settings() -> tuple[object, ...]:
    return BACKENDS.cuda.matmul.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision, torch.get_default_dtype()


def fused() -> tuple[bool, ...]:
    """Return which fused kernels of attention may run."""
    cuda = BACKENDS.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()


def older() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "unknown"


@pytest.fixture(autouse=True)
def _as_torch_begins() -> Iterator[None]:
    before = settings(), BACKENDS.fp32_precision
    for product in (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul):
        product.fp32_precision = "none"  # tests before may have left another
    yield
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    BACKENDS.fp32_precision = "none"
    for of, precision in zip((BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul), before[0], strict=False):
        of.fp32_precision = precision
    assert (settings(), BACKENDS.fp32_precision) == before


def set_high_and_mkldnn() -> None:
    torch.set_float32_matmul_precision("high")
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"


SETTINGS: dict[str, Callable[[], None]] = {
    "medium": partial(torch.set_float32_matmul_precision, "medium"),
    "high": partial(torch.set_float32_matmul_precision, "high"),
    "high, mkldnn bf16": set_high_and_mkldnn,
    "allow_tf32": partial(setattr, BACKENDS.cuda.matmul, "allow_tf32", True),
    "cuda tf32": partial(setattr, BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "all tf32": partial(setattr, BACKENDS, "fp32_precision", "tf32"),
    "mkldnn bf16": partial(setattr, BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "default dtype": partial(torch.set_default_dtype, torch.bfloat16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_products_on_a_device_are_of_full_precision(name: str) -> None:
    a = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    SETTINGS[name]()
    with own_settings():
        product = (a.cuda() @ a.cuda()).cpu()
    assert float((product.double() - a.double() @ a.double()).abs().max()) < 1e-3  # TF32: some 0.03


@pytest.mark.parametrize("set_it", SETTINGS.values(), ids=[*SETTINGS])
def test_are_put_back(set_it: Callable[[], None]) -> None:
    set_it()
    before = settings(), older()

    @own_settings()
    def look(*, again: bool) -> None:
        assert {*settings()} <= {*OURS, "none"}
        assert older() == "highest"
        if not again:
            raise ValueError("of the body")
        look(again=False)

    with pytest.raises(ValueError, match="of the body"):
        look(again=True)
    assert (settings(), older()) == before


def test_what_follows_a_general_setting_goes_on_to() -> None:
    BACKENDS.fp32_precision = "tf32"
    with own_settings():
        assert settings() == OURS
    BACKENDS.fp32_precision = "none"
    assert settings() == ("none", "none", torch.float32)


@pytest.mark.parametrize(
    ("within", "look", "ours"),
    [
        pytest.param(own_settings, settings, OURS, id="precision"),
        pytest.param(lambda: ordered_attention(torch.device("meta")), fused, (False, False, False), id="attention"),
    ],
)
def test_last_thread_puts_back_what_belongs_to_the_process(
    within: Callable[[], AbstractContextManager[None]], look: Callable[[], tuple[object, ...]], ours: tuple[object, ...]
) -> None:
    torch.set_float32_matmul_precision("medium")
    before, steps, seen = look(), [threading.Event() for _ in range(2)], []
    assert before != ours

    def first() -> None:
        with within():
            steps[0].set()
            steps[1].wait(10)
        seen.append(look())  # the other one is within

    thread = threading.Thread(target=first)
    thread.start()
    steps[0].wait(10)
    with within():
        steps[1].set()
        thread.join(10)
        seen.append(look())
    assert seen == [ours, ours]
    assert look() == before


def test_autocast_forgets_weights_that_were_written_to() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(1, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x).any()
        with own_settings():
            assert not torch.is_autocast_enabled("cpu")
            linear.weight.zero_()
            linear.bias.zero_()
        assert torch.is_autocast_enabled("cpu")
        assert not linear(x).any()


def test_fused_attention_is_deterministic_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that of the CPU: before its backward pass, behind it, and at the end."""
    switch = "set_deterministic_debug_mode"
    monkeypatch.setattr(device, "_HOST_TYPES", ())
    monkeypatch.setattr(device, "_attention", [nullcontext()] * 2)
    query, key = (torch.ones(1, 2, 4, 8, requires_grad=True) for _ in range(2))
    with patch.object(torch, switch, return_value=None) as switched, ordered_attention(torch.device("cpu")):
        output = nn.functional.scaled_dot_product_attention(query * 2, key, key)
        torch.autograd.grad(output[:, :, 1:].sum(), (query, key))
    assert [call.args[0] for call in switched.call_args_list] == ["error", 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "has_mask"), [(64, False), (60, False), (64, True)], ids=["", "padded", "masked"])
def test_attention_on_a_device_has_the_same_bits_each_time(size: int, *, has_mask: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape, bfloat16 = (2, 4, 1024, size), torch.bfloat16
    inputs = [torch.randn(shape, generator=generator, device="cuda", dtype=bfloat16) for _ in range(3)]
    mask = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").tril() if has_mask else None
    found = []
    for _ in range(8):
        query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
        with ordered_attention(query.device):
            output = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=not has_mask)
            found.append(torch.cat([part.flatten() for part in torch.autograd.grad(output.sum(), leaves)]))
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.get_deterministic_debug_mode() == 0
