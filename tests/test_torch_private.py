"""A torch that has moved a private name prunes plain models as ever; what needs the name says so."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from distprune.masks import fsdp2, fsdp2_resize
from distprune.shards import Inside, flat_param, private
from distprune.shards.torch_private import attributes_of

INSIDES = {"fsdp2": fsdp2._INSIDE, "fsdp1": flat_param._INSIDE}
# What else is looked up, and what then cannot be done.
OTHERS = {
    ("torch.distributed.tensor.placement_types", "_StridedShard"): "strided",
    ("torch.distributed.tensor._utils", "ExplicitRedistributionContext"): "users",
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "users",
}


class Base:
    annotated: int

    @functools.lru_cache  # noqa: B019
    def wrapped(self) -> None:
        self.set_in_wrapped = 1


class Inner(Base):
    """It only mentions read, moved and mentioned."""

    def __init__(self, other: Any) -> None:
        self.set_here: list[int] = []  # not moved
        self.set_here.append(other.read)
        self.other = "mentioned"

    @property
    def shown(self) -> int:
        return len(self.set_here)


class Fields(NamedTuple):
    field: int


KNOWN = {Base: ("annotated", "wrapped", "set_in_wrapped"), Fields: ("field",)}
KNOWN[Inner] = (*KNOWN[Base], "set_here", "other", "shown")


@pytest.mark.parametrize("owner", KNOWN)
def test_attributes_are_there_and_not_only_mentioned(owner: type) -> None:
    names = KNOWN[owner]
    assert attributes_of(owner) >= {*names}
    key = (__name__, owner.__name__)
    assert Inside("it", {key: names}, "").missing == []
    inside = Inside("it", {key: (*names, "read", "moved", "mentioned")}, "do something else")
    assert inside.missing == [f"{owner.__name__}.{name}" for name in ("read", "moved", "mentioned")]
    text = rf"torch {re.escape(torch.__version__)} has no {owner.__name__}.read,.* for it; .*or do something else"
    with pytest.raises(NotImplementedError, match=text):
        inside.check()


def test_this_torch_has_all() -> None:
    insides = {**INSIDES, "resized": fsdp2_resize._INSIDE}
    assert {feature: inside.missing for feature, inside in insides.items()} == {feature: [] for feature in insides}


@pytest.mark.parametrize("names", [("torch", "is_no_name"), ("torch.is_no_module", "name")], ids=str)
def test_a_stand_in(names: tuple[str, str]) -> None:
    absent = private(*names)
    assert not isinstance(torch.ones(1), absent)
    with pytest.raises(NotImplementedError, match=f"has no {'.'.join(names)}"):
        absent(1, strict=True)
    assert Inside("it", {names: ()}, "").missing == [".".join(names)]


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
