"""What cannot leave is refused by name, on every rank, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from distprune import l1_unstructured
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.units import UnitKind, find_all_units
from distprune.removal.rebuild import Kept, check_layers, plan_units, remove_layers, remove_units
from tests.architectures import tiny_model
from tests.removal.layouts import LAYOUTS
from tests.worlds import run_threads


def all_of(model: nn.Module, kind: UnitKind, num: int) -> Kept:
    """Return the first units of every place."""
    found = [(name, of.name) for name, units in find_all_units(model, kind) for of in units]
    return {(name, kind, place): torch.arange(num) for name, place in found}


def plain(model: Any) -> Any:
    return model


def shared(model: Any) -> Any:
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def reparametrized(model: Any) -> Any:
    l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    return model


def quantized(model: Any) -> Any:
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def extended(model: Any) -> Any:
    model.model.layers[0].extra = nn.Linear(3, 3)
    return model


def bare(_: Any) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(
        [nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3)})})]
    )
    return model


HEADS = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
EQUAL = {**HEADS, "num_key_value_heads": 8}
Refused = tuple[str, dict[str, Any], Callable[[Any], nn.Module], UnitKind, int, type[Exception], str]
BAD: list[Refused] = [
    ("llama", EQUAL, plain, "heads", 5, ValueError, r"multiple .*heads \(5\).*; possible .*: 1, 2, 4"),
    ("opt", {}, plain, "heads", 1, ValueError, "OPTConfig cannot say this .*heads 2 to 1.*would be"),
    ("bloom", {}, plain, "mlp", 8, ValueError, "BloomConfig cannot say this .mlp 96 to 8.: with what it has"),
    ("mixtral", {}, plain, "mlp", 10, ValueError, "grouped_mm .*possible: multiples of 4"),
    ("llama", {}, shared, "mlp", 8, ValueError, "are one weight: it cannot be cut for one of them"),
    ("llama", {}, reparametrized, "heads", 1, NotImplementedError, "make it permanent first"),
    ("llama", {}, quantized, "mlp", 8, NotImplementedError, "quantized weights cannot be cut"),
    ("llama", {}, extended, "mlp", 8, NotImplementedError, "not what its configuration says: .*extra"),
    ("llama", {}, bare, "mlp", 2, NotImplementedError, "Module has no configuration of transformers"),
    ("llama", {}, nn.DataParallel, "mlp", 8, NotImplementedError, "remove from the model inside"),
]


@pytest.mark.parametrize("row", BAD, ids=lambda row: row[-1])
def test_bad_input_changes_nothing(row: Refused) -> None:
    architecture, sizes, change, kind, num, error, message = row
    model: Any = change(tiny_model(architecture, **sizes))
    before, config = dict(model.named_parameters()), repr(getattr(model, "config", None))
    with pytest.raises(error, match=message):
        remove_units(model, all_of(model, kind, num))
    assert repr(getattr(model, "config", None)) == config
    assert list(model.named_parameters()) == list(before.items())


IN_LAYOUTS: list[tuple[str, str, dict[str, Any], UnitKind, int, str]] = [
    (
        "llama",
        "tp",
        HEADS,
        "mlp",
        21,
        "21 mlp cannot stay .* into 2 equal parts along them; possible: multiples of 2",
    ),
    ("llama", "tp", EQUAL, "kv_groups", 5, "5 kv_groups cannot stay .*; possible: multiples of 2"),
    ("llama", "fsdp-columns", {}, "mlp", 21, "21 mlp cannot stay .*down_proj.weight' is cut into 2 equal parts"),
    ("mixtral", "fsdp-bf16", {}, "mlp", 25, "25 mlp cannot stay .* grouped_mm .*; possible: multiples of 8"),
]


def refuse_layout(_: int, number: int) -> None:
    architecture, layout, sizes, kind, num, message = IN_LAYOUTS[number]
    model = LAYOUTS[layout](tiny_model(architecture, **sizes))
    with pytest.raises(ValueError, match=message):
        plan_units(model, all_of(model, kind, num))
    remove_units(model, all_of(model, kind, num - num % 2))


@pytest.mark.parametrize("number", range(len(IN_LAYOUTS)))
def test_sizes_that_a_layout_cannot_have(number: int) -> None:
    run_threads(2, refuse_layout, number)


def refuse_wrapped(_: int) -> None:
    model = tiny_model("llama")
    kept = all_of(model, "mlp", 8)
    with pytest.raises(NotImplementedError, match="shard with FSDP2"):
        plan_units(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")), kept)
    with pytest.raises(NotImplementedError, match="remove from the model inside, and wrap it again"):
        plan_units(nn.parallel.DistributedDataParallel(tiny_model("llama")), kept)
    model = tiny_model("llama")
    blocks: Any = [block for _, block in decoder_blocks(model)]
    fully_shard(blocks[:2], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(NotImplementedError, match="shard each by itself"):
        remove_layers(model, [0, 2])
    assert len(decoder_blocks(model)) == 3


def test_wrappers_that_cannot_follow() -> None:
    run_threads(2, refuse_wrapped)


@pytest.mark.parametrize(
    ("sizes", "kept", "kind", "message"),
    [
        ({}, [], ValueError, "must be ascending indices of 0 to 1, not \\[\\]"),
        ({}, [1, 0], ValueError, "must be ascending"),
        ({}, [0, 2], ValueError, "of 0 to 1, not"),
        ({"scale_attn_by_inverse_layer_idx": True}, [1], NotImplementedError, "'scaling' of 'transformer.h.1.attn'"),
    ],
)
def test_layers_that_cannot_leave(sizes: dict[str, Any], kept: list[int], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_layers(tiny_model("gpt2", **sizes), kept)
