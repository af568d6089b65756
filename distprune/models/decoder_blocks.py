"""Where the decoder blocks of a model are, read off its structure."""

from __future__ import annotations

import warnings

from torch import nn

__all__ = ["decoder_blocks", "warn_of_other_blocks"]

_List = nn.ModuleList | nn.ModuleDict


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of the decoder blocks in order: the list that holds most of the weights.

    A list is a ``ModuleList``, or a ``ModuleDict`` with numbered keys. All its entries must have children of their own:
    that tells blocks from plain layers. Of two nested lists the outer one is taken. No communication; global sizes are
    compared, so every rank finds the same list.

    Raises:
        ValueError: there is no such list.
    """
    found = _lists(model)
    if not found:
        raise ValueError(
            f"no decoder blocks in {type(model).__name__}: looked for a torch.nn.ModuleList (or a ModuleDict with "
            "numbered keys) whose entries have child modules of their own"
        )
    prefix = max(found, key=lambda name: _num_weights(found[name]))  # of equals the first
    return [(f"{prefix}.{key}" if prefix else key, block) for key, block in found[prefix].named_children()]


def warn_of_other_blocks(model: nn.Module) -> None:
    """Warn that other lists of blocks, such as a second tower, are left as they are. Local."""
    blocks = decoder_blocks(model)
    chosen = blocks[0][0].rpartition(".")[0]
    others = [name for name, of in _lists(model).items() if name != chosen and _num_weights(of)]
    if others:
        warnings.warn(
            f"only the blocks of {chosen!r} are pruned; those of {', '.join(map(repr, others))} are left as they are: "
            "name what is to be pruned in prune_model(include=...)",
            stacklevel=2,
        )


def _lists(model: nn.Module) -> dict[str, _List]:
    """Return the outermost lists of blocks, by name."""
    found: dict[str, _List] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _List) or any(name.startswith(f"{outer}." if outer else "") for outer in found):
            continue
        keys = [key for key, _ in module.named_children()]
        if keys and all(key[-1:].isdigit() and any(module.get_submodule(key).children()) for key in keys):
            found[name] = module
    return found


def _num_weights(blocks: _List) -> int:
    return sum(parameter.numel() for parameter in blocks.parameters() if parameter.ndim > 1)
