"""The order of an MLP's channels: N:M keeps more in it, a block puts out the same, all numbers of ranks find it."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distprune import l1_unstructured, prune_blocks
from distprune.collectives import Alone, communicator
from distprune.models import decoder_blocks
from distprune.oneshot.channel_order import _assigned, channel_order, find_channels, move_channels
from distprune.oneshot.rows import Rows
from distprune.shards import Runs
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.oneshot.alike import matrices, sharded
from tests.oneshot.test_tensor_parallel import wrapped
from tests.worlds import ProcessPool, run_threads
from tests.wrapped import whole

TOKENS = samples(5)


def kept(weight: torch.Tensor, square_sums: torch.Tensor, order: torch.Tensor, n: int, m: int) -> float:
    """Return the mean share of a row's w^2 x^2 that N:M keeps in this order."""
    sizes = weight.double().square() * square_sums.double()
    shares = (sizes / sizes.sum(1, keepdim=True))[:, order].view(len(weight), -1, m)
    return float(shares.topk(n, dim=2).values.sum()) / len(weight)


def drawn(num_out: int, num_in: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and sums of squares whose neighbours are alike, as if a bad order had been chosen."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator) * torch.linspace(0.2, 3, num_in)
    return weight, torch.rand(num_in, generator=generator) + 0.1


def rows_of(weight: torch.Tensor, start: int = 0, stop: int | None = None, *, owned: bool = True) -> Rows:
    runs: Runs = ((start, len(weight) if stop is None else stop),)
    return Rows(weight[start:stop].clone(), runs, len(weight), owned, "block.down")


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4), (3, 4)])
def test_more_is_kept(n: int, m: int) -> None:
    weight, sums = drawn(24, 96)
    order = channel_order(Alone(), rows_of(weight), sums, n, m)
    assert sorted(order.tolist()) == list(range(96))
    before, after = (kept(weight, sums, of, n, m) for of in (torch.arange(96), order))
    assert 1 - after < 0.75 * (1 - before)


def test_near_the_best_there_is() -> None:
    shares: list[float] = []
    for seed in range(8):
        weight, sums = drawn(6, 8, seed)
        parts = [(0, *some) for some in itertools.combinations(range(1, 8), 3)]
        orders = [torch.tensor([*part, *(set(range(8)) - set(part))]) for part in parts]
        every = [kept(weight, sums, order, 2, 4) for order in orders]
        found = kept(weight, sums, channel_order(Alone(), rows_of(weight), sums, 2, 4), 2, 4)
        shares.append((found - statistics.median(every)) / (max(every) - statistics.median(every)))
    assert min(shares) > 0
    assert statistics.fmean(shares) > 0.6


@pytest.mark.parametrize("num", [2, 3, 8, 13])
def test_no_exchange_of_two_gains_more(num: int) -> None:
    for seed in range(4):
        gains = np.random.default_rng(seed).integers(0, 1000, (num, num))
        goes_to = _assigned(gains)
        assert sorted(goes_to) == list(range(num))
        total = gains[np.arange(num), goes_to].sum()
        assert total >= np.trace(gains)
        if num == 3:
            totals = [sum(gains[i, of] for i, of in enumerate(p)) for p in itertools.permutations(range(3))]
            assert total >= sorted(totals)[-3]
        elif num == 2:
            assert total == max(np.trace(gains), np.trace(gains[::-1]))


def on_thread(rank: int, weight: torch.Tensor, sums: torch.Tensor) -> tuple[list[int], int, int]:
    start, stop = (0, 10, 10, 24)[rank : rank + 2] if rank < 3 else (0, 24)
    comm = communicator(None)
    order = channel_order(comm, rows_of(weight, start, stop, owned=rank < 3), sums, 2, 4)
    return order.tolist(), comm.traffic.num_rounds, comm.traffic.num_bytes


def test_any_number_of_ranks_finds_the_same() -> None:
    """Rows are shared out unevenly; a rank that has a copy of them counts none."""
    weight, sums = drawn(24, 96)
    alone = channel_order(Alone(), rows_of(weight), sums, 2, 4).tolist()
    for order, num_rounds, num_bytes in run_threads(4, on_thread, weight, sums):
        assert order == alone
        assert (num_rounds, num_bytes) == (8, 8 * (96 + 1) + 6 * 8 * (24 * 24 + 1) + 64)


