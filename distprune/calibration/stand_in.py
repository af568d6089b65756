"""Forwards of a model in which its decoder blocks are neither run nor gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from typing_extensions import override

# Of a block's number, args and kwargs: what its call puts out.
Called = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def standing_in(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], called: Called) -> Iterator[None]:
    """Have ``called`` run in place of each of ``blocks``, (name in ``model``, block), while this lasts. Local."""
    with ExitStack() as stack:
        for index, (name, block) in enumerate(blocks):
            parent_name, _, child = name.rpartition(".")
            siblings = model.get_submodule(parent_name)._modules
            stack.callback(siblings.__setitem__, child, block)
            siblings[child] = _StandIn(called, index, block)
        yield


class _StandIn(nn.Module):
    """In place of a block while a model shows how it calls it."""

    def __init__(self, called: Called, index: int, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_called=called, _index=index, _block=block)  # the block is no submodule of this

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(self._index, args, kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)  # models ask their blocks which attention they have
