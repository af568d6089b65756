"""What a model writes follows from the seed, the window and the position, on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import T5Config, T5ForConditionalGeneration

from distprune import allocate, own_words, prune_blocks, shrink_model
from distprune.calibration.own_words import texts_of
from distprune.calibration.token_choice import choose, draw
from distprune.models.decoder_blocks import decoder_blocks
from tests.architectures import ONE_SHOT_ARCHITECTURES, VOCABULARY, samples, tiny_model
from tests.oneshot.test_tensor_parallel import parallelized
from tests.worlds import ProcessPool, run_threads

OTHERS = {  # states instead of keys and values; a window of attention
    "mamba": {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 8},
    "rwkv": {"hidden_size": 24, "num_hidden_layers": 2, "attention_hidden_size": 24, "intermediate_size": 40},
    "gemma2": {**ONE_SHOT_ARCHITECTURES["gemma"], "sliding_window": 4},
}


def by_hand(model: nn.Module, windows: torch.Tensor, num_given: int, seed: int, top_k: int) -> torch.Tensor:
    """Return the tokens that a forward without a cache says for each position of ``windows``."""
    with torch.no_grad():
        logits = model(input_ids=windows, use_cache=False).logits.float()
    expected = windows.clone()
    for position in range(num_given, windows.shape[1]):
        at = [[draw(seed, window, position)] for window in range(len(windows))]
        tokens, _ = choose(logits[:, position - 1], torch.tensor(at, dtype=torch.float64), 1.0, top_k)
        expected[:, position] = tokens[:, 0]
    return expected


@pytest.mark.parametrize("architecture", ["llama", "mixtral", *OTHERS])
@pytest.mark.filterwarnings("ignore:.*falling back")
def test_is_what_a_forward_without_a_cache_says(architecture: str) -> None:
    model: Any = tiny_model(architecture, **OTHERS.get(architecture, {})).train()
    settings, state = model.generation_config, torch.get_rng_state()
    settings.repetition_penalty, settings.max_length, settings.eos_token_id = 5.0, 3, [5, 6, 7, 8, 9]
    found = own_words(model, 3, 10, seed=4, top_k=20)
    assert found.dtype == torch.int64
    assert found.shape == (3, 10)
    assert all(module.training for module in model.modules())
    assert model.generation_config is settings
    assert torch.equal(torch.get_rng_state(), state)
    if architecture != "rwkv":  # which in evaluation mode divides its weights
        model.eval()
    assert torch.equal(found, by_hand(model, found, 1, 4, 20))


def test_windows_of_one_batch_are_as_each_by_itself() -> None:
    model = tiny_model("llama").double()
    at_once = own_words(model, 5, 12)
    assert torch.equal(own_words(model, 5, 12, cache_memory=1), at_once)
    assert torch.equal(own_words(model, 3, 12), at_once[:3])
    assert not torch.equal(own_words(model, 5, 12, seed=1), at_once)
    assert (own_words(model, 200, 2)[:, 0] > 2).all()  # 0, 1 and 2 are special


@pytest.mark.parametrize(("length", "num_texts"), [(63, 1), (64, 2), (130, 4), (256, 4)])
def test_windows_hold_texts_that_know_nothing_of_each_other(length: int, num_texts: int) -> None:
    model, told = tiny_model("llama").double(), list[tuple[int, int]]()
    each = -(-length // num_texts)
    assert texts_of(2, length) == (2 * num_texts, each)
    found = own_words(model, 2, length, progress=lambda *done: told.append(done))
    assert found.shape == (2, length)
    starts = found[:, ::each].flatten()
    wanted = own_words(model, len(starts), each, prompts=starts[:, None])
    assert torch.equal(found, wanted.view(2, -1)[:, :length])
    assert told[-1] == (2 * num_texts * (each - 1),) * 2


def test_continues_prompts_and_tells_how_far_it_is() -> None:
    model, prompts, told = tiny_model("llama"), samples(3, 7), list[tuple[int, int]]()
    found = own_words(model, 3, 10, prompts=prompts, progress=lambda *done: told.append(done), cache_memory=1)
    assert torch.equal(found[:, :7], prompts)
    assert torch.equal(found, by_hand(model, found, 7, 0, 1000))
    assert told == [(i, 9) for i in range(1, 10)]


def test_tokens_are_drawn_by_their_probability() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64)
    at = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    for temperature, top_k, wanted in (
        (1.0, 9, [50, 500, 150, 300]),
        (1.0, 2, [0, 625, 0, 375]),
        (0.5, 4, [7, 685, 61, 247]),  # squares
    ):
        tokens, _ = choose(probabilities.log().expand(1000, 4), at, temperature, top_k)
        assert torch.bincount(tokens[:, 0], minlength=4).tolist() == wanted
    equal, _ = choose(torch.zeros(2, 4), torch.tensor([[0.0], [0.999]], dtype=torch.float64), 1.0, 4)
    assert equal.tolist() == [[0], [3]]  # of equal ones the lower number first
    drawn = torch.tensor([draw(0, window, 1) for window in range(4000)], dtype=torch.float64)
    assert torch.histc(drawn, 4, 0, 1).sub(1000).abs().max() < 120


def sharded(architecture: str, layout: str, **changes: Any) -> nn.Module:
    if layout == "tensor parallel":
        return parallelized(architecture, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"])
    model = tiny_model(architecture, **changes)
    if layout == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for _, block in decoder_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def written_on_rank(_: int, architecture: str, layout: str) -> list[torch.Tensor]:
    model = sharded(architecture, layout, num_key_value_heads=2)
    first = next(model.parameters())
    # Together; and one at a time, gathered block by block.
    found = [own_words(model, 5, 8), own_words(model, 5, 8, cache_memory=1)]
    assert torch.equal(own_words(model, 1, 8), found[0][:1])  # the other rank has nothing to do
    assert next(model.parameters()) is first
    return found


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("llama", "copies"), ("llama", "FSDP2"), ("mixtral", "FSDP2"), ("llama", "tensor parallel")],
)
def test_same_on_two_ranks(pool: ProcessPool, architecture: str, layout: str) -> None:
    wanted = own_words(tiny_model(architecture, num_key_value_heads=2), 5, 8)
    for found in pool.run(2, written_on_rank, architecture, layout):
        assert all(torch.equal(words, wanted) for words in found)


def failing_on_rank(rank: int, where: str) -> torch.Tensor:
    model: Any = tiny_model("llama")

    def progress(done: int, total: int) -> None:
        if rank == 1 and done == 4:
            raise OSError(f"boom {total}")

    if rank == 1 and where == "forward":
        model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    elif rank == 1 and where == "logits":
        model.lm_head.register_forward_hook(lambda _, __, logits: logits * torch.nan)
    return own_words(
        model, 2, 5, seed=rank if where == "seed" else 0, progress=progress if where == "progress" else None
    )


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("forward", "division by zero"),
        ("logits", "NaN or Inf where it writes text 1"),
        ("progress", "boom 8"),
        ("seed", "different arguments: asked"),
    ],
)
def test_what_one_rank_raises_all_raise(where: str, message: str) -> None:
    for error in run_threads(2, failing_on_rank, where, catch=True):
        assert message in str(error)


def failing_while_gathered(rank: int) -> str:
    model: Any = sharded("llama", "FSDP2", num_key_value_heads=2)
    handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0) if rank == 1 else None
    try:
        own_words(model, 4, 6, cache_memory=1)
    except (RuntimeError, ZeroDivisionError) as error:
        if handle is not None:
            handle.remove()
        assert own_words(model, 1, 4).shape == (1, 4)  # the model goes on
        return str(error)
    return ""


def test_what_one_rank_raises_between_gathers_all_raise(pool: ProcessPool) -> None:
    assert all("division by zero" in said for said in pool.run(2, failing_while_gathered))


def test_what_cannot_write_is_refused() -> None:
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 30}
    with pytest.raises(NotImplementedError, match="T5ForConditionalGeneration is an encoder-decoder"):
        own_words(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), 2, 4)
    with pytest.raises(NotImplementedError, match="Linear does not generate"):
        own_words(nn.Linear(2, 2), 2, 4)
    model: Any = tiny_model("llama", max_position_embeddings=8)
    with pytest.raises(NotImplementedError, match="LlamaModel does not generate"):
        own_words(model.model, 2, 4)
    arguments: dict[str, Any]
    for arguments, message in (
        ({"sequence_length": 9}, "longer than the model's 8 positions"),
        ({"sequence_length": 1}, "leaves nothing to write behind 1 given"),
        ({"samples": 0}, "samples=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"prompts": samples(3, 2)}, r"must be \(2, 1 or more tokens\), not \(3, 2\)"),
        ({"prompts": torch.full((2, 2), VOCABULARY)}, "outside the model's vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            own_words(model, **{"samples": 2, "sequence_length": 5} | arguments)
    with pytest.raises(TypeError, match="seed must be an int"):
        own_words(model, 2, 5, seed=0.5)  # type: ignore[arg-type]
    model.config = SimpleNamespace(is_encoder_decoder=False)
    with pytest.raises(NotImplementedError, match="says no vocab_size"):
        own_words(model, 2, 5)


CALLS: dict[str, Any] = {
    "prune_blocks": lambda model, given: prune_blocks(model, given, method="wanda", pattern="2:4"),
    "allocate": lambda model, given: allocate(model, given, 0.5),
    "shrink_model": lambda model, given: shrink_model(model, given, mlp=0.5),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.sampled(1)
def test_samples_that_the_model_writes(call: str) -> None:
    models = [tiny_model("llama", max_position_embeddings=12, num_hidden_layers=1) for _ in range(2)]
    words = own_words(models[0], 128, 12)
    found = [CALLS[call](model, given) for model, given in zip(models, (words, "self"), strict=True)]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert call != "allocate" or found[0] == found[1]
    with pytest.raises(ValueError, match=r"samples='text\.txt' is neither token ids nor 'self'; .*calibration_windows"):
        CALLS[call](models[0], "text.txt")


def called_on_rank(rank: int, call: str) -> None:
    CALLS[call](tiny_model("llama"), "self" if rank == 0 else samples(2, 4))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.sampled(1)
def test_samples_that_one_rank_alone_has(call: str) -> None:
    for error in run_threads(2, called_on_rank, call, catch=True):
        assert isinstance(error, ValueError)
        assert "called with different arguments" in str(error)
