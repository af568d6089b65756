"""A checkpoint without its model: the same bytes as the job that loads it, over any ranks, and all or nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune.jobs import PruneJob, StreamedJob, run_prune_job, run_streamed_job
from distprune.jobs.streamed import FileWriter
from distprune.pruning import streamed
from distprune.shards import device
from tests.families import family_model
from tests.hf_models import make_model
from tests.jobs.test_prune import Heard, contents
from tests.worlds import all_raise, run_threads

CASES: dict[str, dict[str, Any]] = {
    "global": {"sparsity": 0.3},
    "tensor": {"sparsity": 0.3, "scope": "tensor"},
    "2:4": {"pattern": "2:4"},
    "row": {"pattern": "row", "sparsity": 0.37},
    "block": {"pattern": "block:2", "sparsity": 0.5},
    "channels": {"pattern": "channels:1", "sparsity": 0.3},
    "random": {"method": "random", "sparsity": 0.3},
    "random 2:4": {"method": "random", "pattern": "2:4"},
    "all": {"sparsity": 0.6, "include": ("*",), "exclude": ("*norm*",)},
    "none": {"sparsity": 0.0},
}
SOME: dict[str, dict[str, Any]] = {
    "some": {"sparsity": 0.5, "include": ("*.q_proj.*", "*.up_proj.*")},
    "rows of some": {"pattern": "row", "sparsity": 0.37, "include": ("*.k_proj.*", "*.up_proj.*")},
}


AS_STORED = ("mixtral", "olmo_hybrid")  # whose stored tensors are parameters of their own
ALIKE = ("global", "2:4", "row", "block", "all", "none")  # for which that does not matter


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny tensors into pieces."""
    monkeypatch.setattr(streamed, "_PIECE_NUMEL", 300)
    monkeypatch.setattr("distprune.jobs.streamed._COPY_NUMEL", 300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of several files, whose tied head is stored; a GPT-2, which keeps (in, out); 3-D experts, stored so;
    experts that are stored apart, with many equal weights; three matrices in one; one that is several in the model."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "llama", dtype=torch.bfloat16, max_shard_size="9KB")
    index = json.loads((folder / "llama" / "model.safetensors.index.json").read_text())
    embedded = index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(folder / "llama" / embedded)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "llama" / embedded, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = embedded
    (folder / "llama" / "model.safetensors.index.json").write_text(json.dumps(index))
    make_model(folder / "gpt2", "gpt2")
    experts: Any = family_model("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    experts.save_pretrained(folder / "gpt_oss")
    sizes: dict[str, Any] = {"num_local_experts": 6, "num_hidden_layers": 1}
    make_model(folder / "mixtral", "mixtral", dtype=torch.bfloat16, max_shard_size="20KB", **sizes)
    for family, num_layers in (("olmo_hybrid", 2), ("hrm_text", 1)):
        model: Any = family_model(family, num_hidden_layers=num_layers)
        model.save_pretrained(folder / family)
    return folder


def on_rank(_: int, job: StreamedJob) -> dict[str, Any]:
    return run_streamed_job(job).to_dict()


def pruning_of(report: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in report["pruning"].items() if name not in ("seconds", "num_rounds", "num_bytes")
    }


@pytest.mark.parametrize(
    ("model", "case"),
    [
        *(("llama", case) for case in CASES),
        *(("mixtral", case) for case in ALIKE),
        ("olmo_hybrid", "all"),
        *(("hrm_text", case) for case in SOME),
        *((model, case) for model in ("gpt2", "gpt_oss") for case in ("global", "2:4", "row", "block")),
    ],
)
@pytest.mark.sampled(4)
def test_same_bytes_as_the_job_that_loads_the_model(models: Path, tmp_path: Path, model: str, case: str) -> None:
    arguments = {"model": str(models / model), **(CASES | SOME)[case]}
    loaded = run_prune_job(PruneJob(**arguments, output=str(tmp_path / "loaded")))
    expected = contents(tmp_path / "loaded")
    del expected["README.md"]  # names the command
    for num_ranks in (1, 2, 3, 4) if (model, case) == ("llama", "global") else (2, 3) if model == "llama" else (1, 3):
        job = StreamedJob(**arguments, output=str(tmp_path / str(num_ranks)))
        report = run_threads(num_ranks, on_rank, job)[0]
        found = contents(tmp_path / str(num_ranks))
        assert "--streamed" in found.pop("README.md").decode()
        assert found == expected
        if model not in AS_STORED:
            assert pruning_of(report) == pruning_of(loaded.to_dict())
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize("case", ["global", "2:4", "row", "block", "channels"])
@pytest.mark.sampled(2)
def test_several_threads_of_a_rank(models: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes; and what one of them raises is raised, with nothing left."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    arguments = {"model": str(models / "llama"), **CASES[case]}
    run_prune_job(PruneJob(**arguments, output=str(tmp_path / "loaded")))
    threads, write_piece = set(), FileWriter._write

    def watched(self: FileWriter, *arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return write_piece(self, *arguments)

    monkeypatch.setattr(FileWriter, "_write", watched)
    run_streamed_job(StreamedJob(**arguments, output=str(tmp_path / "streamed")))
    assert threading.get_ident() not in threads
    for path in (tmp_path / "loaded").glob("*.safetensors"):
        assert (tmp_path / "streamed" / path.name).read_bytes() == path.read_bytes()

    def failing(*_: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(FileWriter, "_write", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        run_streamed_job(StreamedJob(**arguments, output=str(tmp_path / "failed")))
    assert not (tmp_path / "failed").exists()


@pytest.mark.parametrize("case", ["global", "tensor", "2:4", "row"])
@pytest.mark.sampled(2)
def test_ties_and_chunks(models: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal weights the first go, wherever pieces and what is decided at a time begin."""
    model = shutil.copytree(models / "llama", tmp_path / "model")
    for file in model.glob("*.safetensors"):
        rounded = {name: (values * 20).round() / 20 for name, values in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    run_prune_job(PruneJob(model=str(model), output=str(tmp_path / "loaded"), **CASES[case]))
    monkeypatch.setattr(device, "_HOST_CHUNK", 50)
    for num_ranks in (1, 3):
        out = tmp_path / str(num_ranks)
        run_threads(num_ranks, on_rank, StreamedJob(model=str(model), output=str(out), **CASES[case]))
        for file in model.glob("*.safetensors"):
            assert (out / file.name).read_bytes() == (tmp_path / "loaded" / file.name).read_bytes()


def experts_apart(folder: Path) -> Path:
    """Return a Mixtral as it is stored, each expert's matrices by themselves, of a kind that nobody knows."""
    make_model(folder, "mixtral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    return folder


def test_names_decide_where_no_model_holds_the_tensors(tmp_path: Path) -> None:
    model = experts_apart(tmp_path / "model")
    with pytest.raises(ValueError, match="no model that transformers can load"):
        run_prune_job(PruneJob(model=str(model), output=str(tmp_path / "loaded"), sparsity=0.5))
    heard = Heard()
    job = StreamedJob(model=str(model), output=str(tmp_path / "1"), sparsity=0.5)
    report = run_streamed_job(job, watcher=heard)
    assert any("their names decide" in said for said in heard.said)
    run_threads(3, on_rank, dataclasses.replace(job, output=str(tmp_path / "3")))
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "1"))
    pruned = {parameter.name for parameter in report.work.parameters}
    routers = {name for name in before if name.endswith(".gate.weight")}
    assert pruned == {name for name, tensor in before.items() if ".layers." in name and tensor.ndim == 2} - routers
    weights = torch.cat([after[name].flatten() for name in pruned])
    assert int((weights == 0).sum()) == round(weights.numel() / 2) == report.work.num_zeros
    largest = max(float(before[name][after[name] == 0].abs().max()) for name in pruned)
    assert largest <= float(weights[weights != 0].abs().min())
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] if name not in pruned else before[name] * (tensor != 0))


def spoiled(tmp_path: Path, model: Path, change: Any) -> Path:
    """Return a copy of ``model``, of one file, whose tensors ``change`` has changed."""
    folder = tmp_path / "spoiled"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refuses(tmp_path: Path, job: StreamedJob, match: str, kind: type[Exception] = ValueError) -> None:
    """Check that two ranks raise, and that nothing is left."""
    there = sorted(tmp_path.iterdir())
    all_raise(2, on_rank, job, kind=kind, match=match)
    assert sorted(tmp_path.iterdir()) == there


def test_a_pattern_that_does_not_fit(models: Path, tmp_path: Path) -> None:
    job = StreamedJob(model=str(models / "gpt2"), output=str(tmp_path / "out"), pattern="7:9")
    refuses(tmp_path, job, "does not fit")


@pytest.mark.parametrize("case", ["global", "2:4", "random", "block"])
def test_nan(models: Path, tmp_path: Path, case: str) -> None:
    name = "transformer.h.1.mlp.c_proj.weight"  # at the end, when much is written
    model = spoiled(tmp_path, models / "gpt2", lambda tensors: tensors[name][-1, -1].fill_(torch.nan))
    job = StreamedJob(model=str(model), output=str(tmp_path / "out"), **CASES[case])
    refuses(tmp_path, job, rf"scores are NaN in '{name}' \(1\)")


def test_quantized(models: Path, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.mlp.c_proj.qweight"] = torch.ones(4, 4, dtype=torch.int32)

    model = spoiled(tmp_path, models / "gpt2", quantize)
    job = StreamedJob(model=str(model), output=str(tmp_path / "out"), pattern="2:4")
    refuses(tmp_path, job, "unexpected")  # in a model that is known
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    refuses(tmp_path, job, "quantized weights", NotImplementedError)
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    refuses(tmp_path, job, "are quantized", NotImplementedError)


def test_tied_weights_that_differ(models: Path, tmp_path: Path) -> None:
    def untie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1

    model = spoiled(tmp_path, models / "gpt2", untie)
    job = StreamedJob(model=str(model), output=str(tmp_path / "out"), pattern="row", sparsity=0.5, include=("*.wte.*",))
    refuses(tmp_path, job, "with different values")
