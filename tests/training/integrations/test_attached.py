"""What the integrations share: the packages they need, and what needs a schedule."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.training.integrations.attached import Attached


def test_an_argument_that_needs_a_schedule() -> None:
    with pytest.raises(TypeError, match="'score' needs a schedule"):
        Attached(score="taylor", include="*.weight")


def test_neither_schedule_nor_zeros() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = Attached()
    with pytest.raises(ValueError, match="neither a schedule nor a zero in the model, so training would be dense"):
        attached.begin(model, optimizer)
    prune.prune_model(model, 0.5)
    attached.begin(model, optimizer)
    assert (attached.sparsity, attached.news(), attached.news()) == (0.5, {"sparsity/weight": 0.5}, {})
    attached = Attached(log_parameters=False)
    attached.begin(model, optimizer)
    assert (attached.sparsity, attached.news()) == (0.5, {})


def test_it_begins_again_with_what_can_be_gone_through_once() -> None:
    model, once = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), iter(["0.weight"])
    prune.prune_model(model, 0.5, scope="tensor")
    attached = Attached(include=once)  # type: ignore[arg-type]
    for _ in range(2):
        attached.begin(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert attached.news() == {"sparsity/0.weight": 0.5}


class Without:
    """An importer that says that a package is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self._package:
            raise ModuleNotFoundError(name=name)


@pytest.mark.parametrize(("package", "extra"), [("transformers", "hf"), ("lightning", "lightning")])
def test_a_package_is_missing(monkeypatch: pytest.MonkeyPatch, package: str, extra: str) -> None:
    ours = f"distprune.training.integrations.{package}"
    for module in [name for name in sys.modules if name == ours or name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Without(package), *sys.meta_path])
    with pytest.raises(ImportError, match=rf"needs {package}.*: pip install 'distprune\[{extra}\]'"):
        importlib.import_module(ours)


@pytest.mark.whole
def test_the_library_imports_none_of_them() -> None:
    packages = "{'transformers', 'safetensors', 'lightning', 'torchtitan'}"
    program = f"import sys, distprune, distprune.checkpoint; assert not {packages} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
