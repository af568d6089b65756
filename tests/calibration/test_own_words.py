"""What a model writes: by the model's own distribution, of several kinds, and the same by the same ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distprune import allocate, own_words, prune_blocks, shrink_model
from distprune.calibration import recorded_words
from distprune.calibration.openings import BEGINNINGS, beginnings, chat_opening, texts_of, vocabulary_of
from distprune.checkpoint.hf_load import load_model, load_tokenizer
from tests.architectures import ONE_SHOT_ARCHITECTURES, VOCABULARY, samples, tiny_model
from tests.oneshot.alike import sharded
from tests.oneshot.test_tensor_parallel import parallelized
from tests.worlds import all_raise, run_threads

OTHERS = {  # states instead of keys and values; a window of attention
    "mamba": {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 8},
    "rwkv": {"hidden_size": 24, "num_hidden_layers": 2, "attention_hidden_size": 24, "intermediate_size": 40},
    "gemma2": {**ONE_SHOT_ARCHITECTURES["gemma"], "sliding_window": 4},
    "gemma4_text": {  # heads of two sizes, by layer
        **ONE_SHOT_ARCHITECTURES["gemma"],
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
}
own_words_module = sys.modules["distprune.calibration.own_words"]  # by its name it is the function
LINES = ["the", "a model", "s"]
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


def likeliest(model: nn.Module, windows: torch.Tensor, num_given: int) -> torch.Tensor:
    """Return the likeliest token for each position of ``windows``, by a forward without a cache."""
    with torch.no_grad():
        logits = model(input_ids=windows, use_cache=False).logits.float()
    return torch.cat([windows[:, :num_given], logits[:, num_given - 1 : -1].argmax(-1)], dim=1)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", *OTHERS])
@pytest.mark.filterwarnings("ignore:.*falling back")
def test_is_what_a_forward_without_a_cache_says(architecture: str) -> None:
    model: Any = tiny_model(architecture, **OTHERS.get(architecture, {})).train()
    settings, state = model.generation_config, torch.get_rng_state()
    settings.repetition_penalty, settings.max_length, settings.eos_token_id = 5.0, 3, [5, 6, 7, 8, 9]
    words = own_words(model, 3, 10, seed=4, top_k=1)
    assert (words.dtype, words.shape) == (torch.int64, (3, 10))
    assert all(module.training for module in model.modules())
    assert model.generation_config is settings
    assert torch.equal(torch.get_rng_state(), state)
    if architecture != "rwkv":  # which in evaluation mode divides its weights
        model.eval()
    assert torch.equal(words, likeliest(model, words, 1))


def step_by_step(step: Callable[[], None]) -> Callable[[], None]:
    """Stand in for ``recorded``: there is no graph on the CPU."""
    step()
    return step


def waiting(_: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("called a synchronizing CUDA operation")


@pytest.mark.parametrize(("architecture", "can"), [("llama", True), ("mixtral", True), ("gemma2", False)])
@pytest.mark.parametrize("record", [step_by_step, waiting])
def test_steps_that_are_recorded(
    monkeypatch: pytest.MonkeyPatch, architecture: str, can: bool, record: Callable[..., Any]
) -> None:
    model: Any = tiny_model(architecture, **OTHERS.get(architecture, {}))
    assert not recorded_words.can_record(model, 100)  # on the CPU
    told, written, original = list[int](), list[bool](), recorded_words.write_recorded
    words = own_words(model, 3, 20, top_k=1), own_words(model, 3, 20, prompts=samples(2, 7))

    def write(*given: Any) -> torch.Tensor | None:
        texts = original(*given)
        written.append(texts is not None)
        return texts

    monkeypatch.setattr(own_words_module, "can_record", lambda *_: True)
    monkeypatch.setattr(own_words_module, "write_recorded", write)
    monkeypatch.setattr(recorded_words, "recorded", record)
    monkeypatch.setattr(recorded_words, "_REACH", 8)
    recorded = own_words(model, 3, 20, top_k=1), own_words(model, 3, 20, prompts=samples(2, 7))
    assert written == [can and record is step_by_step] * len(written)
    assert torch.equal(recorded[0], words[0])
    assert torch.equal(recorded[1], words[1]) or record is waiting or not can  # some draws are thrown away
    own_words(model, 1, 17, progress=lambda done, _: told.append(done))
    assert told == list(range(1, 17))


@pytest.mark.gpu
def test_a_graph_writes_what_a_forward_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama").cuda()
    monkeypatch.setattr(recorded_words, "_REACH", 8)  # several graphs
    words = own_words(model, 3, 40, seed=4, top_k=1)
    assert torch.equal(words, likeliest(model, words.cuda(), 1).cpu())
    monkeypatch.setattr(model, "generate", None)
    again = own_words(model, 3, 40, seed=4, top_k=1)
    assert torch.equal(again, words)
    drawn = own_words(model, 5, 40)
    assert torch.equal(own_words(model, 5, 40), drawn)
    assert len({tuple(text) for text in drawn[:, 1:].tolist()}) == 5


def test_tokens_are_drawn_by_their_probability() -> None:
    model: Any = tiny_model("llama")
    wanted = torch.full((VOCABULARY,), -torch.inf)
    wanted[3:7] = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    model.lm_head.register_forward_hook(lambda _, __, logits: wanted.expand_as(logits))
    for temperature, top_k, shares in (
        (1.0, 9, [0.05, 0.5, 0.15, 0.3]),
        (1.0, 2, [0.0, 0.625, 0.0, 0.375]),
        (0.5, 4, [0.007, 0.685, 0.061, 0.247]),  # squares
    ):
        words = own_words(model, 100, 21, temperature=temperature, top_k=top_k)[:, 1:]
        found = torch.bincount(words.flatten(), minlength=VOCABULARY)[3:7] / words.numel()
        assert found.tolist() == pytest.approx(shares, abs=0.04)


def test_the_seed_decides() -> None:
    model, told = tiny_model("llama"), list[tuple[int, int]]()
    words = own_words(model, 5, 12, seed=3)
    assert torch.equal(own_words(model, 5, 12, seed=3), words)
    assert not torch.equal(own_words(model, 5, 12, seed=-4), words)
    prompts = samples(3, 7)
    words = own_words(model, 4, 10, prompts=prompts, progress=lambda *done: told.append(done), cache_memory=1)
    assert torch.equal(words[:3, :7], prompts)
    assert told == [(i, 18) for i in range(1, 19)]


@pytest.mark.parametrize(("length", "num_texts"), [(63, 1), (64, 2), (130, 4), (256, 4), (1000, 15)])
def test_windows_hold_texts_that_know_nothing_of_each_other(length: int, num_texts: int) -> None:
    model, size = tiny_model("llama"), -(-length // num_texts)
    (texts,) = texts_of(model, None, None, None, 2, length, 0)
    assert (texts.prompts.shape, texts.length, texts.windows) == ((2 * num_texts, 1), size, [0, 1])
    words = own_words(model, 2, length, top_k=1)
    for text in torch.split(words, size, dim=1):
        assert torch.equal(text, likeliest(model, text, 1))
    assert (own_words(model, 200, 2)[:, 0] > 2).all()  # 0, 1 and 2 are special


def test_kinds_of_windows(model_folder: Path) -> None:
    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    prompts = torch.full((2, 4), 5)
    assert chat_opening(None) == chat_opening(tokenizer) == []
    _, begun = texts_of(model, tokenizer, prompts, None, 98, 31, 0)  # beginnings stand in for chats
    known = [first for text in BEGINNINGS if (first := tokenizer(text.rstrip(" "))["input_ids"][0])]
    assert begun.windows == list(range(2, 98))
    assert sorted(begun.prompts[:, 0].tolist()) == sorted((known * 96)[:96])
    tokenizer.chat_template = CHAT
    opening = chat_opening(tokenizer)
    assert opening == tokenizer("<|user|>", add_special_tokens=False)["input_ids"]
    words = own_words(model, 8, 32, tokenizer=tokenizer, prompts=prompts)
    assert torch.equal(words[:2, :4], prompts)
    assert set(words[2::2, 0].tolist()) <= set(known)
    assert torch.equal(words[3::2, : len(opening)], torch.tensor([opening]).repeat(3, 1))
    chats = texts_of(model, tokenizer, prompts, None, 5, 600, 0)[2]
    assert (chats.prompts.tolist(), chats.length, chats.windows) == ([opening] * 2, 300, [3])
    words = own_words(model, 300, 9, tokenizer=tokenizer)  # a chat needs more room than its opening
    assert set(words[::2, 0].tolist()) == {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids} - {0, 1, 2}


def test_texts_begin_as_the_tokenizers_do(model_folder: Path) -> None:
    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    tokenizer.chat_template = CHAT
    plain = texts_of(model, tokenizer, None, LINES, 9, 64, 0)
    first = tokenizer.bos_token_id = 2
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="B $A",
        special_tokens=[("B", first)],
    )
    begun = texts_of(model, tokenizer, None, LINES, 9, 64, 0)
    for with_it, without in zip(begun, plain, strict=True):
        assert (with_it.prompts[:, 0] == first).all()
        assert torch.equal(with_it.prompts[:, 1:], without.prompts)
    tokenizer.chat_template = "{{ bos_token }}" + CHAT  # as many templates do
    said_twice = texts_of(model, tokenizer, None, LINES, 9, 64, 0)
    assert all(torch.equal(one.prompts, other.prompts) for one, other in zip(said_twice, begun, strict=True))
    words = own_words(model, 9, 64, tokenizer=tokenizer, top_k=1)
    assert all(torch.equal(row[None], likeliest(model, row[None], 30)) for row in words[3::4])  # chats
    assert (texts_of(model, tokenizer, None, None, 3, 2, 0)[0].prompts != first).all()  # no room


def check_begun(model: nn.Module, tokenizer: Any, words: torch.Tensor) -> None:
    """Check that of the six texts in ``words`` behind the first window two begin with each of ``LINES``."""
    starts, texts, numbers = tokenizer(LINES)["input_ids"], words[1:].reshape(6, 32), list[int]()
    for text in texts:
        (number,) = [i for i, start in enumerate(starts) if text[: len(start)].tolist() == start]
        numbers.append(number)
        assert torch.equal(text[None], likeliest(model, text[None], len(starts[number])))
    assert sorted(numbers) == [0, 0, 1, 1, 2, 2]


def begun_on_rank(_: int, folder: Path, way: str) -> torch.Tensor:
    model: Any = load_model(folder)
    told = list[tuple[int, int]]()
    model = sharded(model) if way == "FSDP2" else model
    how: Any = {"tokenizer": load_tokenizer(folder), "prompts": torch.full((1, 4), 5), "top_k": 1, "beginnings": LINES}
    how |= {"cache_memory": 1} if way in ("copies", "FSDP2") else {}
    if way == "recorded":
        model.generate = None
    words = own_words(model, 4, 64, **how, progress=lambda *done: told.append(done))
    assert told[-1] == (60 + 6 * 31,) * 2
    return words


@pytest.mark.parametrize("way", ["alone", "recorded", "copies", "FSDP2"])
def test_documents_begin_with_whole_lines(model_folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Over ranks each writes one text at a time: their prompts differ in length, and all take as many steps."""
    if way == "recorded":
        monkeypatch.setattr(own_words_module, "can_record", lambda *_: True)
        monkeypatch.setattr(recorded_words, "recorded", step_by_step)
    words, *others = run_threads(1 if way in ("alone", "recorded") else 2, begun_on_rank, model_folder, way)
    assert all(torch.equal(words, other) for other in others)
    check_begun(load_model(model_folder), load_tokenizer(model_folder), words)


