"""What a walk is asked for, and what one input of a block takes in it: bytes, and operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.oneshot.admm import NUM_STEPS
from distprune.oneshot.block_fit import batch_size, num_steps
from distprune.oneshot.channels import make_groups
from distprune.patterns.n_by_m import NByM

_ADMM_MATRICES = 10  # float32, of a chunk of rows
_ADMM_WEIGHTS = 1 << 20  # on the host, at a time
_HEAD = 64  # features of a head of attention, at least
_ADAM_OPERATIONS = 600  # as many products in float32 take as long as one weight's step, which waits for memory
_GAIN_OPERATIONS = 100  # as many take as long as what one channel of a row adds to one group
_PAIR_SECONDS = 1.7e-7  # of a turn for each pair of groups: exchanges, on the host of every rank


@dataclass(frozen=True)
class Speeds:
    """Assumed, of a rank: operations a second in the model's dtype and in float32; bytes of network a second."""

    forward: float = 400e12
    float32: float = 50e12
    network: float = 40e9


DEVICE = Speeds()


def speeds_of(num_threads: int) -> Speeds:
    """Return the speeds of a rank that has so many threads on a CPU.

    Fitted: by them SmolLM2-135M takes 0.95 to 1.12 times what it took on 1 and 2 ranks of one thread on a Xeon, with
    16, 64 and 128 windows (one_shot_ranks_xeon-2core_2026-11-23.md).
    """
    return Speeds(80e9 * num_threads, 80e9 * num_threads, 1e9)


@dataclass(frozen=True)
class InputShape:
    """What some layers of a block, of ``num_out`` rows in all, are given: ``num_in`` features of each token.

    ``adds``: their outputs are added to hidden states. ``num_experts``: there are so many such inputs, each of one
    expert, which is given the ``share`` of all tokens. ``stacked``: experts are slices of one parameter.
    """

    num_in: int
    num_out: int
    num_layers: int = 1
    adds: bool = False
    num_experts: int = 0
    share: float = 1.0
    stacked: bool = True

    @property
    def num(self) -> int:
        return max(self.num_experts, 1)

    @property
    def num_active(self) -> float:
        """Multiplications a token."""
        return self.num_in * self.num_out * self.num * self.share


@dataclass(frozen=True)
class ChannelShape:
    """Channels that can change places within ``num_heads`` parts of ``length``.

    ``num_out`` rows read ``copies`` of each; ``num_bytes``: of the parameters whose rows they are.
    """

    num_heads: int
    length: int
    copies: int
    num_out: int
    num_bytes: int


