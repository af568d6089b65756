"""The parameters of a checkpoint that no model is made of: their names, which are to be pruned, and their values.

Where transformers knows the architecture, its model on the meta device, without memory, says which tensors are
pruned, in which order, and which dims are inputs: so the same weights are meant as in the job that loads the model.
Where it does not, or does more to tensors on loading than to put them in their place, names and shapes alone say it:
see ``models/named_model.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from distprune.checkpoint.hf_directory import CONFIG_NAME, HfDirectory, read_json
from distprune.checkpoint.hf_load import build_on_meta, check_config
from distprune.checkpoint.naming import Regions
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.regions import Region, regions_by_name
from distprune.models.find_shards import Found, find_shards
from distprune.models.named_model import model_of_names
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard

# What quantizers store beside, or instead of, a weight (bitsandbytes, GPTQ, AWQ, compressed-tensors, FP8).
_QUANTIZED = (
    *("absmax", "SCB", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"),
)


@dataclass(frozen=True)
class StoredParameters:
    """``found``: the parameters to prune, as they are stored, on the meta device: of a weight that several stored
    tensors make (fused experts), each part is one. ``stored``: where every one is in the checkpoint, of tied weights
    several times. ``parts``: of every stored tensor its regions, each with the parameter that it is (``None``: it is
    not pruned). ``by_names``: names alone decided."""

    found: Found
    stored: dict[str, list[Region]]
    parts: dict[str, list[tuple[Region, str | None]]]
    by_names: bool

    def values(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every parameter to prune: a view of one of the stored ``tensors``. Local."""
        return {name: copies[0].view_of(tensors[copies[0].stored]) for name, copies in self.stored.items()}


def find_stored(directory: HfDirectory, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> StoredParameters:
    """Return which tensors of ``directory`` are pruned; ``include``, ``exclude``: as of ``find_shards``. Local.

    Raises:
        NotImplementedError: the weights are quantized.
        ValueError: transformers knows the architecture, and cannot make its model of the config, or tensors are
            missing, unexpected, or of another shape than the config makes them.
        ImportError: the extra ``hf`` is not installed.
    """
    check_config(directory.path)
    known = _known_model(directory)
    model, regions = known or _named_model(directory)
    state = model.state_dict(keep_vars=True)
    copies_of: dict[int, list[list[Region]]] = {}
    for name, places in regions_by_name(regions.values()).items():
        in_order = sorted(places, key=lambda region: region.bounds)  # so that equal scores go in the model's order
        copies_of.setdefault(id(state[name]), []).append(in_order)
    found = find_shards(model, include, exclude)
    shards: list[LocalShard] = []
    stored: dict[str, list[Region]] = {}
    part_of: dict[Region, tuple[Region, str | None]] = {}
    for shard in found.shards:
        for copies in zip(*copies_of[id(shard.tensor)], strict=True):
            region, num_parts = copies[0], len(copies_of[id(shard.tensor)][0])
            is_whole = region.stored_bounds == tuple((0, size) for size in directory.tensors[region.stored][1].shape)
            name = shard.name if num_parts == 1 else region.stored if is_whole else f"{region.stored} in {shard.name}"
            stored[name] = [copy.from_zero(name) for copy in copies]
            part_of.update({copy: (at_zero, name) for copy, at_zero in zip(copies, stored[name], strict=True)})
            shape = tuple(stop - start for start, stop in region.bounds)
            local = torch.empty(shape, dtype=shard.local.dtype, device="meta")
            shards.append(replace(shard, name=name, local=local, geometry=Geometry.whole(shape), tensor=None))
    parts = {name: [part_of.get(region, (region, None)) for region in places] for name, places in regions.items()}
    return StoredParameters(replace(found, shards=shards), stored, parts, known is None)


def _known_model(directory: HfDirectory) -> tuple[nn.Module, Regions] | None:
    """Return transformers' model, and where the tensors are in it; ``None``: it has none, or makes more of them."""
    kinds = import_extra("transformers.models.auto.modeling_auto", "hf").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = read_json(directory.path / CONFIG_NAME).get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        return None
    try:
        return build_on_meta(directory)
    except NotImplementedError:  # not of quantized weights, which were refused before
        return None


def _named_model(directory: HfDirectory) -> tuple[nn.Module, Regions]:
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, (_, entry) in directory.tensors.items()
    }
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if last in _QUANTIZED or (last == "weight" and not tensor.is_floating_point()):
            raise NotImplementedError(
                f"tensor {name!r} of {directory.path} is of quantized weights, which cannot be pruned; take the model "
                "they were quantized from, or dequantize them first"
            )
    return model_of_names(tensors), {name: [Region.whole(name, name, tensor.shape)] for name, tensor in tensors.items()}
