"""A model that does not run on token ids, or has no values, is refused in one sentence, on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from typing_extensions import override

import distprune as prune
from distprune.models.decoder_blocks import decoder_blocks
from tests.architectures import samples, tiny_model
from tests.decoder import Decoder
from tests.families import family_model
from tests.worlds import ProcessPool, all_raise, run_threads

TOKENS = samples(4)
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_IMAGES = {**_SIZES, "image_size": 16, "patch_size": 8}


def whisper() -> Any:
    sizes = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    sizes |= {f"max_{of}_positions": 20 for of in ("source", "target")}
    tokens = {f"{kind}_token_id": number for number, kind in enumerate(("pad", "bos", "eos", "decoder_start"))}
    config = WhisperConfig(vocab_size=97, num_mel_bins=8, d_model=16, **sizes, **tokens | {"decoder_start_token_id": 1})
    return WhisperForConditionalGeneration(config)


def blip2() -> Any:
    """A model that takes token ids, but not alone."""
    text = {"model_type": "opt", "vocab_size": 97, "ffn_dim": 32, "word_embed_proj_dim": 16, **_SIZES}
    queries = {**_SIZES, "vocab_size": 97, "encoder_hidden_size": 16}
    return Blip2ForConditionalGeneration(Blip2Config(vision_config=_IMAGES, qformer_config=queries, text_config=text))


Call = Callable[[Any], object]
FORWARDS: dict[str, Call] = {
    "prune_blocks": lambda model: prune.prune_blocks(model, TOKENS, 0.5, method="wanda"),
    "allocate": lambda model: prune.allocate(model, TOKENS, 0.5),
    "perplexity": lambda model: prune.perplexity(model, TOKENS.flatten(), sequence_length=8),
    "shrink_model": lambda model: prune.shrink_model(model, TOKENS, mlp=0.5),
    "layers of shrink_model": lambda model: prune.shrink_model(model, TOKENS, layers=1),
    "own_words": lambda model: prune.own_words(model, 3, 3),
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "whisper": (whisper, "WhisperForConditionalGeneration does not run on token ids alone, it reads input_features"),
    "vit": (
        lambda: ViTForImageClassification(ViTConfig(**_IMAGES)),
        "ViTForImageClassification does not run on token ids alone, it reads pixel_values",
    ),
    "t5": (
        lambda: family_model("t5", vocab_size=97),
        "T5ForConditionalGeneration is an encoder-decoder model that does not run on input_ids alone (",
    ),
    "blip2": (blip2, "Blip2ForConditionalGeneration does not run on token ids alone, it reads pixel_values"),
}
# What says more of it: transformers' models say themselves whether they generate, and configs which sizes they can say.
OTHERWISE = {
    ("whisper", "own_words"): "is an encoder-decoder",
    ("vit", "own_words"): "does not generate text",
    ("whisper", "shrink_model"): "WhisperConfig cannot say this",
    ("t5", "own_words"): "is an encoder-decoder",
    ("t5", "shrink_model"): "T5Config cannot say this",
    ("t5", "layers of shrink_model"): "T5Config cannot say this",
    ("whisper", "layers of shrink_model"): "WhisperConfig cannot say this",
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:only the blocks of 'decoder.block' are pruned")
def test_a_model_that_does_not_run_on_tokens(name: str) -> None:
    make, said = OTHERS[name]
    model = make().eval()
    before = model.state_dict()
    for what, call in FORWARDS.items():
        models = [copy.deepcopy(model) for _ in range(2)]
        for error in run_threads(2, lambda rank, call=call, models=models: call(models[rank]), catch=True):
            assert isinstance(error, ValueError | NotImplementedError), what
            assert OTHERWISE.get((name, what), said) in str(error), what
        for each in models:
            assert all(torch.equal(value, before[key]) for key, value in each.state_dict().items())


class NeedsImages(Decoder):
    """Says that it takes token ids alone, and stumbles over what is missing."""

    @override
    def forward(self, input_ids: torch.Tensor, images: Any = None, use_cache: bool = False) -> torch.Tensor:
        assert images.shape
        return super().forward(input_ids)


def test_a_forward_that_stumbles_before_the_blocks() -> None:
    model = NeedsImages()
    models = [copy.deepcopy(model) for _ in range(2)]
    said = r"NeedsImages does not run on input_ids alone \('NoneType' object has no attribute 'shape'\)"
    all_raise(2, lambda rank: prune.prune_blocks(models[rank], TOKENS % 11, 0.5), kind=ValueError, match=said)


class Residual(nn.Linear):
    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input).tanh()


class Small(nn.Module):
    """As people write one: token ids in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(Residual(8, 8)) for _ in range(2))

    @override
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model, backend="eager")
    return nn.DataParallel(wrapped)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, compiled])
