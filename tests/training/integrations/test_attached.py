"""What the integrations share: the packages they need, and what needs a schedule."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from distprune.training.integrations.attached import Attached


def test_an_argument_that_needs_a_schedule() -> None:
    with pytest.raises(TypeError, match="'score' needs a schedule"):
        Attached(None, {"score": "taylor", "include": "*.weight"})


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("transformers", "transformers", "hf"), ("lightning", "lightning.pytorch", "lightning")],
)
def test_a_package_is_missing(monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"distprune.training.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {name}: pip install 'distprune\[{extra}\]'"):
        importlib.import_module(f"distprune.training.integrations.{name}")


def test_the_library_imports_none_of_them() -> None:
    program = "import sys, distprune; assert not {'transformers', 'lightning', 'torchtitan'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
