"""What a walk takes of memory: five terms, near to what is measured, named where memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distprune import prune_blocks
from distprune.oneshot import prune_blocks as prune_blocks_module
from distprune.oneshot.estimate import as_line, estimate
from distprune.oneshot.recipe import Recipe
from tests.architectures import samples, tiny_model
from tests.device_path import Memory
from tests.sampling import only_whole

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 768},
    "mixtral": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
}
ONE_EXPERT = 16 * 256**2  # bytes of its sums and what leads to the targets


def small(architecture: str) -> Any:
    return tiny_model(
        architecture, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, **SIZES[architecture]
    )


@pytest.mark.parametrize(
    ("architecture", "num_windows", "how"),
    [
        only_whole("llama", 8, {"method": "sparsegpt"}),
        ("llama", 32, {"method": "admm", "refit": "none"}),
        ("llama", 8, {"method": "admm"}),
        ("mixtral", 8, {"method": "admm"}),
        only_whole("mixtral", 8, {"method": "admm", "refit": "none"}),
        ("mixtral", 8, {"method": "admm", "refit": "none", "expert_memory": 3 * ONE_EXPERT}),
        only_whole("mixtral", 8, {"method": "admm", "refit": "none", "expert_memory": 1}),
    ],
)
def test_near_to_what_is_measured(architecture: str, num_windows: int, how: dict[str, Any]) -> None:
    model, windows = small(architecture), samples(num_windows, 64)
    waves = {name: how[name] for name in how if name == "expert_memory"}
    recipe = Recipe(pattern="2:4", **{name: how[name] for name in how if name not in waves}).resolved()
    terms = estimate(model, recipe, num_windows, 64, **waves)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with Memory() as memory:
        prune_blocks(model, windows, pattern="2:4", **how)
    assert sum(terms.values()) == pytest.approx(weights + memory.peak, rel=0.15), (terms, memory.peak)


def test_ranks_share_what_grows_with_windows() -> None:
    model, recipe = small("llama"), Recipe(pattern="2:4").resolved()
    one, four = (estimate(model, recipe, 16, 64, num_ranks) for num_ranks in (1, 4))
    for name in ("shard of the weights", "hidden states", "inputs of a block"):
        assert one[name] == 4 * four[name]
    assert (one["gathered block"], four["gathered block"] > 0) == (0, True)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), ValueError("another")])
def test_named_where_memory_runs_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(prune_blocks_module, "run_blocks", runs_out)
    model, windows = tiny_model("llama"), samples(3)
    with pytest.raises(type(error)) as raised:
        prune_blocks(model, windows, pattern="2:4")
    notes = getattr(raised.value, "__notes__", [])
    if isinstance(error, ValueError):
        assert not notes
    else:
        terms = estimate(model, Recipe(pattern="2:4").resolved(), *windows.shape)
        assert notes[0] == f"the walk takes {as_line(terms)}"
        assert notes[1].startswith("Ways out: fewer samples, more ranks, offload=True, refit='none'")
