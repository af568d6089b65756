"""Where the decoder blocks of a model are, read off its structure."""

from __future__ import annotations

from torch import nn

__all__ = ["decoder_blocks"]


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, block) of the decoder blocks in order: the ``ModuleList`` that holds most of the weights.

    A list counts if all its entries have children of their own, which sets blocks apart from lists of
    plain layers. Of a list inside another the outer one is meant. No communication; under FSDP2 the
    global sizes are compared, so every rank finds the same list.

    Raises:
        ValueError: there is no such list.
    """
    found: list[tuple[int, str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if all(any(True for _ in block.children()) for block in module):
            num_elements = sum(parameter.numel() for parameter in module.parameters())
            found.append((num_elements, name, module))
    if not found:
        raise ValueError(
            f"no decoder blocks in {type(model).__name__}: looked for a torch.nn.ModuleList whose entries have "
            "child modules of their own"
        )
    # max() keeps the first of equals, and named_modules() yields an outer list before its inner ones.
    _, prefix, blocks = max(found, key=lambda entry: entry[0])
    return [(f"{prefix}.{i}" if prefix else str(i), block) for i, block in enumerate(blocks)]
