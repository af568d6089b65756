"""``shrink_model``: one call makes a model smaller where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from distprune import shrink_model
from distprune.checkpoint.hf_load import load_model
from distprune.models.find_shards import count_parameters
from tests.architectures import samples, tiny_model
from tests.hf_models import make_model
from tests.worlds import run_threads

SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SAMPLES = torch.arange(4 * 12).view(4, 12) % 67


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("dense") / "model", **SIZES)


def shrink_on_rank(_: int, folder: Path, size: int, asked: dict[str, Any]) -> tuple[Any, ...]:
    """Shrink, and take a step; return what stays, the logits of the smaller model, and its size."""
    model: Any = load_model(folder, mesh=init_device_mesh("cpu", (size,)) if size > 1 else None)
    num_before = count_parameters(model)
    shrunk = shrink_model(model, SAMPLES, **asked)
    assert shrunk.num_parameters_before == num_before > shrunk.num_parameters == count_parameters(model)
    output = model(SAMPLES, labels=SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output.loss.backward()
    optimizer.step()
    assert model(SAMPLES, labels=SAMPLES).loss < output.loss
    units = {key: index.tolist() for key, index in shrunk.kept.items()}
    config = model.config
    sizes = (config.num_hidden_layers, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
    return units, shrunk.layers, shrunk.num_parameters, sizes, output.logits.detach()


def test_over_ranks_as_in_one_process(folder: Path) -> None:
    asked = {"mlp": 0.75, "heads": 2, "layers": 3, "layer_criterion": "influence"}
    *expected, logits = shrink_on_rank(0, folder, 1, asked)
    units, layers, num_parameters, sizes = expected
    assert sizes == (3, 21, 2, 2)
    assert num_parameters == 67 * 24 + 24 + 3 * (2 * 24 + 24 * 6 * (2 + 2 + 2 + 2) + 3 * 24 * 21)
    assert {block for block, _, _ in units} == {f"model.layers.{index}" for index in layers}
    for *found, other in run_threads(2, shrink_on_rank, folder, 2, asked):
        assert found == expected
        torch.testing.assert_close(other, logits)


def test_a_compiled_model(folder: Path) -> None:
    compiled: Any = torch.compile(load_model(folder), backend="eager")
    twin: Any = load_model(folder)
    for model in (compiled, twin):
        logits = model(SAMPLES).logits
        shrink_model(model, SAMPLES, mlp=0.5, layers=3, layer_criterion="influence", refit="least_squares")
        assert not torch.equal(model(SAMPLES).logits, logits)
        assert model.config.intermediate_size == 14
    torch.testing.assert_close(compiled(SAMPLES).logits, twin(SAMPLES).logits)


@pytest.mark.filterwarnings("ignore:.*has no one linear layer that could make up")
@pytest.mark.parametrize("criterion", ["output", "usage"])
def test_experts_leave_before_their_channels(criterion: Any) -> None:
    model: Any = tiny_model("mixtral", num_hidden_layers=3)
    ids = samples(4)
    shrunk = shrink_model(
        model, ids, experts=3, mlp=0.5, layers=2, layer_criterion="influence", expert_criterion=criterion
    )
    config = model.config
    assert (config.num_local_experts, config.intermediate_size, config.num_hidden_layers) == (3, 20, 2)
    assert model(ids).logits.isfinite().all()
    assert model.generate(ids, max_new_tokens=2, min_new_tokens=2).shape == (4, 18)
    blocks = {f"model.layers.{index}" for index in shrunk.layers}
    assert {block for block, _, _ in shrunk.kept} == blocks
    assert [len(index) for (_, kind, _), index in shrunk.kept.items() if kind == "experts"] == [3, 3]
    assert [len(index) for (_, kind, _), index in shrunk.kept.items() if kind == "mlp"] == [20] * 6
