"""What all ranks must agree on before anything is computed, and who owns which elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from distprune.collectives.agree import check_facts, same_everywhere, sum_together
from distprune.collectives.base import Communicator, as_told
from distprune.collectives.known import Known, digest_of, new_word
from distprune.collectives.roster import Member, Roster, roster_of_all, roster_of_one
from distprune.hints import near_names
from distprune.models.find_shards import Found, NamePattern, find_shards
from distprune.scores.base import Score
from distprune.scores.magnitude import Magnitude
from distprune.shards.local_shard import LocalShard

Facts = Mapping[str, object]
T = TypeVar("T")


@dataclass(frozen=True)
class Agreed:
    """What the ranks agreed on. ``patterns``: name patterns, each with its number of matches over all ranks.

    ``num_parameters``: of the whole model, where all ranks have all of it or parts of each parameter. ``names``: of all
    parameters of this rank's model.
    """

    comm: Communicator
    roster: Roster
    patterns: list[tuple[NamePattern, int]]
    score: Score
    num_parameters: int | None
    _shards: Sequence[LocalShard]
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def check_found(self) -> None:
        """Check that every name pattern matches something, and that there is something to prune. Local.

        Raises:
            ValueError: on every rank: it does not.
        """
        for pattern, num in self.patterns:
            if num == 0:
                near = f"; {near_names(pattern, [*self.names])}" if isinstance(pattern, str) and self.names else ""
                raise ValueError(f"the pattern {_shown(pattern)} matches no parameter of the model{near}")
        if not self.roster.members:
            why = f" ({'; '.join(f'{name!r} is {why}' for name, why in [*self.left_out.items()][:3])})"
            raise ValueError(f"there is no parameter to prune; name some with include{why if self.left_out else ''}")

    def shards(self) -> list[LocalShard]:
        """Return this rank's shards, with their owners settled. No communication."""
        place, comm = self.roster.index(), self.comm
        own_rank = comm.global_rank(comm.rank)
        return [
            shard.owned_by(own_rank, comm.global_rank(self.roster.first_holder[i]), self.roster.num_holders[i])
            for shard, i in ((shard, place[shard.name]) for shard in self._shards)
        ]


def agree_on(comm: Communicator, look: Callable[[], tuple[Found, Facts, Score, T]]) -> tuple[Agreed, T]:
    """Return what all ranks agree on, or raise on all ranks. Every rank must call it.

    ``look`` is local. It returns this rank's parameters, the facts that all ranks must state alike, the score, and
    anything else, which is returned as it is.

    One round of 64 bytes if all ranks hold the same parameters, or those of an earlier call. If not (pipeline stages),
    up to four more: the matches are summed, and each different list of parameters is sent once. Then a rank without
    decoder blocks prunes nothing by default if another rank has some, because the default follows from the whole model.

    A score that needs a seed gets one from torch's default generator. Every rank draws, so that equal generators stay
    equal; the first rank's seed is used.

    Raises:
        Exception: what ``look`` raised, and elsewhere the same built-in type, naming the rank.
        ValueError: on every rank: facts differ, or the lists of parameters do not fit together.
    """
    looked, statement, settled, key, drawn, error = None, None, None, "", 0, None
    members: list[Member] = []
    try:
        looked = look()
        found, facts, score, _ = looked
        members = [
            Member(shard.name, shard.shape, str(shard.local.dtype), shard.layout, found.evidence.get(shard.name, 0))
            for shard in found.shards
        ]
        described = [[m.name, m.global_shape, m.dtype, m.layout and m.layout.name, m.evidence] for m in members]
        counts = [*(num for _, num in found.patterns), found.num_parameters]
        key = digest_of([comm.size, counts, _lacks_blocks(found), described])
        stated, settled = _settled.look_up(comm, key)
        statement = [facts, stated]
        drawn = int(torch.randint(1 << 62, (), device="cpu")) if score.needs_seed else 0
    except BaseException as caught:
        error = as_told(caught)
    all_same, drawn = same_everywhere(comm, statement, error, drawn)
    assert looked is not None  # else all have raised
    found, facts, score, rest = looked
    if not all_same:
        check_facts(comm, facts)
        settled = _settle(comm, found, members)
    elif settled is None:
        settled = (
            key,
            _Settled(
                roster_of_one(comm, members), [num for _, num in found.patterns], num_parameters=found.num_parameters
            ),
        )
    of_all = _settled.keep(comm, key, settled)
    patterns = [(pattern, num) for (pattern, _), num in zip(found.patterns, of_all.num_matches, strict=True)]
    seeded = score.seeded(drawn) if score.needs_seed else score
    shards = [] if of_all.leaves_out else found.shards
    agreed = Agreed(comm, of_all.roster, patterns, seeded, of_all.num_parameters, shards, found.names, found.left_out)
    return agreed, rest


@dataclass(frozen=True)
class _Settled:
    """``leaves_out``: this rank prunes nothing by default, because it has no decoder blocks."""

    roster: Roster
    num_matches: list[int]
    leaves_out: bool = False
    num_parameters: int | None = None


_settled: Known[_Settled] = Known(16)  # models and arguments; a roster takes some 200 bytes a parameter


def _settle(comm: Communicator, found: Found, members: Sequence[Member]) -> tuple[str, _Settled]:
    """Put together what different ranks found. Every rank must call it: three rounds."""
    mine = [*(num for _, num in found.patterns), int(found.has_blocks), new_word() if comm.rank == 0 else 0]
    *num_matches, num_with_blocks, word = sum_together(
        comm, (len(mine),), lambda words: words.copy_(torch.tensor(mine, dtype=torch.int64, device="cpu"))
    ).tolist()
    leaves_out = _lacks_blocks(found) and num_with_blocks > 0
    roster = roster_of_all(comm, [] if leaves_out else members)
    return str(word), _Settled(roster, num_matches, leaves_out)


def _lacks_blocks(found: Found) -> bool:
    return found.by_default and not found.has_blocks


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
