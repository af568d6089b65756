"""Where the decoder blocks of a model are, read off its structure."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_List = nn.ModuleList | nn.ModuleDict


def shared_by_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> str:
    """Return in words which matrix two of ``blocks`` share, by its names in both; nothing if none do. Local."""
    holders: dict[int, tuple[str, str]] = {}
    for block, module in blocks:
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                continue
            holder, first = holders.setdefault(id(parameter), (block, f"{block}.{name}"))
            if holder != block:
                return f"{first!r} and {f'{block}.{name}'!r} are one weight"
    return ""


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of the decoder blocks in order: the list that holds most of the weights.

    A list is a ``ModuleList``, or a ``ModuleDict`` with numbered keys. All its entries must have children of their own:
    that tells blocks from plain layers. Of two nested lists the outer one is taken. Where a configuration of
    transformers says which part of the model reads text, the list is in there. No communication; global sizes are
    compared, so every rank finds the same list.

    Raises:
        ValueError: there is no such list.
    """
    lists = _lists(model)
    if not lists:
        raise ValueError(
            f"no decoder blocks in {type(model).__name__}: looked for a torch.nn.ModuleList (or a ModuleDict with "
            "numbered keys) whose entries have child modules of their own"
        )
    prefix = next(iter(lists))
    return [(f"{prefix}.{key}" if prefix else key, block) for key, block in lists[prefix].named_children()]


def warn_of_other_blocks(model: nn.Module) -> None:
    """Warn that other lists of blocks, such as a second tower, are left as they are. Local."""
    if others := other_blocks(model):
        warnings.warn(
            f"only the blocks of {next(iter(_lists(model)))!r} are pruned; those of {', '.join(map(repr, others))} are "
            "left as they are: name what is to be pruned in prune_model(include=...)",
            stacklevel=2,
        )


def other_blocks(model: nn.Module) -> list[str]:
    """Return the names of the other lists of blocks that hold weights, such as a second tower. Local."""
    _, *others = _lists(model).items()
    return [name for name, blocks in others if _num_weights(blocks)]


def check_one_stack(model: nn.Module) -> None:
    """Check that tokens run through the decoder blocks alone. Local.

    Raises:
        NotImplementedError: another list holds blocks of the same class, and is no encoder (hierarchical models).
    """
    if is_encoder_decoder(model):
        return
    lists = _lists(model)
    chosen = next(iter(lists))
    kinds = {type(block) for block in lists[chosen].children()}
    alike = [name for name in other_blocks(model) if kinds & set(map(type, lists[name].children()))]
    if alike:
        raise NotImplementedError(
            f"{', '.join(map(repr, alike))} hold blocks of the same kind as {chosen!r}: "
            "hidden states go through several lists, which a walk through one of them cannot follow; "
            "prune_model(include=...) prunes by the weights alone"
        )


def _lists(model: nn.Module) -> dict[str, _List]:
    """Return the outermost lists of blocks by name: first the decoder's."""
    lists: dict[str, _List] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _List) or any(name.startswith(f"{outer}." if outer else "") for outer in lists):
            continue
        keys = [key for key, _ in module.named_children()]
        if keys and all(key[-1:].isdigit() and any(module.get_submodule(key).children()) for key in keys):
            lists[name] = module
    if len(lists) < 2:
        return lists
    of_text = [name for name in lists if _reads_text(model, name)] or [*lists]
    chosen = max(of_text, key=lambda name: _num_weights(lists[name]))  # of equals the first
    return {chosen: lists[chosen], **lists}


def _num_weights(blocks: _List) -> int:
    return sum(parameter.numel() for parameter in blocks.parameters() if parameter.ndim > 1)


def _reads_text(model: nn.Module, name: str) -> bool:
    """Return whether the innermost module around ``name`` that has a configuration is the model of text, as the
    configuration of transformers says.
    """
    try:
        kind = text_config(model).model_type
    except (AttributeError, ValueError):  # it is none of transformers, or has several
        return True
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if config is not None:
            return bool(getattr(config, "model_type", None) == kind)
    return False


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether the configuration of ``model`` says that it has an encoder. Local."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def bare_model(model: nn.Module, *, past_fsdp: bool = False) -> nn.Module:
    """Return the model inside DDP, DataParallel and ``torch.compile``, which add a level to its names. Local.

    What was compiled before ``fully_shard`` was called on it is the root of FSDP2, and stays, unless ``past_fsdp``.
    """
    anything: Any = model
    while True:
        if isinstance(anything, nn.parallel.DistributedDataParallel | nn.DataParallel):
            anything = anything.module
        elif "_orig_mod" in getattr(anything, "_modules", ()) and (past_fsdp or not isinstance(anything, FSDPModule)):
            anything = anything._orig_mod
        else:
            bare: nn.Module = anything
            return bare


def text_config(model: nn.Module) -> Any:
    """Return the configuration of what reads and writes text in ``model``, ``None`` without any. Local."""
    config: Any = getattr(bare_model(model), "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


def largest_said(config: Any, name: str) -> Any:
    """Return what ``config`` says under ``name``, of layers that differ the largest; ``None``: nothing. Local."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return max((said for layer in layers if (said := getattr(layer, name, None)) is not None), default=None)


def num_bytes(module: nn.Module) -> int:
    """Return the size of all parameters of ``module``: the whole ones, where they are sharded. Local."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
