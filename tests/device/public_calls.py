"""Every public call of distprune that works on tensors, on small models, wherever they lie.

Each returns what it came to, whole and on the CPU, or as Python's values: the same on every device and layout.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import distprune as prune
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from tests.architectures import samples, tiny_model
from tests.masks.test_adapters import PeftModel
from tests.removal.layouts import shard
from tests.selection.test_device import CALLS, linear
from tests.training.optimizers import INCLUDE
from tests.wrapped import Transformer, pairs_of, transformer, whole

__all__ = ["CALLED", "PUBLIC_CALLS", "Place", "results"]


@dataclass(frozen=True)
class Place:
    """Where models lie: whole on ``device``, or sharded by FSDP2 over all ranks there; ``source``: a model on disk."""

    device: torch.device
    source: Path
    is_sharded: bool = False

    def put(self, model: Any) -> Any:
        model = model.to(self.device)
        if not self.is_sharded:
            return model
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        return shard(model, mesh)

    def comm(self) -> Communicator:
        return communicator(None) if self.is_sharded else Alone()

    def folder(self) -> contextlib.AbstractContextManager[str]:
        """Return a new folder, the same on all ranks that share the model."""
        return _shared_folder() if self.is_sharded else tempfile.TemporaryDirectory()


@contextlib.contextmanager
def _shared_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        names: list[str] = [own]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()


def results(found: Any) -> Any:
    """Return what a call came to as it can be compared, on the CPU."""
    if isinstance(found, nn.Module):
        found = dict(found.named_parameters()) | dict(found.named_buffers())
    if isinstance(found, prune.Masks | dict):
        return {name: results(value) for name, value in found.items()}
    return whole(found).cpu() if isinstance(found, torch.Tensor) else found


Call = Callable[[Place], Any]


def _weights(place: Place) -> Transformer:
    model: Transformer = place.put(transformer())
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """Train on the same batch on every rank."""
    device = next(model.parameters()).device
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(seed)).to(device)
    logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _on_linear(name: str, place: Place) -> Any:
    module = linear("ties").to(place.device)
    if place.is_sharded:
        fully_shard(module, mesh=init_device_mesh(place.device.type, (dist.get_world_size(),)))
    found = CALLS[name](module, place.comm())  # type: ignore[arg-type]
    return module if name != "sparsity" else found


def _on_each(function: Callable[..., object], place: Place, *arguments: Any, **named: Any) -> Any:
    model = _weights(place)
    for module, name in pairs_of(model):
        function(module, name, *arguments, group=place.comm(), **named)
    return model


def _global(place: Place) -> Any:
    model = _weights(place)
    prune.global_unstructured(pairs_of(model), prune.L1Unstructured, amount=0.5, group=place.comm())
    return model


def _masks(place: Place) -> Any:
    model, comm = _weights(place), place.comm()
    masks = prune.compute_masks(model, 0.5, group=comm)
    other = prune.compute_masks(model, pattern=prune.PerRow(0.25), group=comm)
    both = masks & other
    assert not both.equal(masks)
    masks.apply_()
    alike = masks.overlap(other).total, (masks | ~other).sparsity(by="name")
    return {"share": masks.sparsity(), "masks": masks, "pruned": model, "alike": alike}


def _reparametrized(place: Place) -> Any:
    model = _weights(place)
    prune.compute_masks(model, 0.5, include=INCLUDE, group=place.comm()).reparametrize()
    assert all(prune.is_pruned(module) for module, _ in pairs_of(model))
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return prune.dense_state_dict(model)


def _scored_by(score: Any, place: Place) -> Any:
    model = _weights(place)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)).to(place.device)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = values
    prune.prune_model(model, 0.5, score=score, group=place.comm())
    return model


def _shards(place: Place) -> Any:
    """Rows that a program spread by itself."""
    comm = place.comm()
    values = torch.randn(12, 8, generator=torch.Generator().manual_seed(5))
    step = 12 // comm.size
    start, stop = comm.rank * step, (comm.rank + 1) * step
    rows = values[start:stop].clone().to(place.device)
    shard_ = prune.LocalShard("w", rows, prune.Geometry.rows((12, 8), start, stop), prune.Ownership())
    report = prune.prune_shards([shard_], 0.5, group=comm)
    expected = values.masked_fill(values.abs() <= values.abs().flatten().kthvalue(48).values, 0)
    assert torch.equal(rows.cpu(), expected[start:stop])
    return report.num_zeros


def _shared_masks(place: Place) -> Any:
    """Pruned whole by torch, then sharded."""
    model = transformer()
    for module, name in pairs_of(model):
        torch_prune.l1_unstructured(module, name, 0.5)  # type: ignore[no-untyped-call]
    model = place.put(model)
    prune.shard_masks(model, group=place.comm())
    for module, name in pairs_of(model)[::2]:
        prune.remove(module, name)
    return model


def _adapters(place: Place) -> Any:
    model = transformer()
    prune.prune_model(model, 0.5, include=INCLUDE, group=Alone())
    adapted = place.put(PeftModel(model, ["layers.0.up", "layers.1.down"]))
    return prune.merge_adapters(adapted)


def _held(place: Place) -> Any:
    model, comm = _weights(place), place.comm()
    prune.prune_model(model, 0.5, include=INCLUDE, group=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hold = prune.hold_zeros(model, optimizer, include=INCLUDE, group=comm)
    for seed in range(2):
        _step(model, optimizer, seed)
    assert hold.counts().sparsity >= 0.5
    hold.finish()
    return model


def _held_before_it_is_moved(place: Place) -> Any:
    """As CUDA moves a model: the parameters stay the same objects, with the hooks they have, in other memory."""
    model = transformer()
    prune.prune_model(model, 0.5, include=INCLUDE, group=Alone())
    hold = prune.hold_zeros(model, include=INCLUDE, group=Alone())
    for hook in hold._binding._part_hooks:
        hook.remove()
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(place.device)))  # type: ignore[no-untyped-call]
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    hold._binding._watch()
    model = place.put(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        _step(model, optimizer, seed)
    hold.finish()
    return model


def _trained(place: Place, **arguments: Any) -> Any:
    model, comm = _weights(place), place.comm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = prune.SparseTraining(model, optimizer, include=INCLUDE, group=comm, **arguments)
    for seed in range(5):
        _step(model, optimizer, seed)
    training.report()
    training.finish()
    return model


def _straight_through(place: Place) -> Any:
    model, comm = _weights(place), place.comm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = prune.StraightThrough(
        model, optimizer, pattern="2:4", include=["*.attention.q.weight", "*.up.weight"], group=comm
    )
    for seed in range(2):
        _step(model, optimizer, seed)
    training.finish()
    return model


def _erk(place: Place) -> Any:
    return prune.erk(_weights(place), 0.8, group=place.comm())


def _checkpoint(place: Place) -> Any:
    """Through torch.distributed.checkpoint, of a model that is reparametrized, into another."""
    model, comm = _weights(place), place.comm()
    prune.prune_each(pairs_of(model), prune.L1Unstructured, amount=0.5, group=comm)
    other = _weights(place)
    prune.prune_each(pairs_of(other), prune.Identity, group=comm)
    with place.folder() as folder:
        save(get_model_state_dict(model), checkpoint_id=folder, no_dist=not place.is_sharded)
        state = get_model_state_dict(other)
        load(state, checkpoint_id=folder, no_dist=not place.is_sharded)
        set_model_state_dict(other, state)
    return other


def _files(place: Place) -> Any:
    """A directory of Hugging Face in, pruned, and out."""
    comm = place.comm()
    model = prune.load(place.source, device=place.device, group=comm)
    prune.prune_model(model, 0.5, group=comm)
    with place.folder() as folder:
        prune.save(model, Path(folder) / "out", group=comm)
        return prune.load(Path(folder) / "out", group=Alone())


def _decoder(place: Place, **changes: Any) -> Any:
    return place.put(tiny_model("llama", **changes))


def _blocks(method: Any, pattern: Any, place: Place, **options: Any) -> Any:
    model = _decoder(place)
    prune.prune_blocks(model, samples(4), method=method, pattern=pattern, seed=3, group=place.comm(), **options)
    return model


def _perplexity(place: Place) -> Any:
    ids = samples(4).flatten()
    return round(prune.perplexity(_decoder(place), ids, sequence_length=16, group=place.comm()), 3)


def _own_words(place: Place) -> Any:
    # The likeliest token each time: else another number of ranks writes other words.
    return prune.own_words(_decoder(place), 2, 6, top_k=1, group=place.comm())


def _allocated(place: Place) -> Any:
    return prune.allocate(_decoder(place), samples(4), sparsity=0.5, group=place.comm())


def _shrunk(place: Place, **asked: Any) -> Any:
    model = _decoder(place, num_key_value_heads=2, num_attention_heads=4)
    shrunk = prune.shrink_model(model, samples(4), group=place.comm(), **asked)
    assert model(samples(1).to(place.device)).logits.isfinite().all()
    return {str(key): index.tolist() for key, index in shrunk.kept.items()} | {"layers": shrunk.layers}


PUBLIC_CALLS: dict[str, Call] = {
    **{f"linear {name}": partial(_on_linear, name) for name in CALLS},
    "identity": partial(_on_each, prune.identity),
    "random pattern": partial(_on_each, prune.random_pattern, pattern=prune.PerRow(0.5), seed=3),
    "global": _global,
    "masks": _masks,
    "reparametrized": _reparametrized,
    "shards": _shards,
    "shared masks": _shared_masks,
    "adapters": _adapters,
    **{f"by {score}": partial(_scored_by, score) for score in ("gradient", "taylor")},
    "held": _held,
    "held before it is moved": _held_before_it_is_moved,
    "erk": _erk,
    "rises": partial(_trained, schedule=prune.cubic(0.8, stop=4, every=2)),
    "movement": partial(_trained, schedule=prune.at_once(0.5, step=3), score="movement"),
    "rigl": partial(_trained, schedule=prune.constant(0.8), regrow=prune.Regrow(stop=4, every=2, by="gradient")),
    "straight through": _straight_through,
    "checkpoint": _checkpoint,
    "files": _files,
    "perplexity": _perplexity,
    "allocated": _allocated,
    "own words": _own_words,
    **{
        f"blocks {method} {pattern}": partial(_blocks, method, pattern)
        for method, pattern in (
            ("wanda", prune.Unstructured(0.5)),
            ("wanda", prune.NByM(2, 4)),
            ("magnitude", prune.PerRow(0.3)),
            ("random", prune.Block(4, 0.4)),
            ("sparsegpt", prune.NByM(2, 4)),
            ("admm", prune.Unstructured(0.5)),
        )
    },
    "blocks permuted 2:4": partial(_blocks, "wanda", prune.NByM(2, 4), permute="channels"),
    "shrunk": partial(_shrunk, mlp=0.5, heads=2, layers=2),
    "shrunk groups": partial(_shrunk, kv_groups=0.5, criterion="activation", refit="none"),
}


# Of distprune.__all__, by the call above that stands for it.
_ON_WEIGHTS = ("l1_pattern", "l1_unstructured", "ln_structured", "random_structured", "random_unstructured")
CALLED: dict[str, Sequence[str]] = {
    "linear unstructured": ["Magnitude", "Unstructured", "prune_model", "PruneReport", "ParameterReport"],
    "linear by value": ["Score"],
    "linear random": ["Random"],
    "linear row": ["PerRow", "Pattern"],
    "linear 2:4": ["NByM"],
    "linear block": ["Block"],
    "linear channels 0": ["ChannelNorm", "Channels"],
    "linear sparsity": ["sparsity"],
    "linear l1_unstructured": ["BasePruningMethod", "CustomFromMask", "L1Unstructured", "PruningContainer"],
    "linear ln_structured": ["LnStructured", "custom_from_mask", *_ON_WEIGHTS],
    "linear random_unstructured": ["RandomUnstructured"],
    "linear random_structured": ["RandomStructured"],
    "linear 2:4 of what is left": ["L1Pattern"],
    "identity": ["Identity", "identity"],
    "random pattern": ["RandomPattern", "random_pattern"],
    "global": ["global_unstructured"],
    "masks": ["Masks", "Overlap", "compute_masks"],
    "reparametrized": ["dense_state_dict", "is_pruned"],
    "shards": ["Geometry", "LocalShard", "Ownership", "prune_shards"],
    "shared masks": ["remove", "shard_masks"],
    "adapters": ["merge_adapters"],
    "by gradient": ["Gradient"],
    "by taylor": ["Taylor"],
    "held": ["Hold", "hold_zeros"],
    "erk": ["erk"],
    "rises": ["SparseTraining", "TrainingReport", "cubic", "stepwise"],
    "movement": ["Movement", "at_once"],
    "rigl": ["Regrow", "constant"],
    "straight through": ["StraightThrough"],
    "checkpoint": ["prune_each"],
    "files": ["load", "save"],
    "perplexity": ["perplexity"],
    "allocated": ["allocate"],
    "own words": ["own_words"],
    "blocks wanda unstructured": ["OneShotReport", "Solver", "Wanda", "prune_blocks"],
    "blocks sparsegpt 2:4": ["SparseGPT"],
    "blocks admm unstructured": ["ADMM"],
    "shrunk": ["Shrunk", "shrink_model"],
}
