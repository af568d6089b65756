"""What the names of tensors tell of a model, beside the model itself."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from distprune.models.find_shards import find_shards
from distprune.models.named_model import model_of_names
from tests.architectures import ONE_SHOT_ARCHITECTURES, tiny_model


def found(names: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[str]:
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in names.items()}
    return [shard.name for shard in find_shards(model_of_names(tensors)).shards]


@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
def test_the_same_targets_as_the_model_has(architecture: str) -> None:
    model = tiny_model(architecture)
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert set(found(names)) == {shard.name for shard in find_shards(model).shards}


def test_embeddings_and_integers_stay() -> None:
    names = {
        "embed_tokens.weight": (9, 4),
        "block.0.attention.relative_attention_bias.weight": (4, 2),
        "block.0.attention.q.weight": (4, 4),
        "block.0.norm.weight": (4,),
        "block.0.attention.q_norm.weight": (2, 4),
        "lm_head.weight": (9, 4),
    }
    assert found(names) == ["block.0.attention.q.weight"]
    assert found({"up.weight": (4, 4), "embed.weight": (9, 4)}) == ["up.weight"]  # no blocks: anywhere
    assert found(names, torch.int32) == []
    of_layers = {f"layers.{layer}.up.weight": (2, 2) for layer in (10, 2, 0)}  # numbers are read as numbers
    assert found(of_layers) == [f"layers.{layer}.up.weight" for layer in (0, 2, 10)]
    with pytest.warns(UserWarning, match="'vision.layers' are left as they are"):
        of_towers = found({"vision.layers.0.up.weight": (2, 2), "text.layers.0.up.weight": (4, 4)})
    assert of_towers == ["text.layers.0.up.weight"]


@pytest.mark.parametrize(
    ("module", "shape", "is_weight"),
    [
        ("q_norm", (2, 4), False),  # Command-R's: a row of gains for each head
        ("norm1", (2, 4), False),
        ("LayerNorm", (2, 4), False),
        ("norm_of_keys", (1, 4), False),
        ("layernorm_qkv", (2, 4), True),  # TransformerEngine's
        ("norm_proj", (2, 4), True),
        ("linear_norm", (2, 4), True),
        ("normalizer", (2, 4), True),
    ],
)
def test_norms_are_told_by_the_end_of_their_name(module: str, shape: tuple[int, ...], is_weight: bool) -> None:
    name = f"layers.0.{module}.weight"
    assert found({name: shape, f"layers.0.{module}.layer_norm_weight": (4,)}) == [name] * is_weight


def test_two_weights_of_a_norm_and_an_mlp() -> None:
    names = [f"layers.0.layernorm_mlp.fc{number}_weight" for number in (1, 2)]  # TransformerEngine's
    assert found(dict.fromkeys(names, (4, 4))) == names
