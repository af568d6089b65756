"""A model cut in any layout is the one made of dense slices: names, values, configuration, training, generation.

What cannot leave is refused by name, on every rank, before anything changes.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from distprune import l1_unstructured
from distprune.collectives.communicator import communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.units import UnitKind, find_all_units
from distprune.removal.rebuild import Kept, check_layers, plan_units, remove_layers, remove_units
from distprune.removal.shrink_model import shrink_model
from distprune.removal.sizes import Sizes
from tests.architectures import samples, tiny_model
from tests.families import family_model
from tests.removal.layouts import LAYOUTS, PLANS
from tests.removal.sliced import SCRIPTS, Script, kept_units, sliced
from tests.sampling import only_whole
from tests.worlds import run_threads
from tests.wrapped import whole

TOKENS = samples(4)


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the logits, the loss's gradients and the parameters after a step of a new optimizer, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits: torch.Tensor = model(TOKENS).logits
    logits.float().pow(2).mean().backward()  # type: ignore[no-untyped-call]
    found = {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return {"logits": whole(logits)} | found | {name: whole(p) for name, p in model.named_parameters()}


def remove(_: int, script: Script, small: nn.Module, layout: str, runs_before: bool) -> dict[str, Any]:
    model: Any = LAYOUTS[layout](script.make())
    if runs_before:
        model(TOKENS[:1]).logits.float().sum().backward()
        with torch.no_grad():
            model(TOKENS[:1])  # after which the root stays gathered
    kind = type(model)
    remove_units(model, kept_units(script, len(decoder_blocks(model))))
    assert type(model) is kind
    model.zero_grad()
    found: dict[str, Any] = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    fresh = LAYOUTS[layout](copy.deepcopy(small))
    for (name, parameter), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert parameter.stride() == other.stride(), name
        assert isinstance(other, DTensor) == isinstance(parameter, DTensor)
        if isinstance(parameter, DTensor) and isinstance(other, DTensor):  # as if it had been wrapped at this size
            assert parameter.placements == other.placements, name
            assert torch.equal(parameter.to_local(), other.to_local()), name
    return {"state": found, "config": model.config.to_dict(), "step": step(model)}


ON_RANKS = [
    *[(name, "fsdp", 2 + index % 2) for index, name in enumerate(SCRIPTS) if "-" not in name],
    *[
        ("llama-heads", layout, 2)
        for layout in LAYOUTS
        if layout not in ("plain", "hsdp", "fsdp-to-2", "fsdp-tp", "fsdp-prefetch")
    ],
    ("llama", "fsdp-to-2", 4),
    ("mixtral", "hsdp", 4),
    ("qwen2", "fsdp-tp", 4),
]
# Every architecture in every layout.
EVERYWHERE = [
    (name, layout, num_ranks)
    for name, script in SCRIPTS.items()
    for layout in LAYOUTS
    for num_ranks in ((4,) if layout in ("hsdp", "fsdp-to-2", "fsdp-tp") else (2, 3, 4) if layout == "fsdp" else (2,))
    if layout != "plain" and ("tp" not in layout or script.architecture in PLANS)
    if layout != "fsdp-bf16" or name not in ("mixtral", "qwen2_moe")  # where grouped_mm takes multiples of 8 channels
]


@pytest.mark.parametrize(
    ("name", "layout", "num_ranks"), [*ON_RANKS, *(only_whole(*row) for row in EVERYWHERE if row not in ON_RANKS)]
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # OPT
@pytest.mark.sampled(4)
def test_cut_is_sliced(name: str, layout: str, num_ranks: int) -> None:
    script = SCRIPTS[name]
    model = script.make()
    small: Any = sliced(script, kept_units(script, len(decoder_blocks(model))), model)
    state = {key: tensor.clone() for key, tensor in small.state_dict().items()}
    config = small.config.to_dict()
    expected = step(copy.deepcopy(small))
    runs_before = name in ("llama-heads", "mixtral", "qwen2")
    for found in run_threads(num_ranks, remove, script, small, layout, runs_before):
        assert found["state"].keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(found["state"][key], tensor), key
        assert {k: v for k, v in found["config"].items() if config.get(k, v) != v} == {}
        assert found["step"].keys() == expected.keys()
        for key, tensor in expected.items():
            if "tp" in layout and ("q_norm" in key or "k_norm" in key):
                continue  # each rank has the gradients of its own heads, and torch no style that sums them
            if "bf16" in layout:
                assert found["step"][key].shape == tensor.shape
            elif key == "logits" and layout == "fsdp":
                assert torch.equal(found["step"][key], tensor)
            else:
                assert torch.allclose(found["step"][key], tensor, atol=1e-4, rtol=1e-3), key


def loaded(model: Any, folder: Path) -> Any:
    """Return what transformers makes of what it saves of ``model``; every name must be there, and no other."""
    model.save_pretrained(folder)
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return again.eval()


def generated(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(TOKENS[:, :4], max_new_tokens=3, do_sample=False)
    return tokens


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.sampled(6)
def test_alone_and_what_is_saved_loads_and_generates(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    model: Any = script.make()
    kept = kept_units(script, len(decoder_blocks(model)))
    small: Any = sliced(script, kept, model)
    remove_units(model, kept)
    assert model.state_dict().keys() == small.state_dict().keys()
    for key, tensor in small.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    assert torch.equal(model(TOKENS).logits, small(TOKENS).logits)
    again = loaded(model, tmp_path)
    assert {**again.config.to_dict(), "_name_or_path": ""} == model.config.to_dict()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(generated(again), generated(model))


LAYERS: dict[str, tuple[str, dict[str, Any], list[int], dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 4}, [0, 3], {"num_hidden_layers": 2}),
    "bloom": ("bloom", {"n_layer": 4}, [1, 2, 3], {"n_layer": 3}),
    "gpt2": ("gpt2", {"n_layer": 3}, [0, 2], {"n_layer": 2}),
    "windows": (
        "qwen2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "use_sliding_window": True,
        },
        [0, 1, 3],
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mixed": ("qwen2_moe", {"num_hidden_layers": 4}, [1, 3], {"mlp_only_layers": [0], "num_hidden_layers": 2}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_leave_and_the_others_close_up(name: str, tmp_path: Path) -> None:
    architecture, sizes, kept, fields = LAYERS[name]
    model: Any = tiny_model(architecture, **sizes)
    blocks, other = [block for _, block in decoder_blocks(model)], type(model)(model.config).eval()
    before = other(TOKENS).logits
    remove_layers(model, kept)
    assert [block for _, block in decoder_blocks(model)] == [blocks[i] for i in kept]
    assert torch.equal(other(TOKENS).logits, before)  # a model of the same configuration
    assert {field: getattr(model.config, field) for field in fields} == fields
    again = loaded(model, tmp_path)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(generated(again), generated(model))


TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA = {"global_head_dim": 16, "layer_types": TYPES, "num_hidden_layers": 6}  # the last one must be of full attention
GEMMA |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False}


@pytest.mark.parametrize(("family", "sizes", "kept"), [("gpt_neo", {}, [0, 2]), ("gemma4_text", GEMMA, [0, 2, 3, 5])])
def test_layers_that_a_configuration_lists(family: str, sizes: Any, kept: list[int], tmp_path: Path) -> None:
    """As a list that each block keeps whole, or by their numbers where they have other sizes."""
    model: Any = family_model(family, **sizes)
    Sizes(layers=len(kept), heads=2 if family == "gemma4_text" else None).check(model)
    remove_layers(model, kept)
    assert torch.equal(loaded(model, tmp_path)(TOKENS).logits, model(TOKENS).logits)


def remove_then_step(_: int, layout: str) -> tuple[nn.Module, list[Any], dict[str, torch.Tensor]]:
    model: Any = LAYOUTS[layout](tiny_model("llama", num_hidden_layers=4))
    step(model)  # of an optimizer that is gone then
    model.zero_grad()
    blocks: list[Any] = [block for _, block in decoder_blocks(model)]
    gone = [weakref.ref(blocks[index].self_attn.q_proj) for index in (1, 3)]
    del blocks
    remove_layers(model, [0, 2])
    before = {f"{name}.before": whole(tensor) for name, tensor in model.state_dict().items()}
    return model, gone, before | step(model)


@pytest.mark.parametrize("layout", ["fsdp", "root", "fsdp-prefetch"])
@pytest.mark.sampled(1)
def test_layers_leave_a_sharded_model_that_trains_on(layout: str) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    step(model)
    model.zero_grad()
    small: Any = tiny_model("llama", num_hidden_layers=2)
    names = {f"layers.{before}.": f"layers.{after}." for after, before in enumerate((0, 2))}
    state = {
        name.replace(old, new): tensor.clone()
        for name, tensor in model.state_dict().items()
        for old, new in names.items()
        if old in name or (".layers." not in name and old == "layers.0.")
    }
    small.load_state_dict(state)
    expected = {f"{name}.before": tensor for name, tensor in state.items()} | step(small)
    results = run_threads(2, remove_then_step, layout)
    gc.collect()
    for _, gone, found in results:
        assert [reference() for reference in gone] == [None, None]  # FSDP2 holds on to nothing of them
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.allclose(found[key], tensor, atol=1e-4, rtol=1e-3), key


@pytest.mark.whole
def test_compiled_models_follow() -> None:
    model: Any = tiny_model("llama", num_hidden_layers=1)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(TOKENS)
    remove_units(model, {(name, "mlp", "mlp"): torch.arange(12) for name, _ in decoder_blocks(model)})
    assert torch.equal(compiled(TOKENS).logits, model(TOKENS).logits)


def test_a_compiled_model_is_made_smaller() -> None:
    plain: Any = tiny_model("llama")
    compiled: Any = torch.compile(tiny_model("llama"), backend="eager")
    for model in (compiled, plain):
        logits = model(TOKENS).logits
        shrink_model(model, TOKENS, mlp=0.5, layers=2, layer_criterion="influence", refit="least_squares")
        assert not torch.equal(model(TOKENS).logits, logits)
        assert model.config.intermediate_size == 20
    torch.testing.assert_close(compiled(TOKENS).logits, plain(TOKENS).logits)


def count_traffic(_: int, script: Script, layout: str) -> tuple[int, int, int]:
    model: Any = LAYOUTS[layout](script.make())
    comm, kept = communicator(), kept_units(script, len(decoder_blocks(model)))
    cut = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # along what FSDP2 shards
    held = [p.to_local().nbytes for name, p in model.named_parameters() if name.split(".")[-2] in cut]
    remove_units(model, kept, group=comm)
    return comm.traffic.num_rounds, comm.traffic.num_bytes, sum(held)


@pytest.mark.parametrize(("layout", "num_ranks"), [("fsdp", 2), ("hsdp", 4)])
@pytest.mark.sampled(1)
def test_each_rank_moves_at_most_what_it_holds(layout: str, num_ranks: int) -> None:
    for num_rounds, num_bytes, num_held in run_threads(num_ranks, count_traffic, SCRIPTS["llama"], layout):
        # q, k, v, gate and up of 3 blocks are cut along what goes, o and down across.
        assert num_rounds == 2 + (5 * 5 + 3 * 2) * 3
        assert num_held / 3 < num_bytes <= num_held + num_rounds * 64


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
