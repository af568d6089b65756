"""The parameters of a checkpoint that no model is made of: their names, which are to be pruned, and their values.

Where transformers knows the architecture, its model on the meta device, without memory, says which tensors are
pruned, in which order, and which dims are inputs: so the same weights are meant as in the job that loads the model.
Where it does not, or does more to tensors on loading than to put them in their place, names and shapes alone say it:
see ``models/named_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from distprune.checkpoint.hf_directory import CONFIG_NAME, HfDirectory, WeightFile, open_weights, read_json
from distprune.checkpoint.meta_model import build_on_meta
from distprune.checkpoint.naming import Regions
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.pretrained import check_config
from distprune.checkpoint.regions import Region, regions_by_name
from distprune.models.find_shards import Found, find_shards
from distprune.models.named_model import model_of_names

# What quantizers store beside, or instead of, a weight (bitsandbytes, GPTQ, AWQ, compressed-tensors, FP8).
_QUANTIZED = (
    *("absmax", "SCB", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"),
)


@dataclass(frozen=True)
class StoredParameters:
    """``found``: the parameters to prune, on the meta device. ``stored``: where every one is in the checkpoint, of tied
    weights several times. ``written``: where all tensors are in the model. ``by_names``: names alone decided."""

    found: Found
    stored: dict[str, list[list[Region]]]
    written: Regions
    by_names: bool


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
    stored: dict[int, list[list[Region]]] = {}
    for name, of_name in regions_by_name(regions.values()).items():
        stored.setdefault(id(state[name]), []).append(of_name)
    found = find_shards(model, include, exclude)
    by_name = {shard.name: stored[id(shard.tensor)] for shard in found.shards}
    return StoredParameters(found, by_name, regions, known is None)


@contextmanager
def mapped_tensors(files: Sequence[WeightFile]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield all tensors of ``files`` by name, mapped: memory holds of them what the system keeps of the files. Local.

    Raises:
        ValueError: a file is no safetensors file.
    """
    with ExitStack() as opened:
        tensors = {}
        for file in files:
            handle = opened.enter_context(open_weights(file.path))
            tensors.update({entry.name: handle.get_tensor(entry.name) for entry in file.tensors})
        yield tensors


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
