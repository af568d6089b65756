"""Masks as values: their layouts, what is done with them, and where they go."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distprune as prune
from distprune.checkpoint import stored_slices
from distprune.collectives.communicator import Alone
from tests.decoder import BLOCK_WEIGHTS, Decoder, decoder
from tests.worlds import ProcessPool, all_raise, run_threads
from tests.wrapped import whole

FILE = "masks.safetensors"
TOKENS = torch.arange(6).view(1, 6)


def fsdp2() -> Decoder:
    model = decoder()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)  # gathered from the first forward on
    fully_shard(model)
    return model


def tensor_parallel() -> Decoder:
    model, mesh = decoder(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


LAYOUTS = (decoder, fsdp2, tensor_parallel)


def weight(model: nn.Module, name: str) -> torch.Tensor:
    module, _, attribute = name.rpartition(".")
    return whole(getattr(model.get_submodule(module), attribute))


OVERLAP = prune.compute_masks(decoder(), 0.5, include="*").overlap(prune.compute_masks(decoder(), 0.25, include="*"))
ALONE = {name: mask.clone() for name, mask in prune.compute_masks(decoder(), 0.5).items()}


@pytest.mark.parametrize("make", LAYOUTS)
def test_what_is_computed_is_what_pruning_does(make: Callable[[], Decoder]) -> None:
    def on_rank(_: int) -> None:
        model, dense = make(), decoder()
        masks = prune.compute_masks(model, 0.5)
        assert list(masks) == BLOCK_WEIGHTS
        assert all(torch.equal(weight(model, name), weight(dense, name)) for name in masks)
        report = prune.prune_model(model, 0.5)
        assert report.masks.equal(masks)
        assert masks.equal(prune.Masks.of(model))
        assert report.sparsity == masks.sparsity() == prune.sparsity(model) == 0.5
        for name, mask in masks.items():
            parameter = model.get_parameter(name)
            assert type(mask) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
            assert mask.dtype is torch.bool
            if isinstance(mask, DTensor) and isinstance(parameter, DTensor):
                assert (mask.placements, mask.device_mesh) == (parameter.placements, parameter.device_mesh)
            assert torch.equal(whole(mask), ALONE[name])
            assert torch.equal(weight(model, name) != 0, ALONE[name])
        half, quarter = (prune.compute_masks(make(), share, include="*") for share in (0.5, 0.25))
        assert half.overlap(quarter) == OVERLAP

    run_threads(3 if make is fsdp2 else 2, on_rank)


def test_fsdp1_has_local_parts(tmp_path: Path) -> None:
    def on_rank(_: int) -> int:
        model = FullyShardedDataParallel(decoder(), use_orig_params=True, device_id=torch.device("cpu"))
        masks = prune.compute_masks(model, 0.5)
        assert all(type(mask) is torch.Tensor and mask.ndim == 1 for mask in masks.values())
        with pytest.raises(NotImplementedError, match="FSDP1"):
            masks.reparametrize()
        masks.apply_()
        assert prune.Masks.of(model).equal(masks)
        masks.save(tmp_path / "masks")
        assert prune.Masks.load(tmp_path / "masks", model).equal(masks)
        return sum(int(mask.sum()) for mask in masks.values())

    assert sum(run_threads(2, on_rank)) == sum(int(mask.sum()) for mask in ALONE.values())
    assert all(torch.equal(mask, ALONE[n]) for n, mask in prune.Masks.load(tmp_path / "masks", decoder()).items())


@pytest.mark.parametrize("make", LAYOUTS)
def test_apply_to_what_is_there_now(make: Callable[[], Decoder]) -> None:
    def on_rank(_: int) -> None:
        changes: list[Callable[[nn.Module], object]] = [lambda model: model(TOKENS), nn.Module.double]
        for change in changes:
            model = make()
            masks = prune.compute_masks(model, 0.5)
            change(model)
            masks.apply_()
            assert all(torch.equal(weight(model, name) != 0, ALONE[name]) for name in masks)
            assert prune.Masks.of(model).equal(masks)

    run_threads(2, on_rank)


@pytest.mark.parametrize("make", LAYOUTS)
def test_reparametrize(make: Callable[[], Decoder]) -> None:
    def on_rank(_: int) -> None:
        model, zeroed = make(), decoder()
        masks = prune.compute_masks(model, 0.5)
        prune.prune_model(zeroed, 0.5)
        masks.reparametrize()
        assert prune.sparsity(model) == 0.5
        assert prune.Masks.of(model).equal(masks)
        torch.testing.assert_close(whole(model(TOKENS)), zeroed(TOKENS))
        prune.compute_masks(model, 0.75).reparametrize()
        assert prune.sparsity(model) == 0.75
        for name in masks:
            prune.remove(model.get_submodule(name.rpartition(".")[0]), "weight")
        assert not prune.is_pruned(model)
        assert prune.sparsity(model) == 0.75

    run_threads(2, on_rank)


def stage(rank: int) -> Decoder:
    """Return the stage of a pipeline: the embedding and the first block, or the second."""
    model = decoder()
    if rank:
        del model.embed, model.head, model.layers[0]
        model.layers = nn.ModuleDict({"1": model.layers[0]})  # type: ignore[assignment]
    else:
        del model.head, model.layers[1]
    return model


def test_pipeline_stages(tmp_path: Path) -> None:
    def on_rank(rank: int) -> None:
        model = stage(rank)
        masks = prune.compute_masks(model, 0.5)
        assert list(masks) == BLOCK_WEIGHTS[2 * rank : 2 * rank + 2]
        assert masks.sparsity() == 0.5
        masks.save(str(tmp_path / "masks"))
        assert prune.Masks.load(str(tmp_path / "masks"), model).equal(masks)
        masks.reparametrize()
        assert all(torch.equal(weight(model, name) != 0, ALONE[name]) for name in masks)
        assert prune.Masks.of(model).equal(masks)

    run_threads(2, on_rank)


def test_together_and_alike() -> None:
    def on_rank(rank: int) -> None:
        model = fsdp2()
        first, second = (prune.compute_masks(model, 0.5, score=score, seed=1) for score in ("magnitude", "random"))
        both = first & second
        assert all(torch.equal(whole(both[n]), whole(first[n]) & whole(second[n])) for n in both)
        assert not first.equal(second)
        assert both.equal(second & first)
        either, one = first | second, first ^ second
        assert both.equal(~(~first | ~second))
        assert one.equal(either & ~both)
        by_name, overlap = first.sparsity(by="name"), first.overlap(second)
        pairs = {n: (~whole(first[n]), ~whole(second[n])) for n in first}
        assert by_name == {n: float(a.double().mean()) for n, (a, _) in pairs.items()}
        assert overlap.by_name == {n: int((a & b).sum()) / int((a | b).sum()) for n, (a, b) in pairs.items()}
        assert overlap.total == sum(int((a & b).sum()) for a, b in pairs.values()) / sum(
            int((a | b).sum()) for a, b in pairs.values()
        )
        assert first.overlap(~first).total == 0
        assert (first | ~first).overlap(first | ~first).total == 1
        with pytest.raises(ValueError, match="by='layer' is neither"):
            first.sparsity(by="layer")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="different parameters"):
            first.overlap(prune.compute_masks(model, 0.5, include="*.up.weight"))
        with pytest.raises(TypeError, match="not with a float"):
            first | 0.5  # type: ignore[operator]
        assert first.sparsity() < both.sparsity() < 1
        other = prune.compute_masks(model, 0.5, include="*.up.weight")
        assert not first.equal(other)
        assert first != "masks"
        with pytest.raises(TypeError, match=re.escape("masks.equal(other)")):
            assert first == second
        some = other if rank else first  # of another model on one rank alone
        assert not first.equal(some)
        with pytest.raises(ValueError, match="different parameters"):
            first & some
        again = prune.compute_masks(model, 0.5)
        assert first.equal(again)
        if rank == 1:
            again[BLOCK_WEIGHTS[0]]._local_tensor[0, 0] ^= True  # type: ignore[attr-defined]
        assert not first.equal(again)

    run_threads(2, on_rank)


def test_layouts_of_one_local_shape() -> None:
    def on_rank(_: int) -> None:
        model = nn.ParameterList(
            [nn.Parameter(distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))]
        )
        rows = prune.Masks.of(model, include="*")
        model[0] = nn.Parameter(distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(1)]))
        for wrong in (rows.apply_, rows.reparametrize):
            with pytest.raises(ValueError, match=r"'0' .*laid out otherwise"):
                wrong()
        columns = prune.Masks.of(model, include="*")
        assert not rows.equal(columns)
        with pytest.raises(ValueError, match="laid out differently"):
            rows & columns

    run_threads(2, on_rank)


def test_the_sparsity_of_a_plain_model_can_be_asked_for_on_one_rank() -> None:
    def on_rank(rank: int) -> tuple[float, float]:
        model = decoder()
        if rank == 1:
            prune.prune_model(model, 0.5, group=Alone())
            alone = prune.sparsity(model)  # nobody waits for the others
        else:
            alone = 0.5
        stages = nn.ModuleDict({str(rank): nn.Linear(4, 4, device="meta").to_empty(device="cpu")})
        for parameter in stages.parameters():
            nn.init.constant_(parameter, 1 - rank)
        return alone, prune.sparsity(stages, group=torch.distributed.group.WORLD)

    assert run_threads(2, on_rank) == [(0.5, 0.5)] * 2


def save(_: int, folder: Path) -> None:
    masks = prune.compute_masks(fsdp2(), 0.5)
    state_dict_saver.save(dict(masks), checkpoint_id=folder)
    masks.save(folder / FILE)


def load(_: int, folder: Path, sharded: bool) -> dict[str, torch.Tensor]:
    model = fsdp2() if sharded else decoder()
    masks = prune.Masks.of(model)
    assert masks.sparsity() == 0
    state_dict_loader.load(dict(masks), checkpoint_id=folder)
    assert prune.Masks.load(folder / FILE, model).equal(masks)
    masks.apply_()
    assert prune.sparsity(model) == 0.5
    return {name: whole(mask).clone() for name, mask in masks.items()}


def test_saved_and_loaded_at_another_world_size(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(4, save, tmp_path)
    for num_ranks, sharded in ((2, True), (1, True), (1, False)):
        for loaded in pool.run(num_ranks, load, tmp_path, sharded):
            assert loaded.keys() == ALONE.keys()
            assert all(torch.equal(loaded[name], ALONE[name]) for name in ALONE)


def test_home_is_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prune.compute_masks(decoder(), 0.5).save(f"~/{FILE}")
    model = decoder()
    prune.Masks.load(f"~/{FILE}", model).apply_()
    assert prune.sparsity(model) == 0.5
    with pytest.raises(ValueError, match="has no values on this rank"):
        prune.Masks.load(tmp_path / FILE, decoder().to("meta"))


def with_other(name: str, path: Path) -> None:
    save_file({name: torch.ones(2, 2, dtype=torch.bool)}, path)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (Path.unlink, FileNotFoundError, "there is no file of masks"),
        (lambda path: path.write_bytes(b"\x80\x04K\x01."), ValueError, "corrupt or truncated"),  # a pickle
        (partial(with_other, "other"), ValueError, "'other' matches no parameter"),
        (partial(with_other, BLOCK_WEIGHTS[0]), ValueError, rf"holds torch.bool \(2, 2\) under '{BLOCK_WEIGHTS[0]}'"),
    ],
)
def test_files_that_are_not_masks(
    spoil: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    masks = prune.compute_masks(decoder(), 0.5)
    with pytest.raises(OSError, match="is a directory; name a file"):
        masks.save(tmp_path)
    masks.save(tmp_path / FILE)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    spoil(tmp_path / FILE)

    all_raise(2, lambda _: prune.Masks.load(tmp_path / FILE, fsdp2()), kind=error, match=message)


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = prune.compute_masks(decoder(), 0.5)
    masks.save(tmp_path / FILE)

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(stored_slices, "write_chunk", full)
    with pytest.raises(OSError, match="the disk is full"):
        (~masks).save(tmp_path / FILE, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert prune.Masks.load(tmp_path / FILE, decoder()).equal(masks)


def test_a_copy_is_of_the_same_model() -> None:
    model = decoder()
    masks = prune.compute_masks(model, 0.5)
    copy.deepcopy(masks).apply_()
    assert prune.sparsity(model) == 0.5
    assert copy.copy(masks).equal(masks)
    with pytest.raises(TypeError, match=r"keep them in a file by masks.save"):
        pickle.dumps(masks)
    module: Any = nn.Linear(8, 8)
    module.masks = prune.compute_masks(module, 0.5)
    copied = copy.deepcopy(module)
    copied.masks.apply_()
    assert (prune.sparsity(module), prune.sparsity(copied)) == (0.0, 0.5)


@pytest.mark.parametrize("call", ["global_unstructured", "custom_from_mask"])
def test_a_module_keeps_one_mask(call: str) -> None:
    module = nn.Linear(64, 64, bias=False)
    for i in range(100):
        if call == "global_unstructured":
            prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.01)
        else:
            prune.custom_from_mask(module, "weight", (torch.arange(64 * 64) % 101 != i).view(64, 64))
    (hook,) = module._forward_pre_hooks.values()
    assert len(hook) == 100  # type: ignore[arg-type]
    masks = [method.mask for method in hook if method.mask is not None]  # type: ignore[attr-defined]
    mask = module.get_buffer("weight_mask")
    storages = [each.untyped_storage() for each in (*masks, mask)]
    assert sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) == 64 * 64 * 4
    assert 0 < int((mask == 0).sum()) < 64 * 64


def test_a_method_keeps_its_mask_where_a_later_call_fails() -> None:
    module = nn.Linear(2, 2)
    prune.custom_from_mask(module, "weight", torch.eye(2))
    (method,) = module._forward_pre_hooks.values()
    assert isinstance(method, prune.CustomFromMask)
    module.get_parameter("weight_orig").data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        prune.l1_pattern(module, "weight", "1:2")
    assert method.mask is module.weight_mask
    module.get_parameter("weight_orig").data[0, 0] = 1.0
    prune.l1_pattern(module, "weight", "1:2")
    assert method.mask is None
