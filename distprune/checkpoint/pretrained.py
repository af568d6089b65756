"""What transformers makes of a model directory's small files: it runs no code from them, and fails in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distprune.checkpoint.hf_directory import CONFIG_NAME, read_json
from distprune.checkpoint.optional_packages import import_extra

_MAX_MESSAGE = 500  # characters


@contextmanager
def one_line_errors(path: Path, what: str) -> Iterator[None]:
    """Turn whatever transformers raises in the body over a damaged or foreign file into one line. Local.

    Raises:
        ValueError: the body raised anything but a NotImplementedError, which stays what it is.
    """
    try:
        yield
    except NotImplementedError:
        raise
    except BaseException as error:
        # The tokenizers library reports what it did not expect as a BaseException of its own.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if "trust_remote_code" in said:
            said = f"it needs code that comes with it ({_auto_map(path)}), and no such code is run here"
            way_out = "if you trust it, load it yourself with trust_remote_code=True and call distprune.prune_model"
            raise ValueError(f"{path} holds no {what} that transformers knows: {said}; {way_out}") from error
        raise ValueError(f"{path} holds no {what} that transformers can load: {said[:_MAX_MESSAGE]}") from error


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a model directory. Local; no code of the directory is run.

    Raises:
        ValueError: there is none that transformers can load.
        ImportError: the extra ``hf`` is not installed.
    """
    transformers = import_extra("transformers", "hf")
    with one_line_errors(path, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # Texts are cut into windows after they are tokenized: it need not warn that they are long.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer


def check_config(path: Path) -> None:
    """Check the config of the model directory ``path`` for what must not reach transformers. Local.

    Raises:
        ValueError: it is no JSON object, or names an attention or experts implementation from the hub.
        NotImplementedError: the weights are quantized.
    """
    for key, value in _walk(read_json(path / CONFIG_NAME)):
        if "implementation" in key and "/" in str(value):
            raise ValueError(
                f"{path / CONFIG_NAME} asks for {key}={value!r}, code from the hub, which is not run here; remove it"
            )
        if key in ("quantization_config", "compression_config") and value:
            method = value.get("quant_method", "an unknown method") if isinstance(value, dict) else value
            raise NotImplementedError(
                f"the weights of {path} are quantized ({key}: {method}) and cannot be pruned; take the model they were "
                "quantized from, or dequantize them first (model.dequantize() and save_pretrained() of transformers)"
            )


def _walk(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value inside a JSON value, with the key it stands under."""
    pending = [("", root)]
    while pending:
        key, value = pending.pop()
        yield key, value
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]


def _auto_map(path: Path) -> str:
    files = [path / name for name in (CONFIG_NAME, "tokenizer_config.json") if (path / name).is_file()]
    return "; ".join(f"auto_map of {file.name}: {read_json(file).get('auto_map')}" for file in files)
