"""The configuration of a model that is cut: found by the sizes it has to say, and tried out before anything changes.

Which fields of a configuration say a size is found by value and by a word in the name; whether they do is checked:
the class of the model is built of the new configuration on the meta device, and every name and shape compared with
those of the cut model. What its modules keep as plain attributes (``num_experts``, ``out_features``, ``layer_idx``) is
what differs between two such models, of the configuration before and of the one after.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.hf_load import build_like

Shape = tuple[int, ...]
Rename = Callable[[str], str | None]

# By what is said: words of which a field's name has one, and words of which it has none.
_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mlp": (("inter", "inner", "ffn", "d_ff", "ff_dim", "mlp_dim"), ()),
    "heads": (("head",), ("dim", "size")),
    "kv_groups": (("head",), ("dim", "size")),
    "experts": (("expert",), ("per_tok", "topk", "top_k", "size", "dim")),
    "layers": (("layer", "block", "depth"), ()),
}
_MAX_TRIES = 64
_MAX_TRIED = 1024  # units of which all numbers are tried, where one is not possible
_MAX_NAMED = 12  # possible sizes that an error names
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class SizeChange:
    """``what`` goes from ``before`` to ``after``: a kind of units, ``"layers"`` or the name of a field.

    ``head_dim``: what the configuration must say besides.
    """

    what: str
    before: Any
    after: Any
    head_dim: int | None = None

    def is_said_by(self, name: str, value: Any) -> bool:
        """Return whether a field ``name`` of ``value`` may say what is before."""
        words, without = _NAMES.get(self.what, ((self.what,), ()))
        is_size = any(word in name for word in words) and not any(word in name for word in without)
        is_default = self.what == "mlp" and value is None
        return is_size and (is_default or (type(value) is type(self.before) and value == self.before))


@dataclass(frozen=True)
class Smaller:
    """``fields`` of the text configuration that change; ``attributes`` by module and name, under names before."""

    fields: Mapping[str, Any]
    attributes: Mapping[tuple[str, str], tuple[Any, Any]]  # before, after


def smaller_config(
    model: nn.Module,
    changes: Sequence[SizeChange],
    shapes: Mapping[str, Shape],
    rename: Rename = lambda name: name,
) -> Smaller:
    """Return the configuration with which the class of ``model`` has parameters and buffers of ``shapes``, by new name.

    ``rename`` makes a name, of a tensor or a module, that of the cut model; ``None``: it is gone. Local; nothing is
    changed.

    Raises:
        ValueError: transformers allows no such sizes, or there is no such configuration; it names what would differ.
        NotImplementedError: ``model`` is none of transformers, is quantized, or is not what its configuration says.
    """
    text_config(model)
    config: Any = model.config
    changes = [change for change in changes if change.before != change.after]
    if getattr(config, "quantization_config", None):
        raise NotImplementedError("quantized weights cannot be cut; take the model they were quantized from")
    try:
        before = _made_of(config, {})
        dense = build_like(model, before)
    except Exception as error:
        raise NotImplementedError(
            f"a {type(model).__name__} cannot be built of its configuration, and so not made smaller: {error}"
        ) from error
    if difference := _difference(shapes_of(model), shapes_of(dense)):
        raise NotImplementedError(f"the model is not what its configuration says: {difference}")
    reasons: list[str] = []
    for fields in itertools.islice(_tries(_text(config), changes), _MAX_TRIES):
        try:
            after = _made_of(config, fields)
            cut = build_like(model, after)
        except Exception as error:  # whatever a class of transformers raises over sizes it does not like
            reasons.append(" ".join(str(error).split()) + _possible(config, changes))
            continue
        difference = _difference(shapes, shapes_of(cut))
        if not difference:
            old, new = vars(_text(before)), vars(_text(after))
            changed = {k: v for k, v in new.items() if not k.startswith("_") and (k not in old or old[k] != v)}
            changed |= {k: v for k, v in fields.items() if k not in new}
            return Smaller(changed, _attributes(dense, cut, rename))
        reasons.append(f"with {', '.join(f'{k}={v}' for k, v in fields.items()) or 'what it has'}, {difference}")
    kind = type(_text(config)).__name__
    what = ", ".join(f"{change.what} {change.before} to {change.after}" for change in changes)
    raise ValueError(f"{kind} cannot say this ({what}): {reasons[0]}")


def text_config(model: nn.Module) -> Any:
    """Return the part of the model's configuration that its decoder is built of. Local.

    Raises:
        NotImplementedError: it has none of transformers.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise NotImplementedError(f"{type(model).__name__} has no configuration of transformers to say its new sizes")
    return _text(config)


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _made_of(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of ``config`` with ``fields`` of its text configuration changed, checked as one that is loaded."""
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(_text(changed), name, value)
    made = type(config).from_dict(changed.to_dict())
    _implement_alike(made, config)
    return made


def _implement_alike(made: Any, config: Any) -> None:
    """Have ``made``, and each configuration in it, choose the attention that ``config`` has chosen there."""
    made._attn_implementation = config._attn_implementation  # of those in it, too
    for name in config.sub_configs:
        if getattr(made, name, None) is not None:
            _implement_alike(getattr(made, name), getattr(config, name))


def _tries(text: Any, changes: Sequence[SizeChange]) -> Iterator[dict[str, Any]]:
    """Yield fields that may say ``changes``: at first all that can, then fewer."""
    head_dims = [change.head_dim for change in changes if change.head_dim is not None]
    fixed = {"head_dim": head_dims[0]} if len({*head_dims}) == 1 else {}  # or layers have their own
    options: dict[str, list[Any]] = {}
    for name, value in (vars(text) | layers_of_their_own(text)).items():
        for change in () if name.startswith("_") else changes:
            if change.is_said_by(name, value) and change.after not in options.get(name, []):
                options.setdefault(name, []).append(change.after)
    unchanged = object()
    for values in itertools.product(*([*sizes, unchanged] for sizes in options.values())):
        yield {name: value for name, value in zip(options, values, strict=True) if value is not unchanged} | fixed


def layers_of_their_own(text: Any) -> dict[str, Any]:
    """Return the field in which a configuration says what single layers have otherwise, if there are any. Local."""
    return {name: value for name, value in text.to_dict().items() if name == "per_layer_config" and value}


def _possible(config: Any, changes: Sequence[SizeChange]) -> str:
    """Return which sizes transformers allows instead, in the same proportion where several change."""
    if not all(type(change.before) is int and change.before <= _MAX_TRIED for change in changes):
        return ""
    last = changes[-1]
    possible = []
    for size in range(1, last.before):
        tried = [dataclasses.replace(change, after=change.after * size // last.after) for change in changes]
        try:
            _made_of(config, next(_tries(_text(config), tried)))
            possible.append(size)
        except Exception:
            continue
    return f"; possible {last.what}: {', '.join(map(str, possible[-_MAX_NAMED:])) or 'none'}"


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of ``model`` by name, shared ones by each of theirs."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def shapes_of(model: nn.Module, rename: Rename = lambda name: name) -> dict[str, Shape]:
    """Return the shapes of its parameters and buffers; ``rename`` is as of :func:`smaller_config`."""
    named = ((rename(name), tensor) for name, tensor in tensors_of(model))
    return {name: tuple(tensor.shape) for name, tensor in named if name is not None}


def _difference(wanted: Mapping[str, Shape], built: Mapping[str, Shape]) -> str:
    """Return in words the first name or shape that differs; nothing if none does."""
    for name in [*wanted, *built]:
        if wanted.get(name) != built.get(name):
            return f"{name!r} would be {built.get(name, 'missing')}, not {wanted.get(name, 'missing')}"
    return ""


def _attributes(before: nn.Module, after: nn.Module, rename: Rename) -> dict[tuple[str, str], tuple[Any, Any]]:
    changed: dict[tuple[str, str], tuple[Any, Any]] = {}
    for path, module in before.named_modules():
        if (new_path := rename(path)) is None:
            continue
        now = vars(after.get_submodule(new_path))
        for name, value in vars(module).items():
            if name in now and _is_plain(value) and _is_plain(now[name]) and value != now[name]:
                changed[path, name] = value, now[name]
    return changed


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value))
