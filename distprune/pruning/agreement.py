"""What all ranks must agree on before anything is computed, and who owns which elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from distprune.collectives.agree import check_facts, same_everywhere, sum_together
from distprune.collectives.base import Communicator
from distprune.collectives.roster import Member, Roster, roster_of_all, roster_of_one
from distprune.hints import near_names
from distprune.kernels.available import has_kernels
from distprune.models.find_shards import Found, NamePattern, find_shards
from distprune.scores.base import Score
from distprune.scores.magnitude import Magnitude
from distprune.shards.local_shard import LocalShard

Facts = Mapping[str, object]
T = TypeVar("T")


@dataclass(frozen=True)
class Agreed:
    """What the ranks agreed on. ``found``: by this rank; its name patterns with their matches over all ranks.

    ``num_parameters``: of the whole model, where all ranks have all of it or parts of each parameter.
    """

    comm: Communicator
    roster: Roster
    score: Score
    found: Found
    num_parameters: int | None

    def check_found(self) -> None:
        """Check that every name pattern matches something, and that there is something to prune. Local.

        Raises:
            ValueError: on every rank: it does not.
        """
        names, left_out = self.found.names, self.found.left_out
        for pattern, num in self.found.patterns:
            if num == 0:
                near = f"; {near_names(pattern, [*names])}" if isinstance(pattern, str) and names else ""
                raise ValueError(f"the pattern {_shown(pattern)} matches no parameter of the model{near}")
        if not self.roster.members:
            why = f" ({'; '.join(f'{name!r} is {why}' for name, why in [*left_out.items()][:3])})" if left_out else ""
            raise ValueError(f"there is no parameter to prune; name some with include{why}")

    def shards(self) -> list[LocalShard]:
        """Return this rank's shards, with their owners settled. No communication."""
        place, comm, roster = self.roster.index(), self.comm, self.roster
        own_rank = comm.global_rank(comm.rank)
        return [
            shard.owned_by(own_rank, comm.global_rank(roster.first_holder[i]), roster.num_holders[i])
            for shard, i in ((shard, place[shard.name]) for shard in self.found.shards)
        ]


def agree_on(comm: Communicator, look: Callable[[], tuple[Found, Facts, Score, T]]) -> tuple[Agreed, T]:
    """Return what all ranks agree on, or raise on all ranks. Every rank must call it.

    ``look`` is local. It returns this rank's parameters, the facts that all ranks must state alike, the score, and
    anything else, which is returned as it is.

    One round of 64 bytes if all ranks hold the same parameters. If not (pipeline stages), four more: the matches are
    summed, and each different list of parameters is sent once. Then a rank without decoder blocks prunes nothing by
    default if another rank has some, because the default follows from the whole model.

    A score that needs a seed gets one from torch's default generator. Every rank draws, so that equal generators stay
    equal; the first rank's seed is used.

    Raises:
        Exception: what ``look`` raised, and elsewhere the same built-in type, naming the rank.
        ValueError: on every rank: facts differ, or the lists of parameters do not fit together.
    """
    looked: list[tuple[Found, Facts, Score, T]] = []
    members: list[Member] = []

    def stated() -> object:
        looked.append(look())
        found, facts, _, _ = looked[0]
        for shard in found.shards:
            evidence = found.evidence.get(shard.name, 0)
            members.append(Member(shard.name, shard.shape, str(shard.local.dtype), shard.layout, evidence))
        lists = [[m.name, m.global_shape, m.dtype, m.layout and m.layout.name, m.evidence] for m in members]
        num_matches = [num for _, num in found.patterns]
        return [facts, num_matches, found.num_parameters, found.lacks_blocks, lists, on_gpu(found.shards)]

    def draw() -> int:
        return int(torch.randint(1 << 62, (), device="cpu")) if looked[0][2].needs_seed else 0

    all_same, drawn = same_everywhere(comm, stated, draw)
    found, facts, score, rest = looked[0]
    score = score.seeded(drawn) if score.needs_seed else score
    if all_same:
        roster = dataclasses.replace(roster_of_one(comm, members), on_gpu=on_gpu(found.shards))
        return Agreed(comm, roster, score, found, found.num_parameters), rest
    check_facts(comm, facts)

    def count(words: torch.Tensor) -> None:
        own = [*(num for _, num in found.patterns), found.has_blocks, on_gpu(found.shards) and not found.lacks_blocks]
        words.copy_(torch.tensor(own, dtype=torch.int64, device="cpu"))

    *num_matches, num_with_blocks, num_on_gpu = sum_together(comm, (len(found.patterns) + 2,), count).tolist()
    leaves_out = found.lacks_blocks and num_with_blocks > 0
    roster = roster_of_all(comm, [] if leaves_out else members)
    roster = dataclasses.replace(roster, on_gpu=num_on_gpu == comm.size)
    patterns = [(pattern, num) for (pattern, _), num in zip(found.patterns, num_matches, strict=True)]
    found = dataclasses.replace(found, patterns=patterns, shards=[] if leaves_out else found.shards)
    return Agreed(comm, roster, score, found, None), rest


def on_gpu(shards: Sequence[LocalShard]) -> bool:
    """Return whether all ``shards`` lie on one GPU that has kernels. Local."""
    devices = {shard.local.device for shard in shards}
    return len(devices) == 1 and all(map(has_kernels, devices))


def agree_on_model(
    comm: Communicator,
    model: nn.Module,
    include: NamePattern | Sequence[NamePattern],
    exclude: NamePattern | Sequence[NamePattern],
    look: Callable[[], object] = lambda: None,
) -> Agreed:
    """Return what all ranks agree on about the parameters of ``model``: see :func:`agree_on`.

    ``look`` is local. What it raises is raised on all ranks, and what it returns all ranks must return alike.

    Raises:
        ValueError: on every rank: ranks disagree, or there is nothing to prune.
    """

    def looked() -> tuple[Found, Facts, Score, None]:
        found = find_shards(model, include, exclude)
        facts = {"include": all_shown(include), "exclude": all_shown(exclude), "arguments": repr(look())}
        return found, facts, Magnitude(), None

    agreed, _ = agree_on(comm, looked)
    agreed.check_found()
    return agreed


def all_shown(patterns: NamePattern | Sequence[NamePattern]) -> list[str]:
    """Return how ranks compare name patterns."""
    return [*map(_shown, [patterns] if isinstance(patterns, str | nn.Module) else patterns)]


def _shown(pattern: NamePattern) -> str:
    """Return a name pattern as text: a module, which no two ranks share, by its class."""
    return repr(pattern) if isinstance(pattern, str) else f"({type(pattern).__name__})"


def with_seed(score: Score, seed: int | None) -> Score:
    """Return ``score``, with ``seed`` where it needs one and has none of its own. Local.

    Raises:
        TypeError: ``seed`` is neither an int nor ``None``.
    """
    check_seed(seed)
    return score if seed is None or not score.needs_seed else score.seeded(seed)


def check_seed(seed: int | None) -> None:
    """Check that ``seed`` is an int or ``None``. Local.

    Raises:
        TypeError: it is not.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int or None, not {seed!r}")
