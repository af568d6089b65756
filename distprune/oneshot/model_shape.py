"""The shapes of a model that a walk's plan follows from, read off its modules without its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from distprune.calibration.order import kind_of
from distprune.models.decoder_blocks import decoder_blocks, num_bytes, text_config
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.oneshot.channels import MovableChannels, find_channels
from distprune.oneshot.walk_costs import BlockShape, ChannelShape, InputShape, ModelShape

_EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")  # in configs of transformers
_USUAL_EXPERTS = 8  # where the config does not say


def shape_of(model: nn.Module) -> ModelShape:
    """Return the shapes of ``model``, which may be in shards or on the meta device. Local; global shapes.

    Which layers share an input, and which add to hidden states, shows only when a block runs. Here a rule says it:
    of the layers of one module the last that puts out as many features as hidden states have adds to these, and the
    others share an input if they take equally many features.

    Raises:
        ValueError: there are no decoder blocks, or no linear layers in them.
    """
    blocks = [block for _, block in decoder_blocks(model)]
    first = next((of for block in blocks for of in linear_layers(block).values()), None)
    if first is None:
        raise ValueError(f"the blocks of {type(model).__name__} hold no linear layer")
    config = text_config(model)
    shapes = tuple(
        BlockShape(
            tuple(_inputs(list(linears.values()), first.num_in, config)),
            num_bytes(block),
            tuple(_channels(block, linears, of) for of in find_channels(model, block, linears, m=1).values()),
        )
        for block in blocks
        for linears in [linear_layers(block)]
    )
    return ModelShape(shapes, num_bytes(model), first.num_in, first.parameter.element_size(), _called(config, first))


def _called(config: Any, first: LinearLayer) -> int:
    """Return how many features of rotary embeddings, cosine and sine, a block is called with for each token."""
    num_heads = getattr(config, "num_attention_heads", None)
    if not (getattr(config, "rope_parameters", None) and isinstance(num_heads, int)):
        return 0
    return 2 * (getattr(config, "head_dim", None) or first.num_in // num_heads)


def _channels(block: nn.Module, linears: Mapping[str, LinearLayer], of: MovableChannels) -> ChannelShape:
    parameters = [block.get_parameter(cut.parameter) for cut in of.cuts if cut.dim == 0]
    num_moved = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    length, copies = of.num_channels // of.num_heads, of.reader_index.shape[1]
    return ChannelShape(of.num_heads, length, copies, linears[of.reader].num_out, num_moved)


def _inputs(linears: Sequence[LinearLayer], hidden: int, config: Any) -> Iterator[InputShape]:
    """Yield the inputs of a block's ``linears``, in the order of its modules."""
    modules: dict[str, dict[str, list[LinearLayer]]] = {}  # by the module's name, by the layer's; experts are one kind
    for linear in linears:
        kind = kind_of(linear.name if linear.expert is None else linear.parameter_path)
        modules.setdefault(kind.rpartition(".")[0], {}).setdefault(kind, []).append(linear)
    routed = {module for module, of_module in modules.items() if next(iter(of_module.values()))[0].is_routed}
    for module, of_module in modules.items():
        *others, last = of_module.values()
        if last[0].num_out != hidden:
            others, last = [*others, last], []
        for num_in in dict.fromkeys(layers[0].num_in for layers in others):
            yield _input([layers for layers in others if layers[0].num_in == num_in], config)
        if last:
            # What shared experts put out is added to what the others do.
            above = module.rpartition(".")[0]
            adds = not any(name.startswith(f"{above}.") for name in routed) if above else module not in routed
            yield _input([last], config, adds=adds and module not in routed)


def _input(kinds: Sequence[Sequence[LinearLayer]], config: Any, *, adds: bool = False) -> InputShape:
    """Return the input that layers of ``kinds`` share, those of an expert each."""
    first = kinds[0][0]
    num_out, num_experts = sum(layers[0].num_out for layers in kinds), len(kinds[0]) if first.is_routed else 0
    share = _experts_a_token(config, num_experts) / num_experts if num_experts else 1.0
    stacked = first.expert is not None or not first.is_routed
    return InputShape(first.num_in, num_out, len(kinds), adds, num_experts, share, stacked)


def _experts_a_token(config: Any, num_experts: int) -> int:
    said = next((of for name in _EXPERTS_A_TOKEN if (of := getattr(config, name, None))), _USUAL_EXPERTS)
    return min(max(said) if isinstance(said, list | tuple) else int(said), num_experts)
