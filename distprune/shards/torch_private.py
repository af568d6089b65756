"""The private names of torch that this library uses: a missing one is an error where it is needed, not at import."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["Inside", "StridedShard", "private"]


def _find(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def private(module: str, name: str) -> Any:
    """Return ``name`` of torch's ``module``. If torch has no such name, return a class in its place.

    Nothing is an instance of that class. Calling it raises ``NotImplementedError``.
    """

    def raises(*_: object, **__: object) -> None:
        raise _moved(f"{module}.{name}")

    found = _find(module, name)
    return type(name, (), {"__new__": raises}) if found is None else found


if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    StridedShard = private("torch.distributed.tensor.placement_types", "_StridedShard")


@dataclass(frozen=True)
class Inside:
    """Private names of one of torch's features: by (module, name), the attributes of it that are used here."""

    feature: str
    names: Mapping[tuple[str, str], Sequence[str]]
    advice: str

    @cached_property
    def missing(self) -> list[str]:
        """The names that this torch does not have."""
        found: list[str] = []
        for (module, name), attributes in self.names.items():
            owner = _find(module, name)
            if owner is None:
                found.append(f"{module}.{name}")
            elif isinstance(owner, type):
                there = attributes_of(owner)
                found += [f"{name}.{attribute}" for attribute in attributes if attribute not in there]
        return found

    def check(self) -> None:
        """Check that this torch has all the names.

        Raises:
            NotImplementedError: it names what is missing and the version of torch.
        """
        if self.missing:
            raise _moved(", ".join(self.missing), f" for {self.feature}", f", or {self.advice}")


def attributes_of(owner: type) -> set[str]:
    """Return the names that instances of ``owner`` have: its own and its bases', annotated, or set by its methods."""
    names: set[str] = set()
    for part in owner.__mro__[:-1]:
        names.update(vars(part), inspect.get_annotations(part))
        for value in vars(part).values():
            code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            names.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR") if code else None
    return names


def _moved(names: str, feature: str = "", advice: str = "") -> NotImplementedError:
    return NotImplementedError(
        f"torch {torch.__version__} has no {names}, on which distprune relies{feature}; use torch 2.13, with which "
        f"distprune is tested{advice}"
    )
