"""What can be removed from a decoder block, read off its structure: MLP channels, query heads, KV groups, experts.

Nouns: a *unit* is what leaves a model as one: it owns rows of the layers that make it and columns of the layer that
reads it, the *reader*. An MLP channel is one input of the down projection; a head is ``head_dim`` inputs of the output
projection; a *KV group* is a key and value head with the query heads that share it; an expert is its slice of the 3-D
weights and its row of the router. No table of architectures; but no structure says how a fused projection is laid out:

- ``gate_up``: the two halves. Experts that mix them otherwise have ``_apply_gate``, which is asked.
- ``qkv_proj`` (Phi-3): all queries, all keys, all values. Other fused ones (``c_attn`` of GPT-2, ``query_key_value`` of
  GPT-NeoX, BLOOM and Falcon, ``Wqkv`` of MPT and DBRX) are refused: their configurations know no size of a head, heads
  have hidden_size / num_heads features, so that no model of the same class has fewer.

No communication; global shapes are compared, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import LinearLayer, linear_layers
from distprune.models.matrices import expert_weights, find_routers

UnitKind = Literal["mlp", "heads", "kv_groups", "experts"]
UNIT_KINDS: tuple[UnitKind, ...] = ("mlp", "heads", "kv_groups", "experts")

# In names of layers that write to hidden states.
_READERS = ("down", "out", "c_proj", "to_h", "fc2", "w2", "o_proj", "dense")
_SINKS = "sinks"  # one logit a query head, in GPT-OSS


@dataclass(frozen=True)
class Cut:
    """One parameter or buffer that gets smaller: along ``dim``, unit u owns the indices ``index[u]``.

    Indices that no unit owns stay. ``expert``: the slice along dim 0 of a 3-D parameter (2-D: of its biases) that this
    is about; ``dim`` is the whole parameter's.
    """

    parameter: str  # its path within the block
    dim: int
    index: torch.Tensor  # (num_units, width) int64
    expert: int | None = None


@dataclass(frozen=True)
class Units:
    """The units of one kind in one place of a block. ``name``: its module's path, plus ``.e`` of an expert ``e``.

    ``cuts``: every parameter that gets smaller, the reader's weight included. Units compete within ``num_groups``
    groups of equally many consecutive ones (query heads: their KV groups), of each of which equally many stay, and at
    least ``min_kept`` of all (experts: as many as a token goes to).
    ``reader``: the name of the :class:`LinearLayer` whose inputs they are, ``reader_index`` (num_units, width) which of
    its inputs; none of experts.
    """

    kind: UnitKind
    name: str
    num_units: int
    num_groups: int
    cuts: tuple[Cut, ...]
    reader: str | None
    reader_index: torch.Tensor | None
    min_kept: int = 1


def find_units(block: nn.Module, kind: UnitKind) -> list[Units]:
    """Return all units of ``kind`` in ``block``, by place; none where it has no such layer. Local.

    Raises:
        ValueError: no such kind.
        NotImplementedError: it has one, of which units cannot be removed; it names the module and says why.
    """
    if kind not in UNIT_KINDS:
        raise ValueError(f"units are one of {', '.join(UNIT_KINDS)}, not {kind!r}")
    if kind == "experts":
        return list(_experts(block))
    units: list[Units | None] = []
    for path, linears in _by_place(block).items():
        module = linears[-1].module if linears[-1].expert is not None else block.get_submodule(path)
        is_attention = head_dim(module) > 0
        if is_attention == (kind != "mlp"):
            units.append(_heads(path, module, linears, kind) if is_attention else _channels(path, module, linears))
    return [of_place for of_place in units if of_place is not None]


def find_all_units(model: nn.Module, kind: UnitKind) -> list[tuple[str, list[Units]]]:
    """Return (name, units of ``kind``) of every decoder block of ``model``, in order. Local.

    Raises:
        NotImplementedError: units of a block cannot be removed, or no block has any; it names what and why.
        ValueError: there are no decoder blocks, or no such kind.
    """
    by_block: list[tuple[str, list[Units]]] = []
    for name, block in decoder_blocks(model):
        try:
            by_block.append((name, find_units(block, kind)))
        except NotImplementedError as error:
            raise NotImplementedError(f"block {name!r}: {error}") from error
    if not any(units for _, units in by_block):
        raise NotImplementedError(f"no {kind} to remove: no block of {type(model).__name__} has any that are known")
    return by_block


def _by_place(block: nn.Module) -> dict[str, list[LinearLayer]]:
    """Return the linear layers by the module that holds them, or by expert, in the order in which they are applied."""
    by_place: dict[str, list[LinearLayer]] = {}
    for name, linear in linear_layers(block).items():
        place = name.rpartition(".")[0]
        if linear.expert is not None:
            place = f"{place.rpartition('.')[0]}.{linear.expert}"
        by_place.setdefault(place, []).append(linear)
    return by_place


def _channels(path: str, module: nn.Module, linears: Sequence[LinearLayer]) -> Units | None:
    """Return the channels of an MLP: one or two layers, or a fused one, make them, and the last one reads them."""
    *makers, reader = linears
    size = reader.num_in
    is_fused = len(makers) == 1 and makers[0].num_out == 2 * size
    is_made = is_fused or (1 <= len(makers) <= 2 and all(maker.num_out == size for maker in makers))
    reader_name = reader.name.rpartition(".")[2] if reader.expert is None else reader.parameter_name
    # Where all are square, only names tell which one comes last.
    is_last = reader.num_out != size or any(part in reader_name for part in _READERS)
    if not is_made or not is_last or any(maker.num_in != reader.num_out for maker in makers):
        return None
    if reader.expert is None and not _is_between_elementwise(path, module, linears):
        return None
    channels = torch.arange(size, device="cpu")
    index = channels[:, None]
    if is_fused:
        index = torch.stack(_halves(reader.module, size), dim=1)
    cuts = [cut for maker in makers for cut in _row_cuts(maker, index)]
    return _units("mlp", path, 1, cuts, reader, channels[:, None])


def _is_between_elementwise(path: str, module: nn.Module, linears: Sequence[LinearLayer]) -> bool:
    """Return whether nothing but ``linears`` in ``module`` has weights for each channel: no MLP has (Mamba's mixer
    does).

    Raises:
        NotImplementedError: a norm does, over all channels.
    """
    size, num_out = linears[-1].num_in, linears[-1].num_out
    if any(size in p.shape for p in module.parameters(recurse=False)):
        return False
    held = {linear.module for linear in linears}
    for name, child in module.named_children():
        is_layer = child in held or any(isinstance(part, nn.Linear) for part in child.modules())  # one beside it
        if is_layer or not any(size in p.shape for p in child.parameters()):
            continue
        if "Norm" not in type(child).__name__:
            return False
        if size != num_out:
            raise _refusal(path, module)(f"its {name!r} normalizes all MLP channels together")
    return True


def _halves(module: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the gates and those of the ups in a fused projection; ``_apply_gate`` is tried out."""
    channels = torch.arange(size, device="cpu")
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None or size == 1:
        return channels, channels + size
    before = torch.ones(1, 2 * size, dtype=torch.float32, device="cpu")
    # The second row of channel 0 is in the other half, or next to the first.
    for second, rows in ((size, (channels, channels + size)), (1, (2 * channels, 2 * channels + 1))):
        after = before.clone()
        after[0, second] = 0.5
        with torch.no_grad():
            changed = torch.nonzero(apply_gate(after) - apply_gate(before))[:, 1].tolist()
        if changed == [0]:
            return rows
    raise NotImplementedError(f"a {type(module).__name__} mixes gates and ups in an order this library does not know")


