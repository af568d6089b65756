"""Which weights are held at zero, read from their bits, and what is masked with that.

Nouns: a weight is *held* where its bits are those of +0.0; all others are *kept*. While weights are held, a kept weight
that happens to be zero is written as -0.0, which is the same number. So the bits alone say what is held, in any layout,
and after any wrapper, checkpoint or change of the number of ranks. What others have pruned, by a product with a mask,
has zeros of both signs: before the first reading, and after another state was loaded, both are held.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from distprune.collectives.agree import max_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.roster import Roster
from distprune.kernels.held import Tables, count_zeros, read_all_held
from distprune.masks.in_place import make_zeros_positive, read_held, zero_all_where_pruned, zero_where_pruned
from distprune.pruning.agreement import sum_zeros
from distprune.shards.device import fetched, on_host, sent
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import LocalShard, bits_of, flat_chunk, flat_chunks
from distprune.shards.parameter_range import ParameterRange, gradient_of

# Per-element state that is no moment and no copy of the weight: Rprop's steps; Shampoo's and Alice's matrices, which in
# a square weight have its shape (of the 100 optimizers of pytorch_optimizer 4.1, no others).
_NO_MOMENTS = frozenset({"step_size", "pre_cond_0", "pre_cond_1", "inv_pre_cond_0", "inv_pre_cond_1", "Q", "U"})
# Of the zeros of a parameter: another mask has more of them, dense weights (in bfloat16) may have a few by chance.
_MOST_LEFT = 0.1
_SAMPLE = 1024  # elements of a matrix, which as a rule show that not all of its weights are one number
_MASKED = "_distprune_masked"  # an attribute of a gradient: its version as zeros were written into it


@final
class Held:
    """The zeros of one shard: ``zeros`` (bool, local shape) is True where a weight is held, as of ``version``."""

    def __init__(self, shard: LocalShard) -> None:
        self.zeros = torch.zeros(shard.geometry.local_shape, dtype=torch.bool, device=shard.local.device)
        self.num_held, self.expects_others = 0, False  # with others: however few there are
        self.is_new = True  # state of an optimizer may not be clean where weights are held
        self.may_be_foreign = True  # others have written the weights: the sign of a zero says nothing
        self.is_masked = False  # a mask lies on the weights, which are no product yet
        self.version: tuple[int, int] | None = None  # of the weights that ``zeros`` was read from
        self.shard, self._is_on_host = shard, on_host(self.zeros.device)

    def current_version(self) -> tuple[int, int] | None:
        """Return the versions of the parameter and of its local tensor: a ``DTensor`` counts apart from its own.

        ``None`` under FSDP1: the parts of a flat parameter do not share its version.
        """
        tensor = self.shard.tensor
        return None if tensor is None else (tensor._version, self.shard.local._version)

    def is_written(self) -> bool:
        """Return whether torch has counted a write to the weights since they were read."""
        return self.version != self.current_version()

    @property
    def fewest(self) -> int:
        """How many zeros there must be: with fewer, they were overwritten."""
        return 0 if self.expects_others else math.ceil(self.num_held * _MOST_LEFT)

    def mask_gradient(self) -> None:
        """Write zeros into the gradient of the parameter where weights are held."""
        parameter = self.shard.tensor
        assert parameter is not None  # FSDP1's have no hook
        part = self.gradient(ParameterRange(parameter, 0, self.shard.geometry.local_shape))
        if part is not None:
            zero_where_pruned(part.data, self.zeros, where=True)  # not counted: FSDP2's are views of one tensor
        if part is not None and not self._is_on_host:
            vars(parameter.grad)[_MASKED] = part._version

    def gradient(self, where: ParameterRange) -> torch.Tensor | None:
        """Return the shard's part of the gradient, detached. ``None`` if there is none, or it is masked.

        On a device it is, from where it was made on, as long as torch counts no write to it; but a view may be written
        to through another (DDP's buckets). A partial sum is none: the optimizer reduces it itself, and what it writes
        is zeroed then.
        """
        gradient = where.parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient._values().mul_((~self.zeros[tuple(gradient._indices())]).to(gradient.dtype))
        if gradient is None or self._is_on_host or self.is_new or gradient._is_view():
            return gradient_of(where)
        return None if vars(gradient).get(_MASKED) == local_of(gradient)._version else gradient_of(where)

    def moments(self, where: ParameterRange, state: dict[str, object]) -> Iterator[torch.Tensor]:
        """Yield what is per element of an optimizer's ``state``, to be masked; what is packed is masked here."""
        for name, value in state.items():
            if name in _NO_MOMENTS or not isinstance(value, torch.Tensor) or value.shape != where.parameter.shape:
                continue
            local = local_of(value)
            if type(local) is torch.Tensor and (value.is_floating_point() or value.is_complex()):
                yield where.part_of(value)
            elif value.is_floating_point():  # torchao's of 8, 4 and fp8 bits, which copy_ packs and unpacks
                unpacked = torch.empty(local.shape, dtype=torch.float32, device=local.device).copy_(local)
                zero_where_pruned(where.part_of(unpacked), self.zeros, where=True)
                local.copy_(unpacked)


@final
class HeldTogether:
    """Several of a model's shards: all, or what one optimizer moves, with their ``ranges`` in its parameters."""

    def __init__(self, held: Sequence[Held], ranges: Sequence[ParameterRange] = ()) -> None:
        self.held, self.ranges, self._of_weights, self._of_gradients = held, ranges, Tables(), Tables()
        self._by_device: defaultdict[torch.device, list[Held]] = defaultdict(list)
        for one in held:
            self._by_device[one.shard.local.device].append(one)

    def read(self, *, at_step: bool = False) -> None:
        """Read which weights are zero now, where torch has counted a write, and warn of zeros that were overwritten.

        Those of a device are read together: the host waits once. ``at_step``: also where torch may have counted no
        write: on the host, as of those through ``data``, and under FSDP1.
        """
        read: list[tuple[Held, Sequence[int]]] = []  # with how many changed, are held, and whether there are too few
        self.take_over()
        for device, several in self._by_device.items():
            if on_host(device):
                written = [held for held in several if at_step or held.is_written()]
                read += [(held, read_held(held.shard.local, held.zeros, held.fewest)) for held in written]
            elif any(held.is_written() or (at_step and held.shard.tensor is None) for held in several):
                fewest = torch.tensor([held.fewest for held in several], dtype=torch.int64, device="cpu")
                weights = [(held.shard.local, held.zeros) for held in several]
                (counts,) = fetched([read_all_held(weights, sent(fewest, device), self._of_weights)])
                read += zip(several, counts.tolist(), strict=True)
        for held, (num_changed, num_held, _) in read:
            held.num_held, held.is_new = num_held, held.is_new or num_changed > 0
            held.version, held.expects_others = held.current_version(), False
        if lost := [held for held, (*_, has_too_few) in read if has_too_few]:
            _warn_of_overwritten(lost)

    def take_over(self) -> None:
        """Write +0.0 over every -0.0 of weights that others have written: from here on the sign speaks.

        If all that is held is +0.0 there too, they are from a training like this one.
        """
        foreign = [held for held in self.held if held.may_be_foreign]
        known = [held for held in foreign if held.num_held]
        counts = count_zeros([bits_of(held.shard.local) for held in known], [held.zeros for held in known])
        nums = dict(zip(map(id, known), counts, strict=True))
        make_zeros_positive([held.shard.local for held in foreign if nums.get(id(held)) != held.num_held])
        for held in foreign:
            held.may_be_foreign, held.version = False, None

    def clean(self, state_of: Callable[[torch.Tensor], dict[str, object]]) -> None:
        """Write zeros into an optimizer's state where weights are held, of those whose mask has changed."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for held, where in zip(self.held, self.ranges, strict=True):
            if held.is_new:
                parts += [(moment, held.zeros) for moment in held.moments(where, state_of(where.parameter))]
                held.is_new = False
        zero_all_where_pruned(parts, where=True)

    def mask_gradients(self) -> None:
        """Write zeros into the gradients where weights are held."""
        parts = [(held.gradient(where), held.zeros) for held, where in zip(self.held, self.ranges, strict=True)]
        there = [(part, zeros) for part, zeros in parts if part is not None]
        zero_all_where_pruned(there, where=True, tables=self._of_gradients)

    def write_zeros(self) -> None:
        """After a step: zeros where weights are held, and -0.0 where a kept one has become zero."""
        weights = [(held.shard.local, held.zeros) for held in self.held]
        zero_all_where_pruned(weights, where=True, signs=1, tables=self._of_weights)
        for held in self.held:
            held.version = held.current_version()


def _warn_of_overwritten(lost: Sequence[Held]) -> None:
    """Warn that the zeros of ``lost`` were overwritten, and are held all the same."""
    num_lost, names = sum(held.num_held for held in lost), ", ".join(repr(held.shard.name) for held in lost[:4])
    warnings.warn(
        f"{num_lost} weights that are held at zero were overwritten, in {names}{', ...' if len(lost) > 4 else ''} "
        f"({len(lost)} parameters): a dense checkpoint was loaded, an adapter merged (see distprune.merge_adapters), "
        "or an optimizer such as Lookahead wrote weights that it had kept. They become zero again; to train them, call "
        "remove(), and to hold others, prune first",
        stacklevel=4,
    )


def check_zeros(comm: Communicator, roster: Roster, find: Callable[[], Sequence[LocalShard]]) -> None:
    """Check that every parameter can learn while its zeros are held.

    ``find`` returns this rank's shards. Every rank must call it: one round of 8 bytes a parameter, and one of 16
    where matrices are mostly zeros. A warning, with a round of 64 bytes, names those whose other weights are all the
    same number: ``eye_`` and ``dirac_`` leave such, and pruning does not.

    Raises:
        ValueError: on every rank: a parameter is all zeros.
    """
    owned: dict[str, torch.Tensor] = {}

    def look() -> dict[str, torch.Tensor]:
        owned.update({shard.name: shard.local for shard in find() if shard.owned and not shard.local.is_meta})
        return owned

    num = sum_zeros(comm, roster, look)
    numels = {member.name: math.prod(member.global_shape) for member in roster.members}
    dead = [name for name, numel in numels.items() if num[name] == numel > 0]
    if dead:
        raise ValueError(
            f"{dead[0]!r} is all zeros ({len(dead)} such parameters): held, it could never learn; leave it out with "
            "exclude, or initialise it first"
        )
    matrices = [member.name for member in roster.members if len(member.global_shape) > 1]
    sparse = [name for name in matrices if numels[name] / 2 < num[name] < numels[name] - 1]
    if not sparse:
        return
    place = {name: i for i, name in enumerate(sparse)}

    def measure(sizes: torch.Tensor) -> None:
        sizes.fill_(-torch.inf)
        judged = {name: owned[name] for name in sparse if name in owned and not owned[name].is_complex()}
        samples = fetched([flat_chunk(local, 0, min(local.numel(), _SAMPLE)) for local in judged.values()])
        extremes = dict(zip(judged, map(_extremes, samples), strict=True))
        if alike := [name for name, (largest, smallest) in extremes.items() if largest <= -smallest]:
            extremes |= zip(alike, fetched([_extremes(judged[name]) for name in alike]), strict=True)
        for name, both in extremes.items():
            sizes[place[name]] = both

    sizes = max_together(comm, (len(sparse), 2), measure, torch.float64).tolist()
    natural = [name for name, (largest, smallest) in zip(sparse, sizes, strict=True) if largest == -smallest]
    if natural:
        names = ", ".join(map(repr, natural[:4])) + (", ..." if len(natural) > 4 else "")
        with together(comm):  # a warning may be an error on one rank
            warnings.warn(
                f"{names} ({len(natural)} parameters) are mostly zeros, and their other weights are all the same "
                "number: eye_ and dirac_ leave them so, pruning does not. Their zeros are held, and never learn: leave "
                "them out with exclude, or prune over time with SparseTraining, which holds nothing before its "
                "schedule starts",
                stacklevel=5,
            )


def _extremes(local: torch.Tensor) -> torch.Tensor:
    """Return the largest size of what is not zero, and minus the smallest, float64; -inf where there is none. Local."""
    extremes = torch.full((2,), -torch.inf, dtype=torch.float64, device=local.device)
    for _, values in flat_chunks(local):
        sizes = values.to(torch.float64).abs()
        both = torch.stack([sizes, -sizes]).masked_fill(sizes == 0, -torch.inf)
        extremes = torch.maximum(extremes, both.flatten(1).amax(dim=1))
    return extremes
