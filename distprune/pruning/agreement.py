"""What all ranks must agree on before anything is computed, and who owns which elements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.collectives.agree import check_facts, same_everywhere, sum_together
from distprune.collectives.base import Communicator, as_met
from distprune.collectives.roster import Member, Roster, roster_of_all, roster_of_one
from distprune.hints import near_names
from distprune.kernels.available import has_kernels
from distprune.kernels.held import count_zeros
from distprune.masks.in_place import zero_all_where_pruned
from distprune.mistakes import called_from_outside, is_ours
from distprune.models.find_shards import Found, NamePattern, find_shards, listed
from distprune.models.matrices import matrix_of_weight
from distprune.models.weights import check_unscaled
from distprune.patterns.base import Choice, Pattern, Ranked, own_share
from distprune.scores.as_score import Magnitude
from distprune.scores.base import Evidence, Score, count_unread_nans
from distprune.selection.radix import raise_nans
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.layouts import is_laid_out_like, local_of, local_part
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import gradients_of
from distprune.shards.parts import check_memory, with_owners

Facts = Mapping[str, object]


@dataclass
class Agreed:
    """What the ranks agree on. Within :func:`agreeing` each rank sets ``found``, ``facts`` and ``score``.

    ``found``: by this rank; behind ``agreeing`` its name patterns have their matches over all ranks, and stages of a
    pipeline no number of parameters. ``facts``: all ranks must state the same.
    """

    comm: Communicator
    found: Found = field(init=False)
    facts: Facts = field(default_factory=dict)
    score: Score = field(default_factory=Magnitude)
    roster: Roster = field(init=False)

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

    def check_shares(self, pattern: Pattern) -> None:
        """Check that a sparsity for each parameter names all of them, and parameters of the model. Local.

        Raises:
            ValueError: it does not. Stages of a pipeline may be given those of others.
        """
        shares, names = vars(pattern).get("sparsity"), self.found.names
        if isinstance(shares, Mapping):
            for member in self.roster.members:
                own_share(shares, member.name)
            for name in shares if self.found.num_parameters is not None else ():
                if name not in names:
                    near = near_names(name, [*names])
                    raise ValueError(f"sparsity names {name!r}, which is no parameter of the model; {near}")

    def shards(self) -> list[LocalShard]:
        """Return this rank's shards, with their owners settled. No communication."""
        return with_owners(self.comm, self.roster, self.found.shards)


@contextmanager
def agreeing(comm: Communicator) -> Iterator[Agreed]:
    """Agree on what the body finds, or raise on all ranks. Every rank must call it; the body must not communicate.

    One round of 64 bytes if all ranks hold the same parameters. If not (pipeline stages), four more: the matches are
    summed, and each different list of parameters is sent once. Then a rank without decoder blocks prunes nothing by
    default if another rank has some, because the default follows from the whole model.

    A score that needs a seed gets one from torch's default generator. Every rank draws, so that equal generators stay
    equal; the first rank's seed is used.

    Raises:
        Exception: what the body raised, and elsewhere the same built-in type, naming the rank.
        ValueError: on every rank: facts differ, or the lists of parameters do not fit together.
    """
    agreed = Agreed(comm)
    members: list[Member] = []
    stated: list[object] = []
    on_gpu, seed, error = False, 0, None
    try:
        yield agreed
        found = agreed.found
        for shard in found.shards:
            evidence = found.evidence.get(shard.name, 0)
            members.append(Member(shard.name, shard.shape, str(shard.local.dtype), shard.layout, evidence))
        on_gpu = has_kernels(*[shard.local.device for shard in found.shards])
        if agreed.score.needs_seed:
            seed = int(torch.randint(1 << 62, (), device="cpu"))
        lists = [[m.name, m.global_shape, m.dtype, m.layout and m.layout.name, m.evidence] for m in members]
        counts = [*(num for _, num in found.patterns), found.num_parameters, found.lacks_blocks]
        stated += [agreed.facts, counts, lists, on_gpu]
    except BaseException as caught:
        error = as_met(caught)
    all_same, seed = same_everywhere(comm, stated, seed, error)
    found = agreed.found
    if agreed.score.needs_seed:
        agreed.score = agreed.score.seeded(seed)
    if all_same:
        agreed.roster = roster_of_one(comm, members, on_gpu=on_gpu)
        return
    check_facts(comm, agreed.facts)

    def count(words: torch.Tensor) -> None:
        own = [*(num for _, num in found.patterns), found.has_blocks, on_gpu and not found.lacks_blocks]
        words.copy_(torch.tensor(own, dtype=torch.int64, device="cpu"))

    *num_matches, num_with_blocks, num_on_gpu = sum_together(comm, (len(found.patterns) + 2,), count).tolist()
    leaves_out = found.lacks_blocks and num_with_blocks > 0
    agreed.roster = roster_of_all(comm, [] if leaves_out else members, on_gpu=num_on_gpu == comm.size)
    patterns = [(pattern, num) for (pattern, _), num in zip(found.patterns, num_matches, strict=True)]
    shards = [] if leaves_out else found.shards
    agreed.found = dataclasses.replace(found, patterns=patterns, shards=shards, num_parameters=None)


