"""What a walk of one-shot pruning takes of each rank: memory, traffic and time, from shapes alone.

Pure functions of numbers: nothing is read, run or communicated. Experts are taken to be given equally many tokens, and
memory is that of the rank that has the most. Time is a guess from the constants below, and memory of a few MiB, such as
the interpreter's, is not in it. What an evaluation or ``allocate`` takes is not either.

Noun: a *part* is one kind of thing that memory, traffic or time goes into. Parts come and go: what is there at the same
time is in :func:`_at_a_time`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distprune.calibration.owner_ranks import share_out
from distprune.oneshot.walk_costs import (
    BlockShape,
    InputShape,
    ModelShape,
    PartCost,
    WalkRequest,
    factor_bytes,
    fit_cost,
    moment_bytes,
    num_products,
    num_sweep,
    order_cost,
    prepared_bytes,
    row_bytes,
    sum_bytes,
    token_bytes,
)

WEIGHTS, BLOCK, GATHER = "weights, a shard", "a block, gathered", "the gather's buffer"
BEFORE = "a block's shard, as it was"
STREAMS, DENSE, FORWARD = "hidden streams", "dense stream of a block", "one sample's run"
TOKENS, SUMS, MESSAGES, WAVES = "tokens of experts", "sums", "sums and tokens on their way", "sums of a wave of experts"
MOMENTS, FACTORS, ROWS, PYTHON = "moments at an owner", "factors", "rows at an owner", "Python"
FIT, ORDER = "fit of a block", "order of channels"
PARTS = (
    *(WEIGHTS, BLOCK, GATHER, BEFORE, STREAMS, DENSE, FORWARD),
    *(ORDER, TOKENS, SUMS, MESSAGES, WAVES, MOMENTS, FACTORS, ROWS, FIT, PYTHON),
)

# Measured: seconds of Python a linear layer on one of 1,024 ranks (scale_epyc-2core_2026-11-25.md).
LAYER_SECONDS, EXPERT_SECONDS = 2.7e-3, 0.35e-3

Parts = dict[str, PartCost]


@dataclass(frozen=True)
class MemoryPlan:
    """``parts`` of the whole walk; ``most``: what is in memory at a time, at most, and all traffic and seconds.

    ``device_parts`` and ``host_parts`` are what the most memory is made of, there and here.
    """

    parts: Mapping[str, PartCost]
    most: PartCost
    device_parts: Mapping[str, PartCost]
    host_parts: Mapping[str, PartCost]

    @property
    def beyond_weights(self) -> float:
        """Bytes on the device beside the shard of the weights."""
        return self.most.device - self.parts[WEIGHTS].device


def plan_walk(model: ModelShape, asked: WalkRequest) -> MemoryPlan:
    """Return what a walk through ``model`` takes of the rank that it takes the most of."""
    base = {WEIGHTS: PartCost(device=model.num_bytes * asked.held), STREAMS: _streams(model, asked)}
    total: Parts = defaultdict(PartCost) | base
    by_device, by_host = base, base
    for block, times in Counter(block for block in model.blocks if block.inputs).items():
        parts = _of_block(model, block, asked)
        for stage in parts[1:]:
            for moment in _at_a_time(base | parts[0], stage):
                by_device = max(by_device, moment, key=lambda of: sum(cost.device for cost in of.values()))
                by_host = max(by_host, moment, key=lambda of: sum(cost.host for cost in of.values()))
        for some in parts:
            for name, cost in some.items():
                total[name] = total[name].then(cost, times)
    traffic = [sum(getattr(cost, what) for cost in total.values()) for what in ("sent", "arriving", "seconds")]
    device, host = sum(of.device for of in by_device.values()), sum(of.host for of in by_host.values())
    ordered = {name: total[name] for name in PARTS if name in total}
    return MemoryPlan(ordered, PartCost(device, host, *traffic), by_device, by_host)


def fitted(model: ModelShape, asked: WalkRequest, fits: Callable[[MemoryPlan], bool]) -> tuple[WalkRequest, MemoryPlan]:
    """Return what is asked with as much ``expert_memory`` as ``fits``, a half, a quarter ...; or one expert's."""
    plan = plan_walk(model, asked)
    while not fits(plan) and WAVES in plan.parts and asked.expert_memory > 1:
        asked = replace(asked, expert_memory=asked.expert_memory // 2)
        plan = plan_walk(model, asked)
    return asked, plan


def _at_a_time(always: Parts, stage: Parts) -> Iterator[Parts]:
    """Yield the parts that are there at the same time: a block is gathered, runs, sums are added up, rows solved."""
    kept = {name: always[name] for name in (WEIGHTS, BEFORE, STREAMS, DENSE) if name in always}
    tokens = {name: stage[name] for name in (TOKENS,) if name in stage}
    yield kept | {name: always[name] for name in (BLOCK, GATHER)}
    yield kept | tokens | {name: of for name, of in (always | stage).items() if name in (BLOCK, FORWARD, SUMS)}
    if ORDER in always:
        yield {name: of for name, of in always.items() if name in (WEIGHTS, STREAMS, ORDER)}
    if FIT in always:  # what the dense stream leaves of the block is gone
        yield {name: of for name, of in always.items() if name in (WEIGHTS, STREAMS, BLOCK, FIT)}
    for together in ((SUMS, WAVES, MESSAGES), (MESSAGES, MOMENTS), (MOMENTS, FACTORS, ROWS)):
        yield kept | tokens | {name: stage[name] for name in together if name in stage}


def _streams(model: ModelShape, asked: WalkRequest) -> PartCost:
    own = asked.own_tokens * model.itemsize
    waiting = asked.kept((1 + asked.has_targets) * own * model.hidden)
    return waiting.beside(PartCost(device=own * model.called))


def _of_block(model: ModelShape, block: BlockShape, asked: WalkRequest) -> list[Parts]:
    """Return the parts of a block: those that are there, or come back, in all of its stages; then those of each."""
    stages = [[of] for of in block.inputs] if asked.by_layer else [list(block.inputs)]
    active, before, num_runs = sum(of.num_active for of in block.inputs), 0.0, 1.0 + asked.has_targets
    for stage in stages:  # a run ends where the layers of its stage have been given their inputs
        num_runs += before / active if asked.by_layer else 1.0
        before += sum(of.num_active for of in stage)
    orders = bool(asked.moved(block))
    num_runs += orders
    num_gathers = len(stages) + 1 + asked.has_targets + orders
    whole = block.num_bytes / asked.num_sharing if asked.is_gathered else 0.0
    moved = num_gathers * whole * (1 - asked.held * asked.num_sharing)
    gathered = PartCost(device=whole)
    num_layers = Counter[bool]()
    for of in block.inputs:
        num_layers[of.num_experts > 0] += of.num_layers * of.num
    parts = {
        BLOCK: replace(gathered, sent=moved, arriving=moved, seconds=moved / asked.speeds.network),
        GATHER: gathered,
        FORWARD: PartCost(
            device=_run_bytes(model, block.inputs, asked),
            seconds=2 * active / asked.num_sharing * asked.own_tokens * num_runs / asked.speeds.forward,
        ),
        PYTHON: PartCost(seconds=LAYER_SECONDS * num_layers[False] + EXPERT_SECONDS * num_layers[True]),
    }
    if asked.tries:
        parts[BEFORE] = PartCost(device=block.num_bytes * asked.held)
    if orders:
        parts[ORDER] = order_cost(block, asked)
    if asked.fits:
        once = 2 * active / asked.num_sharing * asked.own_tokens / asked.speeds.forward
        parts[FIT] = fit_cost(block, model.hidden, model.itemsize, parts[FORWARD].device, once, asked)
    if asked.has_targets:
        own = 1 / asked.num_sharing  # of the features of an input
        features = sum(
            model.hidden if of.adds else own * of.num_in * of.num * of.share * of.stacked for of in block.inputs
        )
        parts[DENSE] = asked.kept(asked.own_tokens * model.itemsize * features)
    found = [parts]
    for stage in stages:
        goes_by_tokens = asked.pairs and asked.num_sharing == 1
        routed = [of for of in stage if of.num_experts and goes_by_tokens]
        others = [of for of in stage if not (of.num_experts and goes_by_tokens)]
        of_routed = _of_routed(model, routed, asked) if routed else {}
        waiting = {name: PartCost(of.device, of.host) for name, of in of_routed.items() if name == TOKENS}
        found += [_of_summed(model, others, asked) | waiting] if others else []
        found += [of_routed] if routed else []
    return found


def _run_bytes(model: ModelShape, inputs: Iterable[InputShape], asked: WalkRequest) -> float:
    """Return what one sample takes while a block runs: its activations, and what an addend of the sums is made of."""
    widest_layers = max(of.num * of.share * (of.num_in + 2 * of.num_out) for of in inputs)
    activations = widest_layers / asked.num_sharing + 2 * model.hidden
    widest = max(of.num_in for of in inputs)
    addend = 4 * widest**2 / asked.num_sharing if asked.has_targets else 0
    return asked.length * (model.itemsize * activations + 4 * widest) + addend


def _of_summed(model: ModelShape, inputs: Sequence[InputShape], asked: WalkRequest) -> Parts:
    """Return the parts of inputs whose sums are added up over ranks, at their owners or everywhere."""
    is_alone, speeds = asked.num_ranks == 1, asked.speeds
    owned: dict[int, list[InputShape]] = {0: []}
    factored: dict[int, list[InputShape]] = {0: []}
    spread: list[InputShape] = []
    for of, owner in zip(inputs, share_out([of.num_in**3 for of in inputs], asked.num_ranks), strict=True):
        factored.setdefault(owner, []).append(of)
        spread.append(of)
    packed = [of.num * sum_bytes(of, asked) for of in inputs]
    to_all = sum(of.num * sum_bytes(of, asked) for of in spread)
    arriving = to_all + max(sum(sum_bytes(of, asked) for of in some) for some in owned.values())
    hands_on = asked.pairs and bool(spread) and not is_alone  # each is factored by one rank, and sent
    prepared = sum(prepared_bytes(of, asked) for of in spread) if hands_on else 0.0
    handed = sum(2.0 * of.num_in**2 for of in spread) if prepared else 0.0  # a triangle of each
    working = [*max(owned.values(), key=lambda some: sum(of.num_in**2 for of in some)), *spread]
    factoring = factored.values() if hands_on else [[*some, *spread] for some in owned.values()]
    busiest = max(sum(2 * of.num_in**3 for of in some) for some in factoring) if asked.pairs else 0
    products = sum(of.num * of.share * num_products(of, asked) for of in inputs)
    return {
        SUMS: PartCost(
            device=sum(of.num * sum_bytes(of, asked) for of in inputs) / asked.num_sharing,
            seconds=products / asked.num_sharing * asked.own_tokens / speeds.float32,
        ),
        MESSAGES: PartCost(
            device=max(*packed, arriving),
            sent=0.0 if is_alone else sum(packed),
            arriving=0.0 if is_alone else arriving,
            seconds=0.0 if is_alone else (sum(packed) + to_all) / speeds.network,
        ),
        MOMENTS: PartCost(device=sum(of.num * moment_bytes(of, asked) for of in working)),
        FACTORS: PartCost(
            device=prepared + max((factor_bytes(of, asked) for of in working), default=0.0),
            sent=handed,
            arriving=handed,
            seconds=busiest / speeds.float32 + handed / speeds.network,
        ),
        ROWS: _rows(model, owned, spread, asked),
    }


def _of_routed(model: ModelShape, inputs: Sequence[InputShape], asked: WalkRequest) -> Parts:
    """Return the parts of routed inputs: their tokens go to owners, which each have as many experts of all."""
    owned = [(of, -(-of.num_experts // asked.num_ranks)) for of in inputs]  # by the rank that has the most
    sizes = [sum_bytes(of, asked) for of in inputs]
    room = max(asked.expert_memory, *sizes, 0)
    wave = min(room, sum(num * size for (_, num), size in zip(owned, sizes, strict=True)))
    wave = wave // sizes[0] * sizes[0] if len(inputs) == 1 else wave
    kept = asked.own_tokens * sum(of.num * of.share * token_bytes(model, of, asked) for of in inputs)
    coming = asked.num_tokens * asked.away * sum(num * of.share * token_bytes(model, of, asked) for of, num in owned)
    one = max(sum_bytes(of, asked) + moment_bytes(of, asked) for of in inputs)
    products = sum(num * of.share * num_products(of, asked) for of, num in owned) * asked.num_tokens
    rows = _rows(model, {0: [of for of, num in owned if not of.stacked for _ in range(num)]}, [], asked)
    sweeps = sum(num * of.num_out * of.num_in**2 for of, num in owned) * num_sweep(asked)
    speeds = asked.speeds
    return {
        TOKENS: replace(
            asked.kept(kept),
            sent=kept * asked.away,
            arriving=coming,
            seconds=max(kept * asked.away, coming) / speeds.network,
        ),
        # A round: tokens are copied twice to be sent, and let go of once; others arrive. And an expert's sums.
        MESSAGES: asked.kept(2 * coming * asked.away).beside(PartCost(device=one)),
        WAVES: PartCost(device=wave, seconds=products / speeds.float32),
        MOMENTS: PartCost(device=wave / 2),  # float32, of float64
        FACTORS: PartCost(
            device=max(factor_bytes(of, asked) for of in inputs),
            seconds=sum(num * 2 * of.num_in**3 for of, num in owned) / speeds.float32,
        ),
        ROWS: replace(
            rows,
            device=rows.device + max(row_bytes(of, of.num_out, asked) for of in inputs),
            seconds=sweeps / speeds.float32 + rows.sent / speeds.network,
        ),
    }


def _rows(
    model: ModelShape, owned: Mapping[int, Sequence[InputShape]], spread: Sequence[InputShape], asked: WalkRequest
) -> PartCost:
    """Return the cost of rows that are worked on: whole layers at owners, and of others each rank's own."""
    ranks, size = asked.num_ranks, model.itemsize
    weights = {rank: size * sum(of.num_in * of.num_out for of in some) for rank, some in owned.items()}
    elsewhere = sum(weights.values())
    moved = max(weight * asked.away + (elsewhere - weight) / ranks for weight in weights.values())
    whole = max(weights.values()) if ranks > 1 else 0
    at_once = max((row_bytes(of, of.num_out, asked) for some in owned.values() for of in some), default=0.0)
    own = sum(of.num * row_bytes(of, of.num_out / ranks, asked) for of in spread)
    at_owners = max(sum(of.num_out * of.num_in**2 for of in some) for some in owned.values())
    everywhere = sum(of.num * of.num_out * (of.num_in**2 if asked.pairs else of.num_in) for of in spread) / ranks
    moved = moved if ranks > 1 else 0.0
    seconds = (at_owners + everywhere) * num_sweep(asked) / asked.speeds.float32 + moved / asked.speeds.network
    return PartCost(device=whole + max(at_once, own), sent=moved, arriving=moved, seconds=seconds)