def test_what_begins_with_tokens_that_the_model_does_not_know_is_left_out(model_folder: Path) -> None:
    """Tokens of ChatML were added to the tokenizer, and the model was not resized."""
    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    size = vocabulary_of(model)
    tokenizer.add_tokens([*(f"<{i}>" for i in range(size)), "<|user|>", "def"])
    tokenizer.chat_template = CHAT
    assert max(chat_opening(tokenizer)) >= size
    assert max(map(max, beginnings(tokenizer, None))) >= size
    kinds = texts_of(model, tokenizer, None, None, 9, 32, 0)
    assert [text.windows for text in kinds] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert own_words(model, 9, 32, tokenizer=tokenizer).max() < size
    with pytest.raises(ValueError, match="outside the model's vocabulary of 67"):
        own_words(model, 9, 32, tokenizer=tokenizer, beginnings=["def"])


def test_beginnings_that_a_tokenizer_does_not_know(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    known = {tokenizer.convert_tokens_to_ids(text[0]) for text in BEGINNINGS} - {tokenizer.unk_token_id}
    assert {ids[0] for ids in beginnings(tokenizer, None)} == known
    assert len(known) < len({text[0] for text in BEGINNINGS})
    tokenizer.decode = lambda _: "\ufffd"
    texts = texts_of(load_model(model_folder), tokenizer, torch.full((2, 4), 5), None, 98, 31, 0)
    assert [(text.prompts.shape, text.windows[0]) for text in texts] == [((2, 4), 0), ((96, 1), 2)]  # random tokens


def test_texts_are_longer_where_beginnings_are(model_folder: Path) -> None:
    """A text is at least twice as long as what it begins with."""
    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    lines, prompts = ["a" * 50, "a"], torch.full((1, 4), 5)
    _, begun = texts_of(model, tokenizer, prompts, lines, 3, 600, 0)
    assert (begun.prompts.shape, begun.length, begun.windows) == ((12, 50), 100, [1, 2])
    _, begun = texts_of(model, tokenizer, prompts, ["a"], 3, 600, 0)
    assert (begun.prompts.shape, begun.length) == ((18, 1), 67)


def written_on_rank(_: int, architecture: str, layout: str) -> list[torch.Tensor]:
    if layout == "tensor parallel":
        model = parallelized(architecture, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"])
    else:
        model = tiny_model(architecture, num_key_value_heads=2)
        model = sharded(model) if layout == "FSDP2" else model
    first = next(model.parameters())
    # Together; and one at a time, gathered block by block; and where the other rank has nothing to do.
    words = [own_words(model, 5, 8, top_k=1), own_words(model, 5, 8, top_k=1, cache_memory=1)]
    words += [own_words(model, 1, 8, top_k=1), own_words(model, 5, 8), own_words(model, 5, 8)]
    assert next(model.parameters()) is first
    return words


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("llama", "copies"), ("llama", "FSDP2"), ("mixtral", "FSDP2"), ("llama", "tensor parallel")],
)
def test_over_ranks(architecture: str, layout: str) -> None:
    model = tiny_model(architecture, num_key_value_heads=2)
    both = run_threads(2, written_on_rank, architecture, layout)
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
    *greedy, drawn, again = both[0]
    assert all(torch.equal(words, likeliest(model, words, 1)) for words in greedy)
    assert torch.equal(drawn, again)
    assert len({tuple(text) for text in drawn[:, 1:].tolist()}) == 5  # each rank has draws of its own


