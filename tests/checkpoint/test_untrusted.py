"""Directories from elsewhere: no code of theirs runs, and whatever is wrong with them is said in one line."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hf_load import build_on_meta, load_model, load_tokenizer
from distprune.checkpoint.inspect import inspect_directory
from tests.hf_models import make_model, make_tokenizer
from tests.sampling import only_whole
from tests.worlds import all_raise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code in the model directory that leaves a mark when it runs; whoever is asked whether it may says yes."""
    mark = folder.parent / "mark"
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return mark


@pytest.mark.parametrize("what", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_what_needs_code_of_its_own(folder: Path, code: Path, what: str) -> None:
    model_type = "t5" if what == "AutoModelForCausalLM" else "evil"  # transformers knows T5, but as no causal model
    change(folder / "config.json", model_type=model_type, architectures=None)
    name = "tokenizer_config.json" if what == "AutoTokenizer" else "config.json"
    change(
        folder / name, tokenizer_class="Evil", auto_map={what: ["evil.Evil", None] if "Tok" in what else "evil.Evil"}
    )
    with pytest.raises(ValueError, match=rf"{name}: .*evil\.Evil.*trust_remote_code=True and call distprune"):
        (load_tokenizer if what == "AutoTokenizer" else load_model)(folder)
    assert not code.exists()


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "org/kernel@v1:function"},
        {"_attn_implementation_internal": "org/kernel"},
        {"attn_implementation": {"": "eager", "text_config": "org/kernel"}},
        {"text_config": {"attn_implementation": "org/kernel"}},
        {"layers": [{"experts_implementation": "org/kernel"}]},
    ],
)
def test_kernels_from_the_hub(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(ValueError, match=r"implementation.*org/kernel"):
        load_model(folder)


def test_known_implementations(folder: Path) -> None:
    change(folder / "config.json", attn_implementation="eager")
    model: Any = load_model(folder)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("place", ["", "text_config"])
def test_quantized_models(folder: Path, key: str, place: str) -> None:
    value = {key: {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    change(folder / "config.json", **({place: value} if place else value))
    with pytest.raises(NotImplementedError, match=r"quantized \(.*bitsandbytes.*dequantize"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_integer_weights(folder: Path, dtype: torch.dtype | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj\.weight' .* is torch\.int8: integer weights"):
        load_model(folder, dtype=dtype)


def test_copies_that_differ(tmp_path: Path) -> None:
    """One rank reads another model of the same shapes: nobody loads anything."""
    for name, seed in (("one", 0), ("other", 1)):
        make_model(tmp_path / name, max_shard_size="10KB", seed=seed)

    def load(rank: int) -> None:
        load_model(tmp_path / ("other" if rank == 1 else "one"))

    all_raise(3, load, kind=ValueError, match=r"weights \(256 KiB of each file\)")


def test_a_model_that_is_no_causal_language_model_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llava"}')
    message = (
        "no model that transformers can load: it builds no causal language model of type 'llava'; --streamed prunes "
        "the weights alone, and distprune.prune_model a model that you load yourself; its own save_pretrained saves it$"
    )
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert len(str(caught.value)) < 300 + len(str(folder))


def test_more_layers_than_tensors(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ValueError, match="layers cannot be made of"):
        load_model(folder)


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "3", "\x00", '{"model_type": "llama", "architectures": 7}', "[" * 900 + "]" * 900]
)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.sampled(10)
def test_files_that_hold_no_object(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with_one_line_errors(folder)


def with_one_line_errors(folder: Path) -> int:
    """Read the directory in every way; return how many ways fail."""
    ways: list[Callable[[], object]] = [
        lambda: load_model(open_directory(folder)),
        lambda: build_on_meta(open_directory(folder)),
        lambda: load_tokenizer(folder),
        lambda: inspect_directory(folder),
    ]
    errors = []
    for way in ways:
        try:
            way()
        except (ValueError, OSError, NotImplementedError) as error:
            errors.append(str(error))
    assert all("\n" not in error and len(error) < 2000 for error in errors), errors
    return len(errors)


VALUES: list[Any] = [None, True, -1, 0, 3, 1e308, "", "x", "org/x", [], ["x", 1], {}, {"x": [1]}, 2**70, "\ud800", "\n"]


@pytest.fixture
def no_log() -> Iterator[None]:
    """transformers logs what it reads, and pytest's workers cannot report what is no text."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("name", [*FILES, "model.safetensors"])
@pytest.mark.parametrize("seed", [0, only_whole(1), only_whole(2)])
@pytest.mark.sampled(2)
def test_damaged_files(folder: Path, name: str, seed: int) -> None:
    """Bits are flipped, of weights in the header, and values replaced, by a fixed seed; what is damaged is read, or
    refused in one line."""
    generator = random.Random(f"{name} {seed}")
    path = folder / name
    whole = path.read_bytes()
    size = len(whole) if name in FILES else 8 + int.from_bytes(whole[:8], "little")
    num_failed = 0
    for _ in range(30):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(size)] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        num_failed += with_one_line_errors(folder)
        if name in FILES:
            values = json.loads(whole)
            inside = values
            key = generator.choice(list(inside))
            while isinstance(inside[key], dict) and inside[key] and generator.random() < 0.7:
                inside = inside[key]
                key = generator.choice(list(inside))
            inside[key] = generator.choice(VALUES)
            path.write_text(json.dumps(values))
            num_failed += with_one_line_errors(folder)
    assert num_failed > (10 if name in FILES else 30)


def test_a_header_that_only_the_safetensors_library_refuses(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    assert whole.count(b'{"format":"pt"}') == 1
    path.write_bytes(whole.replace(b'{"format":"pt"}', b'{"format":  3 }'))
    for read in (inspect_directory, load_model):
        with pytest.raises(ValueError, match=r"model\.safetensors is corrupt"):
            read(folder)


def test_a_text_longer_than_the_model_reads_is_no_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder / "tokenizer_config.json", model_max_length=4)
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "warning", lambda *said: pytest.fail(str(said)))
    assert len(load_tokenizer(folder)("abcabcabc", add_special_tokens=False)["input_ids"]) == 9
