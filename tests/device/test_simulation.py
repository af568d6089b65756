"""The simulated device is as strict as a real one, and what it counts is there."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.device.accelerator import DEVICE, extension, on_rank
from tests.device.counter import Costs
from tests.device.cuda_table import not_on_cuda
from tests.worlds import ProcessPool


def refused(call: Callable[[], object]) -> str:
    """Return what ``call`` raises, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def memory_on_rank(rank: int) -> dict[str, Any]:
    device = on_rank(rank)
    values = torch.ones(4, device=device)
    child = os.fork()
    if not child:
        ctypes.string_at(values.data_ptr(), 4)
        os._exit(0)
    before = extension().bytes_in_use()
    extension().reset_peak()
    (torch.empty(1 << 20, device=device) + 1).sum()
    return {
        "killed by": os.WTERMSIG(os.waitpid(child, 0)[1]),
        "fresh": torch.empty(5, device=device).isnan().all().item(),
        "peak": extension().peak_bytes() - before,
        "kept": extension().bytes_in_use() - before,
        "pinned": [torch.ones(4).pin_memory().is_pinned(), torch.ones(4).is_pinned()],
    }


def test_memory_is_the_devices(devices: ProcessPool) -> None:
    (found,) = devices.run(1, memory_on_rank)
    assert found["killed by"] == signal.SIGSEGV
    assert found["fresh"]
    assert 8 << 20 <= found["peak"] < 9 << 20
    assert found["kept"] == 0
    assert found["pinned"] == [True, False]


def mixed_on_rank(rank: int) -> dict[str, str]:
    device = on_rank(rank)
    here, there, next_to_it = torch.ones(4), torch.ones(4, device=device), torch.ones(4, device=f"{DEVICE}:5")
    calls: dict[str, Callable[[], object]] = {
        "host": lambda: there + here,
        "joined": lambda: torch.cat([there, here]),
        "another device": lambda: there + next_to_it,
        "numpy": lambda: there.numpy(),
        "searched": lambda: torch.searchsorted(there, torch.tensor(1.0)),
        "generator": lambda: torch.rand(4, device=device, generator=torch.Generator()),
        "a number of the host": lambda: there + torch.tensor(1.0),
        "an index of the host": lambda: there[torch.tensor([1, 2])],
    }
    return {name: refused(call) for name, call in calls.items()}


def test_mixed_devices_are_refused_as_cuda_refuses_them(devices: ProcessPool) -> None:
    (found,) = devices.run(1, mixed_on_rank)
    assert found.pop("numpy").startswith("TypeError: can't convert simulated:0 device type tensor to numpy")
    assert "Expected a 'simulated' device type for generator" in found.pop("generator")
    assert [found.pop(name) for name in ("a number of the host", "an index of the host")] == ["nothing", "nothing"]
    assert all("at least two devices, simulated:0 and" in message for message in found.values()), found


def late_on_rank(rank: int) -> dict[str, Any]:
    device = on_rank(rank)
    there = torch.arange(4.0, device=device)
    found: dict[str, Any] = {}
    event = torch.Event()
    waits: dict[str, Callable[[], object]] = {
        "event": event.synchronize,
        "stream": torch.accelerator.current_stream().synchronize,
        "device": torch.accelerator.synchronize,
        "item": lambda: torch.ones(1, device=device).item(),
        "copy": lambda: torch.ones(1, device=device).cpu(),
    }
    for name, wait in waits.items():
        copied = there.to("cpu", non_blocking=True)
        event.record()
        there += 1
        early = copied.isnan().all().item()
        wait()
        found[name] = (early, copied.tolist())
    copied = there.to("cpu", non_blocking=True)
    asked = event.query(), torch.accelerator.current_stream().query(), torch.accelerator.current_stream().query()
    found["asked"] = asked, bool(copied.isnan().any())

    pinned = torch.ones(4).pin_memory()
    there.copy_(pinned, non_blocking=True)
    pinned.zero_()
    found["overwritten"] = refused(torch.accelerator.synchronize)
    plain = torch.full((4,), 2.0)
    there.copy_(plain, non_blocking=True)
    plain.zero_()
    torch.accelerator.synchronize()
    found["not pinned"] = there.tolist()
    return found


def test_what_the_host_does_not_wait_for_it_does_not_see(devices: ProcessPool) -> None:
    (found,) = devices.run(1, late_on_rank)
    waits = ("event", "stream", "device", "item", "copy")
    assert [found[name] for name in waits] == [(True, [i + j for j in range(4)]) for i in range(5)]
    assert found["asked"] == ((True, False, True), False)
    assert "pinned memory of shape [4] was written to while a copy from it" in found["overwritten"]
    assert found["not pinned"] == [2.0] * 4


