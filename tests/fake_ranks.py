"""One rank of a group of many, without the others: to count and time what it does, not what comes out.

torch's own fake process group lets DTensors be laid out over any number of ranks; :class:`EqualRanks` answers as if all
of them held what this one holds. Sums of counts are those of a real group, so a choice goes its usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override

import distprune as prune
from distprune import NByM
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.walk import Walk
from distprune.collectives.base import Communicator, Op
from distprune.models.linear_layers import LinearLayer
from distprune.oneshot.driver import prune_rows
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import whole_rows
from distprune.oneshot.solver import Scored, Solver
from distprune.scores.as_score import Wanda
from distprune.training.regrowth import GrowBy


@final
class EqualRanks(Communicator):
    """Rank 0 of ``size`` that all hold the same; ``largest`` is the size of its largest message.

    ``num_objects``: how many objects came as text from as many ranks.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.largest = self.num_objects = 0

    @override
    def round(self, num_bytes: int) -> AbstractContextManager[None]:
        self.largest = max(self.largest, num_bytes)
        return super().round(num_bytes)

    @override
    def _reduce_in_place(self, values: torch.Tensor, op: Op, rank: int | None) -> None:
        if op == "sum":
            values *= self.size

    @override
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        pass

    @override
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        self.num_objects += self.size
        return [bytes(buffer.numpy())] * self.size

    @override
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        piece = sent[: sent_sizes[0]]  # every rank sends here what this one sends to itself
        is_alike = sizes == [len(piece)] * self.size
        return piece.repeat(self.size) if is_alike else torch.zeros(sum(sizes), dtype=torch.uint8)


@contextmanager
def fake_group(size: int) -> Iterator[EqualRanks]:
    """Be rank 0 of ``size`` within."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield EqualRanks(size)
    finally:
        dist.destroy_process_group()


def sharded_model(
    num_parameters: int, size: int, shape: tuple[int, int] = (8, 32), placement: Placement | None = None
) -> nn.Module:
    """Return a model of so many matrices over ``size`` ranks, each of which has a part of ``shape`` of each."""
    mesh, generator = init_device_mesh("cpu", (size,)), torch.Generator().manual_seed(0)
    model = nn.Module()
    for i in range(num_parameters):
        local = torch.randn(shape, generator=generator)
        whole = DTensor.from_local(local, mesh, [placement or Shard(0)], run_check=False)
        model.register_parameter(f"p{i}", nn.Parameter(whole))
    return model


# What is counted and timed, by name.
Call = Callable[[nn.Module, Communicator | None], object]  # None: all ranks of the default group

PRUNING: dict[str, Call] = {
    "global": lambda model, comm: prune.prune_model(model, 0.5, group=comm),
    "each tensor": lambda model, comm: prune.prune_model(model, 0.5, scope="tensor", group=comm),
    "random": lambda model, comm: prune.prune_model(model, 0.5, score="random", seed=1, group=comm),
    "2:4": lambda model, comm: prune.prune_model(model, pattern="2:4", group=comm),
    "rows": lambda model, comm: prune.prune_model(model, 0.5, pattern="row", group=comm),
    "blocks": lambda model, comm: prune.prune_model(model, 0.5, pattern="block:4", group=comm),
    "channels": lambda model, comm: prune.prune_model(model, 0.5, pattern="channels:0", group=comm),
}
CALLS: dict[str, Call] = {
    **PRUNING,
    "masks": lambda model, comm: prune.Masks.of(model, group=comm),
    "sparsity": lambda model, comm: prune.sparsity(model, group=comm),
}


# Makes ready and returns what is counted and timed. Gradients have not been masked by a backward pass.
Prepare = Callable[[nn.Module, EqualRanks], Callable[[], object]]


def _step(make: Callable[..., torch.optim.Optimizer], is_held: bool) -> Prepare:
    def prepared(model: nn.Module, comm: EqualRanks) -> Callable[[], object]:
        prune.prune_model(model, 0.5, group=comm)
        optimizer = make(model.parameters(), lr=1e-3)
        _give_gradients(model)
        if is_held:
            prune.hold_zeros(model, optimizer, group=comm)
        optimizer.step()
        return optimizer.step

    return prepared


def _hold(model: nn.Module, comm: EqualRanks) -> Callable[[], object]:
    prune.prune_model(model, 0.5, group=comm)
    optimizer = torch.optim.SGD(model.parameters())
    return lambda: prune.hold_zeros(model, optimizer, group=comm).remove()


def _update(by: GrowBy) -> Prepare:
    def prepared(model: nn.Module, comm: EqualRanks) -> Callable[[], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        regrow = prune.Regrow(100, every=2, by=by)
        training = prune.SparseTraining(model, optimizer, schedule=prune.constant(0.5), regrow=regrow, group=comm)
        _give_gradients(model)
        optimizer.step()

        def update() -> None:
            training.step = 2
            optimizer.step()

        return update

    return prepared


def _give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


STEPS = {
    f"step, {make.__name__}{', held' if is_held else ''}": _step(make, is_held)
    for make in (torch.optim.SGD, torch.optim.AdamW)
    for is_held in (False, True)
}
UPDATES = {"update, random": _update("random"), "update, by gradient": _update("gradient")}
TRAINING: dict[str, Prepare] = {"set-up of a hold": _hold, **STEPS, **UPDATES}
_DENSE = {"q": "q", "k": "q", "v": "q", "o": "o", "gate": "gate", "up": "gate", "down": "down"}  # whose input it has
_WIDTH = 4


SOLVERS: dict[str, Solver] = {"wanda": Scored(Wanda(), by_row=True)}


def fake_block(size: int, num_experts: int) -> dict[str, LinearLayer]:
    """Return the layers of a decoder block over ``size`` ranks: dense, or attention and experts, a few on each rank."""
    mesh = init_device_mesh("cpu", (size,))

    def module(local: tuple[int, ...]) -> nn.Module:
        found = nn.Module()
        whole = DTensor.from_local(torch.randn(local), mesh, [Shard(0)], run_check=False)
        found.weight = nn.Parameter(whole, requires_grad=False)
        return found

    names = list(_DENSE)[: 4 if num_experts else None]
    linears = {name: LinearLayer(name, module((1, _WIDTH)), "weight", size, _WIDTH) for name in names}
    for name in ("gate_up", "down") if num_experts else ():
        held = module((-(-num_experts // size), _WIDTH, _WIDTH))
        for e in range(num_experts):
            linears[f"{name}.{e}"] = LinearLayer(
                f"{name}.{e}", held, "weight", _WIDTH, _WIDTH, expert=e, is_routed=True
            )
    return linears


def inputs_of(comm: Communicator, linears: Mapping[str, LinearLayer], solver: Solver) -> InputStatistics:
    """Return what one sample of ones gives to ``linears``."""
    statistics = InputStatistics(comm, Walk(nn.Module(), []), linears, solver.needs)
    for name in linears:
        statistics.given(name, torch.ones(2, _WIDTH), None, _DENSE.get(name, name) if "gate" in linears else name)
    return statistics


def prune_block(comm: Communicator, statistics: InputStatistics, solver: Solver) -> None:
    """Do to one block what ``prune_blocks`` does once its inputs are known."""
    linears = statistics.linears
    for moments in statistics.reduce():
        some = {name: linears[name] for m in moments for name in m.names}
        owned = {linear.parameter_path: True for linear in some.values()}
        with whole_rows(comm, some, owned) as rows, torch.no_grad():
            prune_rows(comm, rows, moments, lambda _: nullcontext(), Aim(0.0), solver=solver, pattern=NByM(2, 4))
