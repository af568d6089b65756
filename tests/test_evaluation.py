"""Perplexity is that of one process, however the windows are spread."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from distprune.checkpoint.hf_load import load_model
from distprune.evaluation import Continuation, log_likelihoods, perplexities, perplexity
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.hf_models import make_model
from tests.oneshot.test_tensor_parallel import parallelized
from tests.worlds import ProcessPool, drawing


def on_rank(_: int, folder: Path, tokens: torch.Tensor) -> float:
    world_size = torch.distributed.get_world_size()
    model = load_model(folder, mesh=init_device_mesh("cpu", (world_size,)))
    return perplexity(model, tokens, sequence_length=8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.sampled(2)
def test_does_not_depend_on_the_ranks(tmp_path: Path, pool: ProcessPool, world_size: int) -> None:
    folder, tokens = make_model(tmp_path), torch.arange(60) % 60 + 3  # 7 windows: uneven over 2, 3 and 4
    wanted = perplexity(load_model(folder), tokens, sequence_length=8)
    results = pool.run(world_size, on_rank, folder, tokens)
    assert results == [pytest.approx(wanted, rel=1e-5)] * world_size
    assert len(set(results)) == 1


VOCABULARY = 11


class Bigram(nn.Module):
    """A language model that looks at one token; counts its forwards."""

    def __init__(self, positions: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=positions)
        self.num_forwards = 0

    @override
    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.num_forwards += 1
        return SimpleNamespace(logits=self.table(input_ids))


def make_bigram() -> Bigram:
    with drawing(0):
        return Bigram()


def make_tokens(num_tokens: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(1))


def by_hand(model: Bigram, tokens: torch.Tensor, length: int) -> float:
    """Every window's tokens but its first, each from the one before it."""
    log_p = model.table.weight.detach().double().log_softmax(dim=1)
    predicted = [log_p[tokens[i - 1], tokens[i]] for i in range(len(tokens) // length * length) if i % length != 0]
    return math.exp(-float(torch.stack(predicted).mean()))


@pytest.mark.parametrize(("num_tokens", "length"), [(60, 6), (64, 6), (6, 6), (7, 2), (1300, 600)])
def test_equals_the_sum_by_hand(num_tokens: int, length: int) -> None:
    model, tokens = make_bigram(), make_tokens(num_tokens)
    assert perplexity(model, tokens, sequence_length=length) == pytest.approx(by_hand(model, tokens, length), rel=1e-6)


def test_windows_of_several_texts_share_forwards() -> None:
    model, texts = make_bigram(), [make_tokens(13), make_tokens(6) + 1, make_tokens(20) % 7]
    texts = [tokens % VOCABULARY for tokens in texts]
    found = perplexities(model, texts, sequence_length=6, batch_tokens=30)
    assert found == [pytest.approx(by_hand(model, tokens, 6), rel=1e-6) for tokens in texts]
    assert model.num_forwards == 1  # 2 + 1 + 3 windows of 5 inputs
    with pytest.raises(ValueError, match="4 tokens make no window"):
        perplexities(model, [*texts, make_tokens(4)], sequence_length=6)


def test_windows_of_a_batch_do_not_see_each_other() -> None:
    model, tokens = tiny_model("llama"), samples(9)
    found = [perplexity(model, tokens, batch_tokens=num) for num in (1, 40, 10**6)]
    assert found == [pytest.approx(found[0], rel=1e-6)] * 3


def test_leaves_no_gradient_and_reports_progress() -> None:
    model, seen = make_bigram(), []
    perplexity(model, make_tokens(60), sequence_length=20, progress=lambda *done: seen.append(done), batch_tokens=40)
    assert seen == [(2, 3), (3, 3)]
    assert model.table.weight.grad is None


def test_overflow_and_nan_are_said_as_they_are() -> None:
    model = make_bigram()
    nn.init.zeros_(model.table.weight)
    with torch.no_grad():
        model.table.weight[:, 0] = 1e4
    assert perplexity(model, torch.full((6,), 1), sequence_length=6) == math.inf
    nn.init.constant_(model.table.weight, math.nan)
    assert math.isnan(perplexity(model, make_tokens(60), sequence_length=6))


@pytest.mark.parametrize(
    ("num_tokens", "length", "message"),
    [
        *(
            (num, length, r"make no window of sequence_length=.*two tokens")
            for num, length in ((5, 6), (0, 6), (60, 1), (60, 0))
        ),
        (60, 7, "sequences of 7 tokens are longer than the model's 6 positions"),
    ],
)
def test_windows_that_are_none(num_tokens: int, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(Bigram(positions=6), make_tokens(num_tokens), sequence_length=length)
    assert perplexity(Bigram(positions=6), make_tokens(60), sequence_length=6) > 1
    with pytest.raises(ValueError, match="outside the model's vocabulary of 11"):
        perplexity(Bigram(positions=6), torch.tensor([1, 2, VOCABULARY]), sequence_length=3)


def replicated(_: int, num_windows: int) -> tuple[float, int]:
    model = make_bigram()
    return perplexity(model, make_tokens(6 * num_windows), sequence_length=6, batch_tokens=12), model.num_forwards


# More windows than ranks, unevenly; fewer windows than ranks.
@pytest.mark.parametrize("num_windows", [1, 2, 7])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.sampled(4)
def test_same_over_any_number_of_ranks(pool: ProcessPool, world_size: int, num_windows: int) -> None:
    wanted, _ = replicated(0, num_windows)
    results = pool.run(world_size, replicated, num_windows)
    most = min(2, -(-num_windows // world_size))  # windows in a forward: what fits, and no rank idle for it
    for value, num_forwards in results:
        assert value == results[0][0]
        assert value == pytest.approx(wanted, rel=1e-12)
        assert num_forwards == -(-num_windows // most // world_size)  # on every rank: a sharded forward needs all


@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
@pytest.mark.sampled(6)
def test_what_shares_a_forward_is_as_each_by_itself(architecture: str) -> None:
    model, tokens = tiny_model(architecture), samples(5).flatten()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    alone, together = (perplexity(model, tokens, sequence_length=16, batch_tokens=most) for most in (1, 34))
    assert together == pytest.approx(alone, rel=1e-6)
    assert sizes == [1] * 5 + [2, 2, 1]
    by_one, at_once = (log_likelihoods(model, ragged(), batch_tokens=most) for most in (1, 4096))
    torch.testing.assert_close(at_once, by_one, rtol=1e-5, atol=1e-5)


def ragged() -> list[Continuation]:
    """Continuations of all lengths, the shortest of one token from one."""
    rows = [row[:length] for row, length in zip(samples(7), (2, 9, 16, 3, 16, 5, 12), strict=True)]
    return [Continuation(row[:-1], row[1 + (len(row) - 2) // 2 :]) for row in rows]


def test_log_likelihoods_of_all_lengths(pool: ProcessPool) -> None:
    asked = ragged()
    model, wanted = tiny_model("llama", num_key_value_heads=2), []
    with torch.no_grad():
        for one in asked:
            log_p = model(input_ids=one.inputs[None]).logits[0].double().log_softmax(-1)[-len(one.targets) :]
            greedy = torch.equal(log_p.argmax(-1), one.targets)
            wanted.append([float(log_p.gather(1, one.targets[:, None]).sum()), float(greedy)])
            best = log_p.argmax(-1)[-1:]  # what is most likely is said to be
            assert log_likelihoods(model, [Continuation(one.inputs, best)])[0, 1] == 1
    for most in (1, 30, 4096):
        torch.testing.assert_close(
            log_likelihoods(model, asked, batch_tokens=most),
            torch.tensor(wanted),
            rtol=1e-5,
            atol=1e-5,
            check_dtype=False,
        )
    for scored in pool.run(2, ragged_on_rank):
        torch.testing.assert_close(scored, torch.tensor(wanted), rtol=1e-5, atol=1e-5, check_dtype=False)


def ragged_on_rank(_: int) -> torch.Tensor:
    model = tiny_model("llama", num_key_value_heads=2)
    torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return log_likelihoods(model, ragged(), batch_tokens=30)


def parallel_on_rank(rank: int, shape: tuple[int, ...], tokens: torch.Tensor) -> float:
    del rank
    model = parallelized("llama", init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])["tp"])
    return perplexity(model, tokens, sequence_length=16)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["tp", "copies of tp"])
def test_ranks_of_one_sample_run_the_same_windows(pool: ProcessPool, shape: tuple[int, ...]) -> None:
    tokens = samples(5).flatten()
    wanted = perplexity(tiny_model("llama", num_key_value_heads=2), tokens, sequence_length=16)
    results = pool.run(math.prod(shape), parallel_on_rank, shape, tokens)
    assert results == [pytest.approx(wanted, rel=1e-5)] * math.prod(shape)