@dataclass(frozen=True)
class NamedWeights:
    """The parameters of ``model`` that ``include`` and ``exclude`` mean: see :func:`find_shards`.

    In the place of a model there may be what was found in one, or shards that a caller spread by hand.
    """

    model: Any  # nn.Module | Found | Sequence[LocalShard]
    include: NamePattern | Sequence[NamePattern] = ()
    exclude: NamePattern | Sequence[NamePattern] = ()

    def find(self) -> Found:
        """Return this rank's parts of them. Local; raises as :func:`find_shards` does."""
        if isinstance(self.model, Found):
            return self.model
        if isinstance(self.model, Sequence) and all(isinstance(shard, LocalShard) for shard in self.model):
            return Found([*self.model], names={shard.name: shard.name for shard in self.model})
        return find_shards(self.model, *self.patterns)  # which says what it takes

    def find_for(self, pattern: Pattern) -> Found:
        """Return this rank's parts of them, as ``pattern`` needs them. Local; raises as :func:`fitted`, too.

        And as :func:`check_unscaled` and :func:`check_memory`.
        """
        found = self.find()
        check_memory(found.shards)
        for shard in found.shards:
            if shard.module is not None:
                check_unscaled(shard.name, shard.module, shard.attribute)
        return dataclasses.replace(found, shards=[fitted(pattern, shard, shard.name) for shard in found.shards])

    @cached_property
    def patterns(self) -> tuple[list[NamePattern], list[NamePattern]]:
        """Those of ``include``, and those of ``exclude``."""
        return listed(self.include), listed(self.exclude)  # a generator says its names once, and these are asked again

    @property
    def facts(self) -> dict[str, object]:
        """What all ranks must state alike of them."""
        include, exclude = ([*map(_shown, patterns)] for patterns in self.patterns)
        return {"include": include, "exclude": exclude}

    def agree(self, comm: Communicator, look: Callable[[], object] = lambda: None) -> Agreed:
        """Return what all ranks agree on about them: see :func:`agreeing`.

        ``look`` is local. What it raises is raised on all ranks, and what it returns all ranks must return alike.

        Raises:
            ValueError: on every rank: ranks disagree, or there is nothing to prune.
        """
        with agreeing(comm) as agreed:
            agreed.found = self.find()
            agreed.facts = {**self.facts, "arguments": repr(look()), "function": called_from_outside()}
        agreed.check_found()
        return agreed


