"""A torch that has moved a private name prunes plain models as ever; what needs the name says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import distprune
from distprune.shards import own_params, private
from distprune.shards.torch_private import FSDP1, FSDP2, Inside
from tests.worlds import run_threads

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


PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from importlib import import_module
import distprune  # and what it imports

torch.set_num_threads(1)

def dtensor(placement, mesh):
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [placement], run_check=False))
    return layer

def models():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))
    from torch.distributed.tensor.placement_types import _StridedShard
    return {
        "plain": nn.Linear(4, 4),
        "fsdp2": fully_shard(nn.Linear(4, 4), mesh=mesh),
        "fsdp1": FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu")),
        "strided": dtensor(_StridedShard(0, split_factor=1), mesh),
        "users": dtensor(Shard(0), mesh),
    }

def without(names, kind):
    made = models()
    for module, name in names:
        delattr(import_module(module), name)
    for ours in [ours for ours in sys.modules if ours.split(".")[0] == "distprune"]:
        del sys.modules[ours]
    import distprune

    class Users(distprune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"
        def compute_mask(self, t, default_mask):
            return default_mask * (t.abs() >= 0.1)

    calls = {
        "plain": lambda model: distprune.l1_unstructured(model, "weight", 0.5),
        "fsdp2": lambda model: distprune.l1_unstructured(model, "weight", 0.5),
        "fsdp1": lambda model: distprune.prune_model(model, 0.5),
        "strided": lambda model: distprune.l1_unstructured(model, "weight", 0.5),
        "users": lambda model: Users.apply(model, "weight"),
    }
    said = {}
    for other in {"users": ("plain", "fsdp2"), "strided": ("plain",)}.get(kind, ("plain", "users")) + (kind,):
        try:
            calls[other](made[other])
            said[other] = ""
        except Exception as error:
            said[other] = f"{type(error).__name__}: {error}"
    return said

for names, kind in json.loads(sys.argv[1]):
    for module, _ in names:
        import_module(module)
    if os.fork() == 0:
        print(json.dumps(without(names, kind)), flush=True)
        os._exit(0)
    os.wait()
"""


def test_moved_names_are_missed_where_they_are_needed() -> None:
    cases = [([key for key in inside.names if "._" in ".".join(key)], feature) for feature, inside in INSIDES.items()]
    cases += [([key], needs) for key, needs in OTHERS.items()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for (names, kind), line in zip(cases, done.stdout.splitlines(), strict=True):
        said = json.loads(line)
        error = said.pop(kind)
        assert set(said.values()) == {""}, (names, said)
        assert error.startswith("NotImplementedError: "), (names, error)
        if kind != "strided":
            assert f"torch {torch.__version__} has no " in error
            assert all(name in error for _, name in names), (names, error)
