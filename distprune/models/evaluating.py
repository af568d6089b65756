"""Forwards for evaluation and calibration: without dropout, and without a change to the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode, and restore the mode of every module. Local.

    Modules that are compiled run uncompiled: compiled code hears of no hook that comes after it. In evaluation mode,
    transformers' RWKV halves its hidden states every few blocks and divides weights in place to match. Only float16
    needs that. Here it runs as in training, where it does neither.
    """
    modes = [(module, module.training) for module in model.modules()]
    rwkv = sys.modules.get("transformers.models.rwkv.modeling_rwkv")  # a model exists only if that was imported
    kind = () if rwkv is None else rwkv.RwkvModel
    rescaled = [
        (m, m.config.rescale_every) for m in model.modules() if isinstance(m, kind) and not m.layers_are_rescaled
    ]
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    wrappers = [module for module in model.modules() if "_orig_mod" in module._modules]  # of torch.compile
    with replacing_forwards(wrappers, lambda wrapper: wrapper._orig_mod):
        try:
            model.eval()
            for module, _ in compiled:
                module._compiled_call_impl = None
            for module, _ in rescaled:
                module.config.rescale_every = 0
            yield
        finally:
            for module, every in rescaled:
                module.config.rescale_every, module.layers_are_rescaled = every, False
            for module, call in compiled:
                module._compiled_call_impl = call
            for module, mode in modes:
                module.training = mode


@contextmanager
def needing_gradients(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let the parameters ``names`` of ``module`` alone need gradients while the body runs. Local."""
    before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)


@contextmanager
def keeping_weights(model: nn.Module) -> Iterator[None]:
    """Raise a RuntimeError that names the parameter if the body, a forward, has written into one. Local."""
    before = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    yield
    for name, parameter, version in before:
        if parameter._version != version:
            raise RuntimeError(
                f"a forward of {type(model).__name__} changes its own weights, {name!r} among them: load it again; a "
                "model that does so can be neither evaluated nor calibrated here"
            )


@contextmanager
def replacing_forwards(blocks: Sequence[nn.Module], make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Let each of ``blocks`` run what ``make`` returns for it in place of its forward. Hooks are as before. Local."""
    with ExitStack() as stack:
        for block in blocks:
            before = {key: value for key, value in vars(block).items() if key == "forward"}
            stack.callback(vars(block).update, before)
            stack.callback(vars(block).pop, "forward")
            vars(block)["forward"] = make(block)
        yield