def test_a_model_of_ones_own(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model, ids = Small(), TOKENS % 16
    logits = model(ids)[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert prune.perplexity(wrap(model), ids) == pytest.approx(math.exp(loss.item()), rel=1e-5)
    shares = prune.allocate(wrap(model), ids, 0.5)
    assert shares.keys() == {"layers.0.0", "layers.1.0"}
    assert prune.prune_blocks(wrap(model), ids, shares, pattern="row").sparsity == 0.5


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_the_configuration_of_a_wrapped_model_counts(wrap: Callable[[nn.Module], nn.Module]) -> None:
    calls: list[Callable[[nn.Module], object]] = [
        lambda model: prune.prune_blocks(model, TOKENS + 1000, 0.5),
        lambda model: prune.perplexity(model, TOKENS + 1000),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is outside the model's vocabulary"):
            call(wrap(tiny_model("llama")))


def compiled_before_sharding_on_rank(_: int) -> None:
    """Its root is the wrapper, which FSDP2 has unsharded after a forward."""
    plain: Any = tiny_model("llama")
    model: Any = torch.compile(tiny_model("llama"), backend="eager")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for _name, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(input_ids=TOKENS)
    assert prune.perplexity(model, TOKENS) == pytest.approx(prune.perplexity(plain, TOKENS), rel=1e-5)
    assert all(isinstance(mask, DTensor) for mask in prune.compute_masks(model, 0.5).values())
    assert prune.own_words(model, 2, 6).shape == (2, 6)
    for it in (plain, model):
        prune.prune_model(it, 0.3)
        prune.prune_blocks(it, TOKENS, method="wanda", pattern="row", sparsity=0.5)
    assert prune.sparsity(model) == prune.sparsity(plain)


def test_a_model_that_was_compiled_before_it_was_sharded(pool: ProcessPool) -> None:
    pool.run(2, compiled_before_sharding_on_rank)


def test_a_head_of_fewer_tokens_than_the_vocabulary() -> None:
    """As image GPTs have it, or heads that were cut down."""
    model: Any = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head = nn.Linear(model.lm_head.in_features, 90, bias=False)
    assert math.isfinite(prune.perplexity(model, TOKENS % 90))
    assert len(prune.allocate(model, TOKENS % 90, 0.5)) == 21


def test_a_model_without_a_head() -> None:
    model: Any = family_model("llama").model
    with pytest.raises(ValueError, match="LlamaModel puts out a BaseModelOutputWithPast without logits; load it with"):
        prune.perplexity(model, TOKENS % 11)


def offloaded(model: Any, folder: Path) -> Any:
    """Return a model whose weights Accelerate fetches from the disk for each forward."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    return model


WITH_VALUES: dict[str, Call] = {
    **FORWARDS,
    "prune_model": lambda model: prune.prune_model(model, 0.5),
    "hold_zeros": prune.hold_zeros,
    "hold_zeros of an optimizer": lambda model: prune.hold_zeros(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    "SparseTraining": lambda model: prune.SparseTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=prune.constant(0.5)
    ),
    "StraightThrough": lambda model: prune.StraightThrough(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    "l1_unstructured": lambda model: prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5),
}


@pytest.mark.parametrize("what", WITH_VALUES)
def test_a_model_that_is_offloaded(tmp_path: Path, what: str) -> None:
    """On one rank; the others hear of it."""

    def on_rank(rank: int) -> object:
        model = tiny_model("llama", num_hidden_layers=2)
        return WITH_VALUES[what](offloaded(model, tmp_path) if rank else model)

    said = r"weight' has no values on this rank \(meta\): .*without offloading"
    all_raise(2, on_rank, kind=ValueError, match=said)


def test_zeros_are_held_that_come_later() -> None:
    """A model that is built on the meta device is not offloaded: it gets its values before the first step."""
    model = nn.Linear(4, 4, device="meta")
    hold = prune.hold_zeros(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight != 0, torch.eye(4) != 0)
    hold.remove()