def refused_on_rank(rank: int) -> dict[str, str]:
    device = on_rank(rank)
    whole = torch.arange(12, device=device, dtype=torch.float32).view(3, 4)
    calls: dict[str, Callable[[], object]] = {
        "host": lambda: dist.all_reduce(torch.ones(4)),
        "not contiguous": lambda: dist.all_reduce(whole.t()),
        "dtype": lambda: dist.all_reduce(whole.to(torch.int16)),
        "not the current device": lambda: dist.all_reduce(torch.ones(4, device=f"{DEVICE}:{rank + 1}")),
    }
    found = {name: refused(call) for name, call in calls.items()}
    dist.barrier()  # nobody leaves while the other still connects
    return found


def test_a_group_refuses_what_nccl_refuses(devices: ProcessPool) -> None:
    for found in devices.run(2, refused_on_rank):
        assert "No backend type associated with device type cpu" in found["host"]
        assert found["not contiguous"] == "ValueError: Tensors must be contiguous"
        assert "data type is not supported for NCCL process group: Short" in found["dtype"]
        assert "is the current one" in found["not the current device"]


def sums_on_rank(rank: int) -> list[Any]:
    device = on_rank(rank)
    own = torch.arange(4, device=device) + 10 * rank
    whole, part, mixed = torch.empty(8, device=device), torch.empty(2, device=device), own.clone()
    dist.all_gather_into_tensor(whole, own.float())
    dist.reduce_scatter_tensor(part, own.float())
    dist.all_to_all_single(mixed, own, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1])
    summed, mean, first, told = own.clone(), own.bfloat16(), own.clone(), own.clone()
    dist.all_reduce(summed)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.broadcast(told, src=1)
    dist.reduce(first, dst=0)
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own)
    dist.barrier()
    return [each.tolist() for each in (whole, part, mixed, summed, mean, told, first, *parts)]


def test_a_group_sums_and_sends(devices: ProcessPool) -> None:
    one, other = [0, 1, 2, 3], [10, 11, 12, 13]
    both = [10, 12, 14, 16]
    means, parts = [5, 6, 7, 8], [one, other]
    assert devices.run(2, sums_on_rank) == [
        [one + other, [10, 12], [0, 10, 11, 12], both, means, other, both, *parts],
        [one + other, [14, 16], [1, 2, 3, 13], both, means, other, other, *parts],
    ]


WAITS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "chosen by a mask": lambda values, mask: values[mask],
    "written by a mask": lambda values, mask: values.__setitem__(mask, values[:2].clone()),
    "nonzero": lambda _, mask: mask.nonzero(),
    "item": lambda values, _: values.sum().item(),
    "bool": lambda _, mask: bool(mask.any()),
    "tolist": lambda values, _: values.tolist(),
    "cpu": lambda values, _: values.cpu(),
    "unique": lambda values, _: torch.unique(values),
    "equal": lambda values, _: torch.equal(values, values),
    "tensor": lambda values, _: torch.tensor([1, 2], device=values.device),
    "to": lambda values, _: torch.ones(3).to(values.device),
    "index of the host": lambda values, _: values[[1, 2]],
    "synchronize": lambda *_: torch.accelerator.synchronize(),
}
NO_WAITS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "filled by a mask": lambda values, mask: values.masked_fill_(mask, 0),
    "set by a mask": lambda values, mask: values.__setitem__(mask, 0.0),
    "to, without": lambda values, _: torch.ones(3).to(values.device, non_blocking=True),
    "to the host, without": lambda values, _: values.to("cpu", non_blocking=True),
    "chosen": lambda values, mask: values.where(mask, 0),
}


def counted_on_rank(rank: int) -> dict[str, tuple[int, ...]]:
    device = on_rank(rank)
    found = {}
    for name, call in (WAITS | NO_WAITS).items():
        values, mask = torch.arange(4.0, device=device), torch.tensor([True, False, True, False], device=device)
        with Costs(DEVICE) as costs:
            call(values, mask)
        found[name] = tuple(each.total() for each in (costs.waits, costs.sends, costs.operations))
    with Costs(DEVICE) as costs:
        torch.ones(8, device=device).view(2, 4).add_(torch.ones(4, device=device))
    found["sum"] = tuple(each.total() for each in (costs.waits, costs.sends, costs.operations))
    return found


def test_costs_are_counted(devices: ProcessPool) -> None:
    (found,) = devices.run(1, counted_on_rank)
    assert {name: found[name][0] for name in WAITS} == dict.fromkeys(WAITS, 1) | {"synchronize": 1}
    assert {name: found[name][0] for name in NO_WAITS} == dict.fromkeys(NO_WAITS, 0)
    sends = {name for name in found if found[name][1]}
    assert sends == {"tensor", "to", "index of the host", "to, without"}
    assert found["sum"] == (0, 0, 3)


def ran_on_rank(rank: int) -> Any:
    device = on_rank(rank)
    with Costs(DEVICE) as costs:
        torch.ones(4, 4, device=device, dtype=torch.int64) @ torch.ones(4, device=device, dtype=torch.int64)
        torch.ones(4, device=device) + 1
    return costs.ran


def test_what_cuda_lacks_is_told(devices: ProcessPool) -> None:
    (ran,) = devices.run(1, ran_on_rank)
    assert list(not_on_cuda(ran)) == ["aten.mv.default of int64, int64"]
