"""Whether a model runs on token ids alone, and whether its parameters have values. Local."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.models.decoder_blocks import bare_model, is_encoder_decoder
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import no_values

_PASSED = ("input_ids", "use_cache")
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_runs_on_tokens(model: nn.Module) -> None:
    """Check that a forward of ``model`` takes token ids alone, and finds the values of all parameters.

    Raises:
        NotImplementedError: it reads something else (images, sound).
        ValueError: a parameter is on the meta device; it names the first.
    """
    arguments = inspect.signature(model.forward).parameters.values()
    named = {argument.name: argument for argument in arguments if argument.kind not in _REST}
    reads = [name for name, one in named.items() if one.default is one.empty and name not in _PASSED]
    if "input_ids" not in named:  # a model of transformers says what it reads
        reads += {getattr(model, "main_input_name", "input_ids")} - {"input_ids"}
    if reads:
        raise NotImplementedError(
            f"{type(model).__name__} does not run on token ids alone, it reads {', '.join(reads)}: it can be neither "
            "calibrated nor evaluated here; prune_model prunes by the weights alone"
        )
    for name in _without_values(model):
        raise no_values(name)


def inputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``inputs``, without ``use_cache`` where ``model`` has none."""
    arguments = inspect.signature(bare_model(model, past_fsdp=True).forward).parameters
    takes_it = any(name == "use_cache" or one.kind is one.VAR_KEYWORD for name, one in arguments.items())
    return {name: value for name, value in inputs.items() if takes_it or name != "use_cache"}


def run_on_tokens(model: nn.Module, **inputs: Any) -> Any:
    """Return what a forward of ``model`` on token ids puts out.

    Raises:
        ValueError: it is an encoder-decoder model that does not run on them alone.
    """
    try:
        return model(**inputs_of(model, inputs))
    except (TypeError, ValueError, AttributeError) as error:
        if not is_encoder_decoder(model):
            raise
        raise does_not_run(model, error) from error


def logits_on_tokens(model: nn.Module, **inputs: Any) -> torch.Tensor:
    """Return the logits (samples, tokens, vocabulary) that ``model`` puts out, alone or called ``logits``.

    Raises:
        ValueError: as :func:`run_on_tokens` does, or there are none.
        NotImplementedError: they are cut over ranks.
    """
    output = run_on_tokens(model, **inputs)
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} puts out a {type(output).__name__} without logits; load it with its "
            "language-model head, if that is missing"
        )
    head = getattr(bare_model(model), "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    check_logits(logits, weight.shape[0] if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None)
    return logits


def check_logits(logits: torch.Tensor, vocabulary: int | None) -> None:
    """Raise a NotImplementedError if not all of ``logits`` (..., ``vocabulary``) are on this rank."""
    if isinstance(logits, DTensor) or (vocabulary is not None and logits.shape[-1] < vocabulary):
        raise NotImplementedError(
            f"logits are cut: {tuple(logits.shape)} on this rank; let the tensor-parallel plan replicate them"
        )


def does_not_run(model: nn.Module, error: Exception) -> ValueError:
    """Return what to raise where ``error`` says that ``model`` needs more than token ids."""
    kind = "is an encoder-decoder model that " if is_encoder_decoder(model) else ""
    return ValueError(
        f"{type(model).__name__} {kind}does not run on input_ids alone ({error}); prune_model prunes by the weights "
        "alone"
    )


def check_not_offloaded(model: nn.Module) -> None:
    """Check that no parameter waits elsewhere for its forward (Accelerate's ``device_map``); others may come later.

    Raises:
        ValueError: one does; it names the first.
    """
    for name in _without_values(model):
        if getattr(model.get_submodule(name.rpartition(".")[0]), "_hf_hook", None) is not None:
            raise no_values(name)


def _without_values(model: nn.Module) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if local_of(parameter).is_meta)
