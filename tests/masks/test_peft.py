"""LoRA of PEFT on a pruned model: nothing of the adapter is lost in a merge, and the zeros stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import distprune as prune
from tests.hf_models import ARCHITECTURES
from tests.worlds import ProcessPool, drawing
from tests.wrapped import whole as whole_of

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs peft; tests/masks/test_adapters.py merges as it does")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def plain() -> Any:
    with drawing(0):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=67, **ARCHITECTURES["llama"]))


def adapted(model: Any) -> Any:
    with drawing(1):
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
        return peft.get_peft_model(model, config)


def layers_of(model: Any) -> list[Any]:
    return [layer for block in model.layers for layer in (block.self_attn.q_proj, block.mlp.down_proj)]


@pytest.mark.parametrize("safe_merge", [False, True])
def test_into_masks(safe_merge: bool) -> None:
    model = adapted(plain())
    prune.compute_masks(model, 0.5).reparametrize()
    layers = layers_of(model.base_model.model.model)
    expected = [
        (layer.base_layer.weight + layer.get_delta_weight("default")) * layer.base_layer.weight_mask for layer in layers
    ]
    merged = prune.merge_adapters(model, safe_merge=safe_merge)
    for layer, weight in zip(layers_of(merged.model), expected, strict=True):
        assert torch.equal(layer.weight, weight)


def test_into_held_zeros() -> None:
    model = plain()
    prune.prune_model(model, 0.5)
    hold = prune.hold_zeros(model)
    masks = prune.Masks.of(model)
    merged = adapted(model).merge_and_unload()
    assert prune.sparsity(merged) < 0.5
    with pytest.warns(UserWarning, match="overwritten.*an adapter merged"):
        hold.finish()
    assert prune.Masks.of(merged).equal(masks)


def merged_on_rank(_: int) -> list[torch.Tensor]:
    merged = []
    for is_sharded in (False, True):
        model = plain()
        prune.prune_model(model, 0.5)
        whole = adapted(model)
        if is_sharded:
            for module in (*model.model.layers, model):
                fully_shard(module)
            whole(torch.arange(8)[None])  # which leaves the root gathered
            with pytest.raises(NotImplementedError, match="PEFT loses a safe_merge into DTensors"):
                prune.merge_adapters(whole, safe_merge=True)
        merged.append(prune.merge_adapters(whole))
        assert prune.sparsity(merged[-1]) == 0.5
    return [whole_of(parameter) for model in merged for parameter in model.parameters()]


def test_into_zeros(pool: ProcessPool) -> None:
    """Sharded as plain; where the base was kept, it is what PEFT's own merge gives."""
    model = plain()
    prune.prune_model(model, 0.5)
    zeros = [parameter == 0 for parameter in model.parameters()]
    expected = [*adapted(model).merge_and_unload(safe_merge=True).parameters()]
    for parameters in pool.run(2, merged_on_rank):
        of_both = zip(parameters[: len(zeros)], parameters[len(zeros) :], expected, zeros, strict=True)
        for alone, of_shards, of_peft, was_zero in of_both:
            assert torch.equal(alone, of_shards)
            assert torch.equal(alone, of_peft.masked_fill(was_zero, 0))


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "LoHaConfig", "LoKrConfig", "MissConfig", "HRAConfig"])
def test_adapters_are_left_out(kind: str) -> None:
    options = {"feedforward_modules": ["down_proj"]} if kind == "IA3Config" else {}
    model = peft.get_peft_model(plain(), getattr(peft, kind)(target_modules=["q_proj", "down_proj"], **options))
    report = prune.prune_model(model, 0.5)
    assert len(report.parameters) == len(prune.prune_model(plain(), 0.5).parameters)
    assert {*report.left_out.values()} == {"an adapter"}
