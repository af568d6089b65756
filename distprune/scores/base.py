"""What a score is, and its values on one shard.

Nouns: a *score* says how much each element matters, higher = keep. *Evidence* is what a score needs beside the
weights, by name: a gradient, the norms of the inputs. The caller collects it. An element that was pruned before is
*gone*: it is pruned before all others, whatever its score. A *unit* is pruned as a whole: a block or a channel. The
score of a unit is what the scores of its elements add up to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from typing_extensions import override

from distprune.hints import WALK
from distprune.kernels.table import ScoreName
from distprune.mistakes import is_ours
from distprune.shards.device import chunk_size, count_true, fetched, is_zero, on_host, own_settings
from distprune.shards.local_shard import LocalShard, as_array, flat_chunk, flat_chunks

Evidence = Mapping[str, torch.Tensor]  # by name, each of the shard's local shape


@final
@dataclass(frozen=True)
class Elements:
    """Some elements of one shard. ``at`` says which: a range of local offsets, or the offsets themselves (int64).

    ``copied``: weights and evidence are copies, which may be written to.
    """

    shard: LocalShard
    at: slice | torch.Tensor
    evidence: Evidence
    copied: bool = True

    @property
    def weight(self) -> torch.Tensor:
        """The weights at these places, 1-D."""
        return self._taken(self.shard.local)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the evidence ``name`` at these places, 1-D."""
        return self._taken(self.evidence[name])

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        taken = _taken(tensor, self.at)
        return taken.clone() if self.copied else taken

    def flat_indices(self, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return the places of these elements in the whole parameter, 1-D: new."""
        at, geometry = self.at, self.shard.geometry
        if isinstance(at, slice):
            return geometry.flat_indices(at.start, at.stop, self.shard.local.device, dtype)
        return geometry.flat_indices_at(at).to(dtype)


class Score(ABC):
    """How much each element matters; higher = keep.

    A subclass writes :meth:`values`. It must work element by element: then it is the same in every layout.

    >>> class Saliency(Score):
    ...     needs = ("gradient",)
    ...     def values(self, elements):
    ...         return elements.weight.square() * elements["gradient"].square()
    """

    needs: ClassVar[tuple[str, ...]] = ()  # names of evidence
    ordered_by: ClassVar[Literal["magnitude", "value"]] = "value"
    scores_units: ClassVar[bool] = False  # of_units scores a unit by its number, not by its elements
    zero_where_weights_are: ClassVar[bool] = False  # a score is zero exactly where its weight is
    is_weight: ClassVar[bool] = False  # values() returns the weights, as they are
    kernel: ScoreName | None = None  # of GPUs, that computes the same from weights of 16 and 32 bits
    combined_by: Literal["sum", "max", "min"] = "sum"  # how the elements of a unit make its score
    descending: bool = False  # the larger the sum of a unit, the less it matters
    of_zero: float = 0.0  # what an element that is gone adds to its unit

    @override
    def __repr__(self) -> str:
        """Return its class and attributes, which ranks compare; two scores that do the same must have the same."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @property
    def name(self) -> str:
        """What reports call it."""
        return type(self).__name__.lower()

    @abstractmethod
    def values(self, elements: Elements) -> torch.Tensor:
        """Return the scores of ``elements``, 1-D, one each. Local."""

    def dtype(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype in which scores of ``weight`` weights are compared: float64 for float64, else float32."""
        return torch.float64 if weight is torch.float64 else torch.float32

    def of_units(self, name: str, units: torch.Tensor) -> torch.Tensor:
        """Return the scores of units of parameter ``name``, by their numbers (int64). Local.

        Raises:
            NotImplementedError: the score does not set ``scores_units``.
        """
        raise NotImplementedError(f"{self!r} scores elements alone")

    def seeds(self, name: str) -> tuple[int, int]:
        """Return the words of parameter ``name``, int32, that the hash of random scores takes."""
        raise NotImplementedError(f"{self!r} is not random")

    @property
    def needs_seed(self) -> bool:
        """Whether it is random and has no seed yet."""
        return False

    def seeded(self, seed: int) -> Score:  # noqa: ARG002
        """Return this score with the given ``seed``."""
        return self

    def reads(self, shard: LocalShard, evidence: Evidence) -> list[torch.Tensor]:
        """Return the tensors that :meth:`values` reads. Replicas must hold equal ones."""
        return [shard.local, *(evidence[name] for name in self.needs)]


@final
@dataclass(frozen=True, repr=False)
class ElementwiseScore(Score):
    """A function as a score: it takes some weights, 1-D, and returns as many scores."""

    function: Callable[[torch.Tensor], torch.Tensor]

    @override
    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    @override
    def name(self) -> str:
        return getattr(self.function, "__name__", "function")

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return self.function(elements.weight)


@final
@dataclass(frozen=True)
class LocalScores:
    """The scores of one shard, computed chunk by chunk on demand. No communication.

    ``gone``: of local shape, zero where an element was pruned before. ``counts_gone``: such an element still adds to
    the score of its unit. ``regrows``: such an element competes with the others.
    """

    shard: LocalShard
    score: Score
    evidence: Evidence = field(default_factory=dict)
    gone: torch.Tensor | None = None
    counts_gone: bool = False
    regrows: bool = False

    @property
    def device(self) -> torch.device:
        return self.shard.local.device

    @property
    def reads(self) -> list[torch.Tensor]:
        """The tensors that are read. Replicas are compared by them."""
        read = self.score.reads(self.shard, self.evidence)
        return read if self.gone is None or any(self.gone is each for each in read) else [*read, self.gone]

    def values(self, at: slice | torch.Tensor) -> torch.Tensor:
        """Return the scores at ``at``, 1-D, as if nothing were gone.

        Raises:
            ValueError: the score returns another number of values, or no tensor.
        """
        # The library's do not write to what they are given; functions and classes of users may.
        kind = type(self.score)
        copied = kind is ElementwiseScore or not is_ours(kind)
        values = self.score.values(Elements(self.shard, at, self.evidence, copied))
        num = at.stop - at.start if isinstance(at, slice) else len(at)
        if not isinstance(values, torch.Tensor) or values.shape != (num,):
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ValueError(f"score {self.score.name!r} returned {got} for {num} elements of {self.shard.name!r}")
        return values

    def is_gone(self, at: slice | torch.Tensor) -> torch.Tensor | None:
        """Return which elements at ``at`` are gone, bool, 1-D; ``None``, on the host always, if none are."""
        if self.gone is None:
            return None
        gone = is_zero(_taken(self.gone, at))
        return gone if not on_host(self.device) or gone.numpy().any() else None

    def keys(self, order: Any) -> Iterator[Any]:
        """Yield the keys (see ``selection/order.py``) of all elements, chunk by chunk, in local order.

        On the host arrays, on a device tensors.
        """
        numel, step, bits = self.shard.geometry.local_numel, chunk_size(self.device), self._bits(order)
        for start in range(0, numel, step):
            at = slice(start, min(start + step, numel))
            if bits is not None:
                yield bits[at] & np.iinfo(bits.dtype).max
            else:
                keys = self.keys_at(order, at)
                yield keys.numpy() if on_host(self.device) else keys

    def keys_at(self, order: Any, at: slice | torch.Tensor) -> torch.Tensor:
        """Return the keys of the elements at ``at``, 1-D; integers that score themselves are returned as they are."""
        if (bits := self._bits(order)) is not None and isinstance(at, slice):
            return torch.from_numpy(bits[at] & np.iinfo(bits.dtype).max)
        keys: torch.Tensor = order.keys(self.values(at))
        if not order.zeros_gone and not self.regrows and (gone := self.is_gone(at)) is not None:
            return (keys if order.has_nans else keys.clone()).masked_fill_(gone, order.gone)  # integers may be its own
        return keys

    def _bits(self, order: Any) -> Any:
        """Return the shard's bits, on the host, if these are the keys but for signs: half of what torch takes."""
        is_kept = order.zeros_gone or self.gone is None  # what is gone needs no other key
        if is_kept and self.score.is_weight and order.reads_bits(self.shard.local.dtype):
            return as_array(self.shard.local)
        return None


def local_scores(
    score: Score,
    shards: Sequence[LocalShard],
    evidence: Mapping[str, Evidence] | None = None,
    *,
    zeros_are_gone: bool = False,
) -> list[LocalScores]:
    """Return the scores of each of ``shards``. ``evidence`` is by the shard's name. Local.

    Raises:
        ValueError: evidence that the score needs was not given.
    """
    found = []
    for shard in shards:
        of_shard = (evidence or {}).get(shard.name, {})
        missing = [name for name in score.needs if name not in of_shard]
        if missing:
            way = {
                "input_norm": f"; {WALK.format(score.name)}",
                "movement": "; SparseTraining sums it up of what has gradients: leave out what has none with exclude",
            }
            raise ValueError(
                f"score {score.name!r} needs {missing} of {shard.name!r}, which was not given{way.get(missing[0], '')}"
            )
        found.append(LocalScores(shard, score, of_shard, shard.local if zeros_are_gone else None))
    return found


@own_settings()
def count_unread_nans(scores: Sequence[LocalScores]) -> list[int]:
    """Return of each how many weights are NaN that the score itself does not read. Local, one wait for a device."""
    found = dict[int, torch.Tensor]()
    for i, each in enumerate(scores):
        local, reads = each.shard.local, each.score.reads(each.shard, each.evidence)
        if not each.score.is_weight and local.is_floating_point() and not any(local is read for read in reads):
            nums = (count_true(values.isnan()) for _, values in flat_chunks(local))
            found[i] = sum(nums, torch.zeros((), dtype=torch.int64, device="cpu"))
    nums_of = dict(zip(found, map(int, fetched([*found.values()])), strict=True))
    return [nums_of.get(i, 0) for i in range(len(scores))]


def _taken(tensor: torch.Tensor, at: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(at, slice):
        return flat_chunk(tensor, at.start, at.stop)
    if tensor.element_size() == 1:  # torch takes no 8-bit floats
        return torch.take(tensor.view(torch.uint8), at).view(tensor.dtype)
    return torch.take(tensor, at)
