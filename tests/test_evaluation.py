"""Perplexity is that of one process, however the windows are spread."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from distprune.checkpoint import load_model
from distprune.evaluation import perplexity, tokenize_file
from tests.models import TEXT, make_model, make_tokenizer
from tests.worlds import ProcessPool


def on_rank(_: int, folder: Path, tokens: torch.Tensor) -> float:
    world_size = torch.distributed.get_world_size()
    model = load_model(folder, mesh=init_device_mesh("cpu", (world_size,)))
    return perplexity(model, tokens, sequence_length=8)


def test_equals_the_definition(tmp_path: Path) -> None:
    folder, tokens = make_model(tmp_path), torch.arange(50) % 60 + 3
    model: Any = load_model(folder)
    losses = []
    with torch.no_grad():
        for window in tokens[:48].view(6, 8):
            log_probabilities = model(window[None]).logits[0, :-1].double().log_softmax(-1)
            losses += [-float(row[target]) for row, target in zip(log_probabilities, window[1:], strict=True)]
    wanted = math.exp(sum(losses) / len(losses))
    assert perplexity(model, tokens, sequence_length=8) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_does_not_depend_on_the_ranks(tmp_path: Path, pool: ProcessPool, world_size: int) -> None:
    folder, tokens = make_model(tmp_path), torch.arange(60) % 60 + 3  # 7 windows: uneven over 2, 3 and 4
    wanted = perplexity(load_model(folder), tokens, sequence_length=8)
    results = pool.run(world_size, on_rank, folder, tokens)
    assert results == [pytest.approx(wanted, rel=1e-5)] * world_size
    assert len(set(results)) == 1


def test_bad_input(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path))
    with pytest.raises(ValueError, match="make no window"):
        perplexity(model, torch.arange(5), sequence_length=6)
    with pytest.raises(ValueError, match="two tokens or more"):
        perplexity(model, torch.arange(5), sequence_length=1)
    with pytest.raises(ValueError, match="outside the model's vocabulary of 67"):
        perplexity(model, torch.tensor([1, 2, 67]), sequence_length=3)


def test_tokenize_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(make_model(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tmp_path / "text"
    text.write_text(TEXT)
    tokens = tokenize_file(tokenizer, text, max_tokens=100, sequence_length=10)
    assert tokens.tolist() == tokenizer(TEXT)["input_ids"][:100]
    with pytest.raises(ValueError, match="holds 100 tokens; an evaluation needs at least one window of 101"):
        tokenize_file(tokenizer, text, max_tokens=100, sequence_length=101)
    with pytest.raises(FileNotFoundError, match="no text file"):
        tokenize_file(tokenizer, tmp_path / "nothing", max_tokens=100, sequence_length=10)
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        tokenize_file(tokenizer, text, max_tokens=100, sequence_length=10)