def sum_zeros(comm: Communicator, roster: Roster, owned: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, int]:
    """Return how many elements of each parameter are zero, over all ranks: ``owned`` returns this rank's, by name.

    Every rank must call it: one round of 8 bytes a parameter.
    """

    def fill(num_zeros: torch.Tensor) -> None:
        tensors, index = owned(), roster.index()
        for name, num in zip(tensors, count_zeros([*tensors.values()]), strict=True):
            num_zeros[index[name]] = num

    return dict(zip(roster.index(), sum_together(comm, (len(roster.members),), fill).tolist(), strict=True))


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


def fitted(pattern: Pattern, shard: LocalShard, name: str) -> LocalShard:
    """Return the shard with its matrix, if ``pattern`` needs it.

    Of rows spread by hand, dim 0 is the rows unless the shard has a matrix.

    Raises:
        ValueError: the parameter, called ``name``, has fewer than two dims, its matrix another size, or the pattern's
            groups, blocks or channels do not fit it.
        NotImplementedError: which of its dims are the inputs is not known.
    """
    pattern.check_shape(shard.shape)
    if not pattern.needs_matrix:
        return shard
    matrix = shard.matrix
    if matrix is None and shard.module is None and len(shard.shape) > 1:
        matrix = shard.as_matrix()
    elif matrix is None:
        matrix = matrix_of_weight(shard.module or nn.Module(), shard.attribute, shard.shape, name)
    if matrix.num_rows * matrix.num_in != shard.geometry.global_numel:
        raise ValueError(f"{name!r} of shape {shard.shape} has not as many elements as its {matrix}")
    pattern.check_fits(name, matrix)
    return shard.having(matrix=matrix)


GivenEvidence = Mapping[str, Mapping[str, torch.Tensor]]  # by evidence, then by parameter


def given_by_name(evidence: GivenEvidence, found: Found) -> dict[str, dict[str, torch.Tensor]]:
    """Return ``evidence`` by the parameter's name here, or by its key if there is none. Local.

    Raises:
        ValueError: two keys name one parameter.
        TypeError: it is no mapping to tensors.
    """
    given: dict[str, dict[str, torch.Tensor]] = {}
    for part in (evidence, *(evidence.values() if isinstance(evidence, Mapping) else ())):
        if not isinstance(part, Mapping):
            raise TypeError(
                f"evidence takes {{'gradient': {{name: tensor}}}}, not a {type(part).__name__} in its place"
            )
    for kind, of_parameters in evidence.items():
        for key, tensor in of_parameters.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"evidence {kind!r} of {key!r} is a {type(tensor).__name__}, not a tensor")
            name = found.name_of(key) or key
            if name in given.setdefault(kind, {}):
                raise ValueError(f"evidence {kind!r} names {name!r} twice")
            given[kind][name] = tensor
    return given


def checksums(given: GivenEvidence, shards: Sequence[LocalShard]) -> dict[str, int]:
    """Return a checksum of what was given whole, of each shard that is a part. Local: one wait for a device."""
    wholes: dict[str, list[torch.Tensor]] = {}
    for shard, of_name in itertools.product(shards, given.values()):
        if (tensor := of_name.get(shard.name)) is None:
            continue
        is_sharded = isinstance(shard.tensor, DTensor) or shard.original_shape is not None  # FSDP1
        if is_sharded and not (isinstance(shard.tensor, DTensor) and is_laid_out_like(tensor, shard.tensor)):
            wholes.setdefault(shard.name, []).append(local_of(tensor.detach()))
    sums = fetched([checksum(tensors) for tensors in wholes.values()])
    return dict(zip(wholes, map(int, sums), strict=True))


