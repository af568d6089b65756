"""What a score needs beside the weights, as it is given: found by name, checked, and cut. No communication."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.hints import near_names
from distprune.models.find_shards import Found
from distprune.pruning.agreement import Agreed
from distprune.scores.base import Evidence
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.layouts import is_laid_out_like, local_of, local_part
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import gradients_of

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


def check_names(given: GivenEvidence, agreed: Agreed) -> None:
    """Check that evidence is of parameters of the model. Stages of a pipeline may have that of others. Local.

    Raises:
        ValueError: a key names none.
    """
    known = {*agreed.found.names.values(), *agreed.roster.index()}
    for kind, of_parameters in given.items():
        for name in of_parameters:
            if name not in known and agreed.num_parameters is not None:
                near = near_names(name, [*agreed.found.names])
                raise ValueError(f"evidence {kind!r} names {name!r}, which is no parameter of the model; {near}")


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
    given: GivenEvidence,
    local: Mapping[str, Evidence],
    shards: Sequence[LocalShard],
    needs: Sequence[str],
    model: nn.Module | None,
) -> dict[str, Evidence]:
    """Return the local part of the evidence by shard: ``local``, what was ``given``, else gradients of ``model``."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for shard in shards:
        parts = found[shard.name] = dict(local.get(shard.name, {}))
        for name, of_name in given.items():
            if shard.name in of_name:
                what = f"evidence {name!r} of {shard.name!r}"
                parts[name] = local_part(of_name[shard.name], shard.tensor, shard, what)
    if "gradient" in needs and "gradient" not in given and model is not None:
        for shard, gradient in zip(shards, gradients_there(model, shards), strict=True):
            found[shard.name]["gradient"] = gradient
    return {**found}


def gradients_there(model: nn.Module, shards: Sequence[LocalShard]) -> list[torch.Tensor]:
    """Return the gradients that the parameters of ``model`` have, by shard, of local shape. Local.

    Raises:
        ValueError: a parameter has none that is reduced over the ranks.
    """
    gradients = []
    for shard, gradient in zip(shards, gradients_of(shards, model.parameters()), strict=True):
        if gradient is None:
            raise ValueError(
                f"{shard.name!r} has no gradient that is reduced over the ranks; call backward() first, not under "
                "no_sync(), and before zero_grad(), or give evidence"
            )
        gradients.append(gradient)
    return gradients