def failing_on_rank(rank: int, where: str) -> torch.Tensor:
    model: Any = tiny_model("llama")

    def progress(done: int, total: int) -> None:
        if rank == 1 and done == 4:
            raise OSError(f"boom {total}")

    if rank == 1 and where == "logits":
        model.lm_head.register_forward_hook(lambda _, __, logits: logits * torch.nan)
    return own_words(model, 2, 5, progress=progress if where == "progress" else None)


@pytest.mark.parametrize(
    ("where", "message"), [("logits", "NaN or Inf where it writes own words"), ("progress", "boom 8")]
)
def test_what_one_rank_raises_all_raise(where: str, message: str) -> None:
    all_raise(2, failing_on_rank, where, match=message)


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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"beginnings=\[\] must be a list of texts, one at least"),
        ("text", "beginnings='text' must be a list of texts, one at least"),
        (["a", ""], "the beginning '' has 0 tokens, where a text has 6"),
        (["a model"], "the beginning 'a model' has 7 tokens, where a text has 6"),
    ],
)
def test_beginnings_that_are_refused(model_folder: Path, lines: Any, message: str) -> None:
    model, tokenizer = load_model(model_folder), load_tokenizer(model_folder)
    with pytest.raises(ValueError, match=message):
        own_words(model, 2, 6, tokenizer=tokenizer, beginnings=lines)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        own_words(model, 2, 6, beginnings=["a"])