def local_evidence(
    agreed: Agreed,
    shards: Sequence[LocalShard],
    given: GivenEvidence,
    local: Mapping[str, Evidence],
    model: nn.Module | None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the local part of the evidence by shard: ``local``, what was ``given``, else gradients of ``model``.

    Raises:
        ValueError: a kind that the score does not read; a key that names no parameter of the model. Stages of a
            pipeline may be given that of others.
    """
    unread = sorted(given.keys() - {*agreed.score.needs})
    if unread and is_ours(type(agreed.score)):  # a user's may read what it does not say
        takes = ", ".join(agreed.score.needs) or "none"
        raise ValueError(f"score {agreed.score.name!r} reads no evidence {unread[0]!r}; it takes {takes}")
    names, by_name = agreed.found.names, {shard.name: shard for shard in shards}
    evidence = {name: dict(local.get(name, {})) for name in by_name}
    for kind, of_parameters in given.items():
        for name, tensor in of_parameters.items():
            if (shard := by_name.get(name)) is not None:
                evidence[name][kind] = local_part(tensor, shard.tensor, shard, f"evidence {kind!r} of {name!r}")
            elif name not in names.values() and agreed.found.num_parameters is not None:
                near = near_names(name, [*names])
                raise ValueError(f"evidence {kind!r} names {name!r}, which is no parameter of the model; {near}")
    if "gradient" in agreed.score.needs and "gradient" not in given and model is not None:
        for shard, gradient in zip(shards, gradients_there(model, shards), strict=True):
            evidence[shard.name]["gradient"] = gradient
    return evidence


def gradients_there(model: nn.Module, shards: Sequence[LocalShard]) -> list[torch.Tensor]:
    """Return the gradients that the parameters of ``model`` have, by shard, of local shape. Local.

    Raises:
        ValueError: a parameter has none that is reduced over the ranks.
    """
    gradients = []
    for shard, gradient in zip(shards, gradients_of(shards, model.parameters()), strict=True):
        if gradient is None:
            if shard.tensor is not None and not shard.tensor.requires_grad:
                raise ValueError(f"{shard.name!r} is frozen, and has no gradient: leave it out with exclude")
            raise ValueError(
                f"{shard.name!r} has no gradient that is reduced over the ranks; call backward() first, not under "
                "no_sync(), and before zero_grad(), or give evidence"
            )
        gradients.append(gradient)
    return gradients


def choose_masks(
    ranked: Ranked, choice: Choice, then: Callable[[Sequence[torch.Tensor]], object] = len, *, in_place: bool = False
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return the mask of each of this rank's shards; and of every member, over all ranks, how many elements are pruned,
    and how many of these were before.

    ``then`` is local. It is given the masks, and what it raises on one rank is raised on all. ``in_place``: zeros are
    written into the weights; if the choice can do that by itself, there are no masks. Every rank must call it: one
    round of 16 bytes a parameter.

    Raises:
        ValueError: on every rank: scores are NaN, or weights that they do not read, unless shares are of what is left.
            Nothing is changed then.
    """
    masks: list[torch.Tensor] = []
    num_nans: dict[str, int] = {}
    writes = choice.in_place if in_place else None
    if writes is not None and not writes.zero():
        writes = None

    def fill(words: torch.Tensor) -> None:
        scores = ranked.scores
        num_unread = [0] * len(scores)
        if writes is not None:
            numbers = writes.counts().tolist()
        else:
            made, counts = choice.write_masks(scores)
            masks.extend(made)
            then(masks)
            if not ranked.of_left and not ranked.score.is_weight:
                num_unread = count_unread_nans(scores)
            numbers = torch.stack(fetched(counts)).tolist() if counts else []
        totals = words[1:].view(-1, 2).numpy()
        for each, (num_pruned, num_gone, num), unread in zip(scores, numbers, num_unread, strict=True):
            if each.shard.owned:
                totals[ranked.index[each.shard.name]] = num_pruned, num_gone
                num_nans[each.shard.name] = num + unread
        words[0] = sum(num_nans.values())

    words = sum_together(ranked.comm, (1 + 2 * len(ranked.numels),), fill)
    if words[0]:
        raise_nans(ranked.comm, num_nans)
    if in_place and masks:  # from here on no rank can fail
        zero_all_where_pruned([(each.shard.local, mask) for each, mask in zip(ranked.scores, masks, strict=True)])
    return masks, words[1:].view(-1, 2).tolist()
