"""A small network in every layout, and what fails on it: every rank raises, and nothing has changed."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor

from distprune.shards.fsdp2 import Fsdp2Params
from tests import layouts
from tests.worlds import drawing, run_threads

__all__ = ["Act", "World", "failing", "local", "made", "raised", "spread_over"]

Act = Callable[[Any, Any], object]  # on a rank and a network
World = tuple[int, str]  # how many ranks (0: no process group), and the layout of every parameter


def made(layout: str) -> Any:
    """Return the same network everywhere, in that layout; 3 ranks cut its matrices unevenly."""
    with drawing(0):
        net: Any = nn.Sequential(OrderedDict(up=nn.Linear(4, 6), down=nn.Linear(6, 5)))
        other = nn.Embedding(6, 4)
    net.up.register_buffer("scale", torch.ones(4))
    makers: dict[str, Any] = {each.name: each.make for each in layouts.LAYOUTS if each.name != "plain"}
    makers["partial"] = lambda n: lambda _, t: DTensor.from_local(t, init_device_mesh("cpu", (n,)), [Partial()])
    spread = makers[layout](dist.get_world_size()) if layout in makers else lambda _, whole: whole
    for i, (path, parameter) in enumerate(list(net.named_parameters())):
        order = torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(i))
        values = (order.view(parameter.shape) - 10.5) / 20
        setattr(net.get_submodule(path.split(".")[0]), path.split(".")[1], nn.Parameter(spread(i, values)))
    if "fsdp1" in layout:
        return FullyShardedDataParallel(net, use_orig_params="original" in layout, device_id=torch.device("cpu"))
    if "tied" in layout:
        net.add_module("other", other)
        net.other.weight = net.up.weight
    if "fsdp2" in layout:
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    if "second" in layout:
        net.up = net.other
    return net


def spread_over(tensor: torch.Tensor, *placements: Placement) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def state(net: nn.Module) -> list[Any]:
    """Return everything a call may change, to compare, and last the tensors, which keeps their ids theirs."""
    seen: list[Any] = [list(net.state_dict())]
    fsdp2, kept = Fsdp2Params(), []
    for path, module in net.named_modules():
        tensors = {**module._parameters, **module._buffers}
        values = [(name, id(t), None if t is None else local(t).numpy().tobytes()) for name, t in tensors.items()]
        hooks = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
        methods = [[*getattr(hook, "_pruning_methods", ())] for _, hook in hooks]
        params = [fsdp2.find(module, name) for name in tensors]
        managed = [
            (m.param._module_info.param_name, type(m.param), getattr(m.param, "_watch", None)) for m in params if m
        ]
        always = [*module._forward_hooks_always_called], sorted(module._non_persistent_buffers_set)
        seen += [path, type(module), sorted(module.__dict__), values, hooks, methods, managed, always]
        kept.append(tensors)
    return [*seen, kept]


def raised(rank: int, net: Any, act: Act) -> Exception:
    """Return what ``act`` raises, having seen that it changed nothing."""
    before = state(net)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is checked for all ranks
        act(rank, net)
    assert state(net)[:-1] == before[:-1]
    return caught.value


def failing(world: World, act: Act, kind: type[Exception], text: str, prepare: Act = lambda *_: None) -> list[str]:
    """See that every rank raises that, and that nothing changed; return the texts."""

    def on_rank(rank: int) -> Exception:
        net = made(world[1])
        prepare(rank, net)
        return raised(rank, net, act)

    errors: list[Any] = run_threads(world[0], on_rank, draws=True) if world[0] else [on_rank(0)]
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert all(re.search(text, str(error)) for error in errors), errors
    return [str(error) for error in errors]
