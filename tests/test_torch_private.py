"""A torch that has moved a private name prunes plain models as ever; what needs the name says so."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import distprune
from distprune.shards.fsdp2 import own_params
from distprune.shards.torch_private import FSDP1, FSDP2, Inside, private
from tests.worlds import CONTEXT, run_threads

INSIDES = {"fsdp2": FSDP2, "fsdp1": FSDP1}
# What else is looked up, and what then cannot be done.
OTHERS = {
    ("torch.distributed.tensor.placement_types", "_StridedShard"): "strided",
    ("torch.distributed.tensor._utils", "ExplicitRedistributionContext"): "users",
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "users",
}


def test_this_torch_has_all() -> None:
    """The attributes of real objects are looked at, and nothing in the table is without one."""
    looked: set[str] = set()

    def look(_: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        models: list[Any] = [
            fully_shard(nn.Linear(4, 4), mesh=mesh),
            FullyShardedDataParallel(
                nn.Linear(4, 4),
                use_orig_params=True,
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy.NO_SHARD,
            ),
        ]
        for model in models:
            model(torch.ones(1, 4))
            distprune.prune_model(model, 0.5)
            own_params(model)
        looked.update(part.__name__ for of in (FSDP1, FSDP2) for known in of._known for part in known.__mro__)

    run_threads(1, look)
    assert {feature: inside.missing for feature, inside in INSIDES.items()} == {feature: [] for feature in INSIDES}
    assert looked >= {*FSDP1.attributes, *FSDP2.attributes}


class Moved:
    def __init__(self) -> None:
        self.set_here = 1

    @property
    def shown(self) -> int:
        raise AssertionError("a property is looked at, not run")


def test_attributes_that_are_not_there() -> None:
    inside = Inside("it", [], {"Moved": ("set_here", "shown", "moved")}, "do something else")
    text = rf"torch {re.escape(torch.__version__)} has no Moved.moved, on .* for it; .*or do something else"
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=text):
            inside.check(Moved())
    Inside("it", [], {"Moved": ("set_here", "shown")}, "").check(Moved(), object())


@pytest.mark.parametrize("names", [("torch", "is_no_name"), ("torch.is_no_module", "name")], ids=str)
def test_a_stand_in(names: tuple[str, str]) -> None:
    absent = private(*names)
    assert not isinstance(torch.ones(1), absent)
    with pytest.raises(NotImplementedError, match=f"has no {'.'.join(names)}"):
        absent(1, strict=True)
    assert Inside("it", [names], {}, "").missing == [".".join(names)]


def models() -> dict[str, Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=torch._C._distributed_c10d.HashStore())
    mesh = init_device_mesh("cpu", (1,))

    def placed(placement: Placement) -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [placement], run_check=False))
        return layer

    return {
        "plain": nn.Linear(4, 4),
        "fsdp2": fully_shard(nn.Linear(4, 4), mesh=mesh),
        "fsdp1": FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu")),
        "strided": placed(_StridedShard(0, split_factor=1)),
        "users": placed(Shard(0)),
    }


def prune_without(names: list[tuple[str, str]], kind: str, answer: Connection) -> None:
    """Be a process whose torch has none of ``names``, and send what is said of models of that kind and of others."""
    made = models()
    for module, name in names:
        delattr(import_module(module), name)
    for ours in [ours for ours in sys.modules if ours.split(".")[0] == "distprune"]:
        del sys.modules[ours]
    again = import_module("distprune")

    def compute_mask(_: object, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask * (t.abs() >= 0.1)

    members = {"PRUNING_TYPE": "unstructured", "compute_mask": compute_mask}
    users = type("Users", (again.BasePruningMethod,), members)
    calls: dict[str, Callable[[Any], object]] = {
        "plain": lambda model: again.l1_unstructured(model, "weight", 0.5),
        "fsdp2": lambda model: again.l1_unstructured(model, "weight", 0.5),
        "fsdp1": lambda model: again.prune_model(model, 0.5),
        "strided": lambda model: again.l1_unstructured(model, "weight", 0.5),
        "users": lambda model: users.apply(model, "weight"),  # type: ignore[attr-defined]
    }
    said = {}
    for other in (*{"users": ("plain", "fsdp2"), "strided": ("plain",)}.get(kind, ("plain", "users")), kind):
        try:
            calls[other](made[other])
            said[other] = ""
        except Exception as error:
            said[other] = f"{type(error).__name__}: {error}"
    answer.send(said)


CASES = [
    *(([key for key in inside.names if "._" in ".".join(key)], feature) for feature, inside in INSIDES.items()),
    *(([key], needs) for key, needs in OTHERS.items()),
]


@pytest.mark.parametrize(("names", "kind"), CASES, ids=str)
@pytest.mark.sampled(2)
def test_moved_names_are_missed_where_they_are_needed(names: list[tuple[str, str]], kind: str) -> None:
    answer, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=prune_without, args=(names, kind, theirs))
    process.start()
    assert answer.poll(120)
    said = answer.recv()
    process.join()
    error = said.pop(kind)
    assert set(said.values()) == {""}, said
    assert error.startswith("NotImplementedError: "), error
    if kind != "strided":
        assert f"torch {torch.__version__} has no " in error
        assert all(name in error for _, name in names), error
