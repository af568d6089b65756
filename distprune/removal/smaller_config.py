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

from torch import nn

from distprune.checkpoint.meta_model import build_like

__all__ = ["SizeChange", "Smaller", "smaller_config", "text_config"]

Shape = tuple[int, ...]

_MAX_TRIES = 64
_MAX_TRIED = 1024  # units of which all numbers are tried, where one is not possible
_MAX_NAMED = 12  # possible sizes that an error names
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class SizeChange:
    """``what`` goes from ``before`` to ``after``, which a field says whose name has one of ``words`` and none of
    ``without``. ``is_default``: also one that is ``None``. ``fixed``: fields that must be set besides."""

    what: str
    before: Any
    after: Any
    words: tuple[str, ...]
    without: tuple[str, ...] = ()
    is_default: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Smaller:
    """``fields`` of the text configuration that change; ``attributes`` by module and name, under names before."""

    fields: Mapping[str, Any]
    attributes: Mapping[tuple[str, str], tuple[Any, Any]]  # before, after


def smaller_config(
    model: nn.Module,
    changes: Sequence[SizeChange],
    shapes: Mapping[str, Shape],
    rename: Callable[[str], str | None] = lambda name: name,
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
    if getattr(config, "quantization_config", None):
        raise NotImplementedError("quantized weights cannot be cut; take the model they were quantized from")
    before = _made_of(config, {})
    dense = build_like(model, before)
    own = {name: tuple(tensor.shape) for name, tensor in _tensors(model)}
    if difference := _difference(own, {name: tuple(t.shape) for name, t in _tensors(dense)}):
        raise NotImplementedError(f"the model is not what its configuration says: {difference}")
    reasons: list[str] = []
    for fields in itertools.islice(_tries(_text(config), changes), _MAX_TRIES):
        try:
            after = _made_of(config, fields)
            cut = build_like(model, after)
        except Exception as error:  # whatever a class of transformers raises over sizes it does not like
            reasons.append(" ".join(str(error).split()) + _possible(config, changes))
            continue
        difference = _difference(shapes, {name: tuple(t.shape) for name, t in _tensors(cut)})
        if not difference:
            return Smaller(_changed(_text(before), _text(after)), _attributes(dense, cut, rename))
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
    made._attn_implementation = config._attn_implementation
    return made


def _tries(text: Any, changes: Sequence[SizeChange]) -> Iterator[dict[str, Any]]:
    """Yield fields that may say ``changes``: at first all that can, then fewer."""
    fixed = {name: value for change in changes for name, value in change.fixed}
    options: dict[str, list[Any]] = {}
    for name, value in vars(text).items():
        for change in () if name.startswith("_") else changes:
            if not any(word in name for word in change.words) or any(word in name for word in change.without):
                continue
            is_alike = type(value) is type(change.before) and value == change.before
            if (is_alike or (change.is_default and value is None)) and change.after not in options.get(name, []):
                options.setdefault(name, []).append(change.after)
    unchanged = object()
    for values in itertools.product(*([*of, unchanged] for of in options.values())):
        yield {name: value for name, value in zip(options, values, strict=True) if value is not unchanged} | fixed


def _possible(config: Any, changes: Sequence[SizeChange]) -> str:
    """Return which sizes transformers allows instead, in the same proportion where several change."""
    if not all(type(change.before) is int and change.before <= _MAX_TRIED for change in changes):
        return ""
    last = changes[-1]
    found = []
    for size in range(1, last.before):
        tried = [dataclasses.replace(change, after=change.after * size // last.after) for change in changes]
        try:
            _made_of(config, next(_tries(_text(config), tried)))
            found.append(size)
        except Exception:
            continue
    return f"; possible {last.what}: {', '.join(map(str, found[-_MAX_NAMED:])) or 'none'}"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _difference(wanted: Mapping[str, Shape], built: Mapping[str, Shape]) -> str:
    """Return in words the first name or shape that differs; nothing if none does."""
    for name in [*wanted, *built]:
        if wanted.get(name) != built.get(name):
            return f"{name!r} would be {built.get(name, 'missing')}, not {wanted.get(name, 'missing')}"
    return ""


def _changed(before: Any, after: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(after).items()
        if not name.startswith("_") and (name not in vars(before) or vars(before)[name] != value)
    }


def _attributes(
    before: nn.Module, after: nn.Module, rename: Callable[[str], str | None]
) -> dict[tuple[str, str], tuple[Any, Any]]:
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    for path, module in before.named_modules():
        if (new_path := rename(path)) is None:
            continue
        now = vars(after.get_submodule(new_path))
        for name, value in vars(module).items():
            if name in now and _is_plain(value) and _is_plain(now[name]) and value != now[name]:
                found[path, name] = value, now[name]
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value))