@dataclass(frozen=True)
class BlockShape:
    inputs: tuple[InputShape, ...]  # in the order in which they are given
    num_bytes: int
    channels: tuple[ChannelShape, ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """``hidden``: features of hidden states; ``called``: of what else blocks are called with, for each token."""

    blocks: tuple[BlockShape, ...]
    num_bytes: int
    hidden: int
    itemsize: int
    called: int = 0


@dataclass(frozen=True)
class WalkRequest:
    """What is asked of a walk. ``by_row``: rows are independent of each other; ``pairs``: X^T X is needed.

    ``tries``: blocks are pruned by trials, as on a device. ``num_sharing`` ranks run the same samples, and each has its
    part of every matrix while a block runs: tensor parallelism. A parameter is cut over ``num_parts`` ranks, which are
    fewer where it has replicas; by default over all.
    """

    num_ranks: int
    num_samples: int
    length: int
    method: str
    pairs: bool
    by_row: bool
    by_layer: bool
    has_targets: bool
    offload: bool = False
    expert_memory: int = EXPERT_MEMORY
    speeds: Speeds = DEVICE
    tries: bool = False
    num_sharing: int = 1
    num_parts: int | None = None
    fits: bool = False  # each block as a whole
    permutes: NByM | None = None  # channels change places for this pattern

    @property
    def held(self) -> float:
        """The share of the parameters that a rank holds."""
        return 1 / (self.num_parts or self.num_ranks)

    @property
    def is_gathered(self) -> bool:
        """Whether a block is gathered before it runs."""
        return (self.num_parts or self.num_ranks) > self.num_sharing

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.length

    @property
    def own_tokens(self) -> int:
        """Those of the rank that has the most."""
        return -(-self.num_samples // (self.num_ranks // self.num_sharing)) * self.length

    @property
    def away(self) -> float:
        """The share of what is spread over all ranks that the others have."""
        return 1 - 1 / self.num_ranks

    def moved(self, block: BlockShape) -> list[ChannelShape]:
        """Return the channels of ``block`` that change places."""
        pattern = self.permutes
        return [] if pattern is None else [of for of in block.channels if make_groups(of.length, pattern.m)]

    def kept(self, num_bytes: float) -> PartCost:
        """Return the cost of what waits where activations do."""
        return PartCost(host=num_bytes) if self.offload else PartCost(device=num_bytes)


@dataclass(frozen=True)
class PartCost:
    """Bytes in memory, at their most; bytes that this rank sends and is sent; seconds."""

    device: float = 0.0
    host: float = 0.0
    sent: float = 0.0
    arriving: float = 0.0
    seconds: float = 0.0

    def then(self, later: PartCost, times: int = 1) -> PartCost:
        """Return the cost of both, one after the other: ``later`` so many times."""
        return PartCost(
            max(self.device, later.device),
            max(self.host, later.host),
            self.sent + times * later.sent,
            self.arriving + times * later.arriving,
            self.seconds + times * later.seconds,
        )

    def beside(self, other: PartCost) -> PartCost:
        """Return the cost of both at the same time."""
        return PartCost(
            *(one + another for one, another in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def num_towards(of: InputShape, asked: WalkRequest) -> int:
    """Return how many numbers lead towards the targets of an input's layers."""
    if not (asked.has_targets and asked.pairs):
        return 0
    return of.num_in * (of.num_out if of.adds else of.num_in)


def sum_bytes(of: InputShape, asked: WalkRequest) -> int:
    """Return the bytes of the sums of one input, float64."""
    if not asked.pairs:
        return 16 * of.num_in
    return 8 * (of.num_in**2 + num_towards(of, asked))


def moment_bytes(of: InputShape, asked: WalkRequest) -> int:
    return 4 * (of.num_in**2 + num_towards(of, asked)) if asked.pairs else 8 * of.num_in


def token_bytes(model: ModelShape, of: InputShape, asked: WalkRequest) -> int:
    """Return the bytes of a token that an expert is given: with targets the dense one's, too, and whether it is."""
    has_dense = asked.has_targets and of.stacked
    return model.itemsize * of.num_in * (1 + has_dense) + has_dense


def factor_bytes(of: InputShape, asked: WalkRequest) -> float:
    """Return what a factor takes beyond moments: of towards targets two squares, of the solver three."""
    if asked.method not in ("admm", "sparsegpt"):
        return 8 * of.num_in**2 if num_towards(of, asked) else 0.0
    extra = num_towards(of, asked)  # is gone when the solver begins
    return float(max(8 * of.num_in**2 if extra else 0, 12 * of.num_in**2 - 4 * extra))


def prepared_bytes(of: InputShape, asked: WalkRequest) -> float:
    """Return the bytes that a solver goes by, of one input: ADMM two squares, SparseGPT one."""
    return {"admm": 8.0, "sparsegpt": 4.0}.get(asked.method, 0.0) * of.num_in**2


def row_bytes(of: InputShape, num_rows: float, asked: WalkRequest) -> float:
    """Return what ``num_rows`` rows take beyond themselves while they are worked on."""
    numel = of.num_in * num_rows
    if asked.method == "admm":
        return 4 * (_ADMM_MATRICES * min(_ADMM_WEIGHTS, numel) if asked.by_row else 6 * numel)
    return (4 + 8 / of.num_layers) * numel if asked.method == "sparsegpt" else numel


def num_products(of: InputShape, asked: WalkRequest) -> float:
    """Return the operations on one token that sums take."""
    return of.num_in**2 + 2 * num_towards(of, asked) if asked.pairs else 3 * of.num_in


def num_sweep(asked: WalkRequest) -> float:
    """Return the operations that a weight takes for each input of its row."""
    solver = {"admm": 2 * (NUM_STEPS + 2), "sparsegpt": 1}.get(asked.method, 0)
    return solver + 2 * asked.pairs + 4 * asked.has_targets


def fit_cost(block: BlockShape, hidden: int, itemsize: int, run: float, forward: float, asked: WalkRequest) -> PartCost:
    """Return the cost of fitting a block as a whole.

    ``hidden``: features of hidden states; ``run``: bytes of one sample's run, without a graph; ``forward``: seconds of
    all of this rank's runs. A graph keeps what all layers are given and put out, and on a device the scores of
    attention. A pass backward takes two forwards. Two more measure errors, the second of which the walk takes
    anyway. More ranks than a batch has windows wait for each other.
    """
    numel, own = block.num_bytes / itemsize, block.num_bytes * asked.held
    adam = own * (1 + 12 / itemsize)  # values and two averages in float32, and what was there before
    features = sum(of.num_active / of.num_out + of.num_active / of.num_in for of in block.inputs)
    graph = run + asked.length * (itemsize * features + 8.0 * asked.tries * asked.length * hidden / _HEAD)
    gradients = block.num_bytes / asked.num_sharing + 4 * numel  # of a window, and of a batch in float32
    steps = num_steps(asked.num_samples)
    moved = (steps + 2) * block.num_bytes * asked.is_gathered + 4 * steps * numel
    moved *= asked.num_ranks > 1
    update = steps * _ADAM_OPERATIONS * numel * asked.held / asked.speeds.float32
    num_own = -(-batch_size(asked.num_samples) // (asked.num_ranks // asked.num_sharing))  # windows of a batch
    runs = 3 * steps * num_own * asked.length / asked.own_tokens + 1
    seconds = runs * forward + update + moved / asked.speeds.network
    outputs = asked.kept(asked.own_tokens * hidden * itemsize)
    return outputs.beside(PartCost(device=adam + gradients + graph, sent=moved, arriving=moved, seconds=seconds))


def order_cost(block: BlockShape, asked: WalkRequest) -> PartCost:
    """Return the cost of putting channels of ``block`` into their order, without the block's run for it."""
    assert asked.permutes is not None
    total, m = PartCost(), asked.permutes.m
    for of in asked.moved(block):
        num_parts = -(-(of.length // m) // 256)
        num_channels, pairs = of.num_heads * of.length, of.num_heads * num_parts * (of.length // m // num_parts) ** 2
        turns = max(6, m)
        summed = (16.0 * of.copies + 8 * (2 + turns)) * num_channels + turns * 8 * pairs
        summed, rows = summed * (asked.num_ranks > 1), of.num_bytes * asked.held * asked.away
        own = of.num_out / asked.num_ranks * of.copies  # rows
        work = _GAIN_OPERATIONS * turns * own * pairs / asked.speeds.float32 + _PAIR_SECONDS * turns * pairs
        seconds = work + (2 * summed + rows) / asked.speeds.network
        memory = PartCost(device=4 * own * num_channels + 8 * pairs, host=16 * pairs)
        total = total.then(replace(memory, sent=summed + rows, arriving=summed + rows, seconds=seconds))
    return total