def moved(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Turn the channels of every MLP around; return what the model puts out then, and its matrices, whole."""
    comm = communicator(None) if torch.distributed.is_initialized() else Alone()
    for _, block in decoder_blocks(model):
        found = find_channels(model, block, matrices_of(block), 2)
        for units in found.values():
            move_channels(comm, block, units, torch.arange(units.num_units).flip(0))
        assert found
    with torch.no_grad():
        logits: Any = model(input_ids=TOKENS, use_cache=False).logits
    return whole(logits), {name: whole(weight) for name, weight in matrices(model).items()}


def matrices_of(block: nn.Module) -> list[str]:
    return [name for name, _ in block.named_modules()]


def moved_on_rank(_: int, layout: str, architecture: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return moved(sharded(tiny_model(architecture)) if layout == "fsdp" else wrapped(layout, architecture))


@pytest.mark.parametrize(
    ("num_ranks", "layout", "architecture"),
    [
        (1, "plain", "llama"),
        (1, "plain", "gpt2"),
        (1, "plain", "phi3"),
        (2, "fsdp", "llama"),
        (2, "fsdp", "gpt2"),
        (2, "tp", "llama"),
        (4, "fsdp-tp", "llama"),
    ],
)
def test_a_block_puts_out_the_same(pool: ProcessPool, num_ranks: int, layout: str, architecture: str) -> None:
    """Whose weights are elsewhere, biases with them."""
    changes = {"num_key_value_heads": 2} if "tp" in layout else {}
    changes = ONE_SHOT_ARCHITECTURES["llama"] if architecture == "phi3" else changes  # whose gates and ups are fused
    dense = tiny_model(architecture, **changes)
    with torch.no_grad():
        wanted: Any = dense(input_ids=TOKENS, use_cache=False).logits
    found = (
        [moved(tiny_model(architecture, **changes))]
        if num_ranks == 1
        else pool.run(num_ranks, moved_on_rank, layout, architecture)
    )
    before = matrices(dense)
    for logits, weights in found:
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
        for name, weight in weights.items():
            last = name.rpartition(".")[2]
            if last in ("down_proj", "c_proj") and "mlp" in name:
                assert torch.equal(weight, before[name].flip(1))
            elif last in ("gate_proj", "up_proj", "c_fc"):
                assert torch.equal(weight, before[name].flip(0))


def test_what_cannot_change_places() -> None:
    model = tiny_model("llama")
    block = decoder_blocks(model)[0][1]
    names = matrices_of(block)
    assert list(find_channels(model, block, names, 4)) == ["mlp.down_proj"]
    width = len(block.get_parameter("mlp.up_proj.weight"))
    for of, m in ((names, width), (names, width - 1), (["mlp.up_proj"], 4)):
        assert not find_channels(model, block, of, m)
    changed: Any = decoder_blocks(model)[2][1]
    assert find_channels(model, changed, names, 4)
    changed.mlp.adapter = nn.Linear(width, 3, bias=False)
    assert not find_channels(model, changed, names, 4)
    del changed.mlp.adapter
    l1_unstructured(changed.mlp.gate_proj, "weight", 0.5)
    assert not find_channels(model, changed, names, 4)
    other: Any = decoder_blocks(model)[1][1]
    other.mlp.up_proj.weight = block.get_parameter("mlp.up_proj.weight")
    assert not find_channels(model, block, names, 4)
    experts = tiny_model("mixtral")
    of_experts = decoder_blocks(experts)[0][1]
    assert not find_channels(experts, of_experts, matrices_of(of_experts), 2)


@pytest.mark.parametrize(
    ("permute", "pattern", "message"),
    [("mlp", "row", "patterns such as '2:4'"), ("heads", "2:4", "is none of mlp, none")],
)
def test_refused(permute: Any, pattern: str, message: str) -> None:
    sparsity = None if pattern == "2:4" else 0.5
    with pytest.raises(ValueError, match=message):
        prune_blocks(tiny_model("llama"), TOKENS, sparsity, pattern=pattern, permute=permute)


def test_the_reader_loses_less() -> None:
    reports = [
        prune_blocks(tiny_model("llama"), TOKENS, method="wanda", pattern="2:4", permute=permute)
        for permute in ("none", "mlp")
    ]
    assert [report.permute for report in reports] == ["none", "mlp"]
    before, after = (report.blocks[0].layers[-1] for report in reports)
    assert before.name == after.name == "model.layers.0.mlp.down_proj"
    assert before.relative_error is not None
    assert after.relative_error is not None
    assert after.relative_error < before.relative_error