def _heads(path: str, module: nn.Module, linears: Sequence[LinearLayer], kind: UnitKind) -> Units | None:
    """Return the query heads of an attention, or its KV groups, which are the same where each has one query head."""
    size = head_dim(module)
    by_name = {linear.name.rpartition(".")[2]: linear for linear in linears}
    letters = {name[0]: linear for name, linear in by_name.items()}
    known = {name for name in by_name if name[0] in "qkv"}
    others = [linear for name, linear in by_name.items() if name not in known]
    refused = _refusal(path, module)
    if len(others) != 1 or not (known == {"qkv_proj"} or (len(known) == 3 and {"q", "k", "v"} <= letters.keys())):
        if "Attention" not in type(module).__name__:
            return None  # Mamba's mixer, an indexer
        raise refused(f"{', '.join(by_name)} are not q, k, v and out")
    (reader,) = others
    makers = [letters["q"]] if known == {"qkv_proj"} else [letters[letter] for letter in "qkv"]
    num_heads, num_left = divmod(reader.num_in, size)
    num_kv_rows = (makers[0].num_out - reader.num_in) // 2 if len(makers) == 1 else makers[1].num_out
    num_kv = max(num_kv_rows // size, 1)
    rows = [num_heads * size, num_kv * size, num_kv * size]
    if num_left or num_heads % num_kv or [m.num_out for m in makers] not in ([sum(rows)], rows):
        shapes = ", ".join(f"{name} {linear.num_in} to {linear.num_out}" for name, linear in by_name.items())
        raise refused(f"heads of {size} do not make up its projections ({shapes})")
    in_layers = {id(p) for linear in linears for p in linear.module.parameters(recurse=False)}
    for name, parameter in module.named_parameters():
        is_of_a_head = "." in name and set(parameter.shape) <= {1, size}  # a norm of queries or keys
        if id(parameter) not in in_layers and not is_of_a_head and name != _SINKS:
            raise refused(f"its {name!r} of shape {tuple(parameter.shape)} belongs to all heads")
    is_heads = kind == "heads" and num_kv < num_heads
    num_units = num_heads if is_heads else num_kv
    read = torch.arange(rows[0], device="cpu").view(num_units, -1)
    keys = torch.arange(rows[1], device="cpu").view(num_kv, -1)
    index = [read] if is_heads else [read, keys, keys]
    if len(makers) == 1:
        starts = (0, rows[0], rows[0] + rows[1])
        index = [torch.cat([start + part for start, part in zip(starts, index, strict=False)], dim=1)]
    cuts = [cut for maker, part in zip(makers, index, strict=False) for cut in _row_cuts(maker, part)]
    if getattr(module, _SINKS, None) is not None:
        cuts.append(Cut(f"{path}.{_SINKS}", 0, torch.arange(num_heads, device="cpu").view(num_units, -1)))
    return _units(kind, path, num_kv if is_heads else 1, cuts, reader, read)


def _experts(block: nn.Module) -> Iterator[Units]:
    routers, routed = find_routers([*block.modules()])
    for path, module in block.named_modules():
        parent_path = path.rpartition(".")[0]
        refused = _refusal(path, module)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and routed & set(module):
            raise refused("it keeps each expert as a module of its own, not all in 3-D weights")
        if not (names := expert_weights(module)):
            continue
        num, parent = int(getattr(module, names[0]).shape[0]), block.get_submodule(parent_path)
        beside = routers & {*parent.modules()}
        if len(beside) != 1 or names == ("weight",):
            raise refused("its router is not known")
        (router,) = beside
        for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
            if not tensor.is_floating_point():
                raise refused(f"its router holds {name!r}, whole numbers, which may be those of experts")
        router_parameters = {id(parameter) for parameter in router.parameters(recurse=False)}
        sliced = [name for name, p in module.named_parameters(path, recurse=False) if p.shape[0] == num]
        cuts = [Cut(name, 0, torch.arange(num, device="cpu")[:, None]) for name in sliced]
        for name, tensor in [*parent.named_parameters(parent_path), *parent.named_buffers(parent_path)]:
            is_row = id(tensor) in router_parameters and tensor.shape[0] == num
            if is_row or (tensor.numel() == num and not name.startswith(f"{path}.")):  # a correction of its scores
                cuts.append(Cut(name, list(tensor.shape).index(num), torch.arange(num, device="cpu")[:, None]))
        num_groups = _number((router, parent), ("n_group", "num_group"), 1)
        min_kept = _number((router, parent, module), ("top_k", "num_experts_per_tok"), 1)
        yield Units("experts", path, num, num_groups, tuple(cuts), None, None, min_kept)


def _row_cuts(linear: LinearLayer, index: torch.Tensor) -> list[Cut]:
    """Return the cuts of the outputs ``index`` of a layer: of its weight and of its bias."""
    is_sliced = linear.expert is not None
    cuts = [Cut(linear.parameter_path, is_sliced + linear.transposed, index, linear.expert)]
    bias = f"{linear.parameter_name}_bias" if is_sliced else "bias"
    if getattr(linear.module, bias, None) is not None:
        place = linear.parameter_path.rpartition(".")[0]
        cuts.append(Cut(f"{place}.{bias}" if place else bias, int(is_sliced), index, linear.expert))
    return cuts


def _units(
    kind: UnitKind, path: str, num_groups: int, cuts: Sequence[Cut], reader: LinearLayer, read: torch.Tensor
) -> Units:
    dim = (reader.expert is not None) + (not reader.transposed)
    reader_cut = Cut(reader.parameter_path, dim, read, reader.expert)
    return Units(kind, path, len(read), num_groups, (*cuts, reader_cut), reader.name, read)


def _refusal(path: str, module: nn.Module) -> Callable[[str], NotImplementedError]:
    what = f"units of {path!r}, a {type(module).__name__}, cannot be removed: "
    return lambda why: NotImplementedError(what + why)


def head_dim(module: nn.Module) -> int:
    """Return the size of the heads of an attention; 0: ``module`` is none."""
    return _number((module,), ("head_dim", "head_size"), 0)


def _number(modules: Sequence[nn.Module], names: Sequence[str], default: int) -> int:
    """Return the first int that one of ``modules`` has under one of ``names``."""
    numbers = (getattr(module, name, None) for module in modules for name in names)
    return next((number for number in numbers if isinstance(number, int)), default)
