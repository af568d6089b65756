"""A model's shards into a Hugging Face directory: every rank writes its own elements at their place.

No weight travels and no rank holds more than its shard: the place of every byte in the output files is
known beforehand, so the ranks write side by side. The target must be on a file system all ranks see.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.disk import check_room, partial_of, sync_file, write_whole
from distprune.checkpoint.hf_directory import (
    CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    HfDirectory,
    open_together,
    read_json,
)
from distprune.checkpoint.hf_load import build_like, build_on_meta
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.naming import check_complete, check_tensors, model_regions
from distprune.checkpoint.outputs import writing
from distprune.checkpoint.regions import Region, Shape, extents, fitted, regions_by_name
from distprune.checkpoint.stored_slices import Progress, Stored, stored_in, write_shards
from distprune.checkpoint.weight_file import WeightFile, begin_file, planned, read_weight_file
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.roster import Member, agreed_roster
from distprune.collectives.slow import work_together
from distprune.models.decoder_blocks import bare_model, decoder_blocks
from distprune.models.find_shards import check_model
from distprune.shards.layouts import is_held, local_shard
from distprune.shards.local_shard import LocalShard
from distprune.shards.parts import check_parts, with_owners


def save(
    model: nn.Module,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    source: str | Path | None = None,
    layers: Sequence[int] | None = None,
    overwrite: bool = False,
    group: Group = None,
) -> None:
    """Write ``model`` to a Hugging Face ``directory``, from whatever shards it is in; ``from_pretrained`` reads it.

    >>> model = load(folder / "model")
    >>> report = prune_model(model, 0.5)
    >>> save(model, folder / "half")

    Args:
        model: plain, DDP, FSDP2, HSDP or tensor parallel, pruned in place; of :func:`load`, or of ``from_pretrained``.
        directory: must not exist, or be empty; all ranks must see it.
        tokenizer: of transformers, written beside the model. Default: that of ``source``.
        source: the directory, or the hub's id, whose config, tokenizer and division into files the output has.
            Default: where ``model`` was loaded from.
        layers: which decoder layers of the source are left, as ``Shrunk.layers`` says. Default: all.
        overwrite: replace the model in ``directory``.
        group: the ranks that hold parts of the model.

    Every rank writes its own elements; nothing is gathered. It is written beside ``directory`` and renamed when all is
    on the disk. Every rank of ``group`` must call it, with equal arguments. Rounds: two of 64 bytes, and those of
    ``resolve_model``, ``open_together``, ``writing`` and ``save_model``.

    Raises:
        ImportError: on every rank: the extra ``hf`` is not installed.
        FileExistsError, OSError: on every rank: ``directory`` is not empty, or cannot be written.
        ValueError: on every rank: the source is not known, or holds other tensors than ``model``, such as those of a
            model whose masks are not removed; ``directory`` is the source; ranks hold different copies of a tensor.
        TypeError: on every rank: no model, or no tokenizer.
    """
    comm = communicator(group)
    with together(comm):
        check_model(model)
        if not (tokenizer is None or hasattr(tokenizer, "save_pretrained")):
            raise TypeError(f"tokenizer takes one of transformers, not {tokenizer!r}; its default is the source's")
        model = bare_model(model, past_fsdp=True)
        known = source or getattr(getattr(model, "config", None), "name_or_path", None)
        if not known:
            raise ValueError(f"where this {type(model).__name__} was loaded from is not known: say source='DIRECTORY'")
        if masked := [name for name, _ in model.named_parameters() if name.endswith("_orig")]:
            raise ValueError(f"{masked[0]!r} has a mask beside it: make zeros of the masks first, by prune.remove")
    path = resolve_model(str(known), group=comm)
    read = open_together(comm, path)
    with writing(directory, comm, overwrite=overwrite, inputs=[path]) as staging:
        save_model(model, read, staging, layers=layers, group=comm)
        with together(comm):
            if tokenizer is not None and comm.rank == 0:
                tokenizer.save_pretrained(staging)


def save_model(
    model: nn.Module,
    source: HfDirectory,
    target: Path,
    *,
    layers: Sequence[int] | None = None,
    group: Group = None,
    progress: Progress = None,
) -> None:
    """Write ``model`` into the existing directory ``target``, with the files of ``source``.

    ``layers``: which decoder blocks of ``source`` the model still has, by number, in order; they are numbered anew
    (``None``: all).

    The weight files, their names and which tensor is in which are those of ``source``; sizes and dtypes are the
    model's. The bytes are the same whatever the number of ranks and the layout. Tokenizer, config and the other small
    files are copied; the config of a model with other sizes than ``source`` is the model's own.

    Every rank of ``group`` must call it. Communicates what making a :class:`ModelWriter` does, two rounds of 64 bytes,
    and for each file what :meth:`ModelWriter.write` does.

    Raises:
        OSError: on every rank: the disk is full or not writable.
        ValueError: on every rank: the model's tensors are not those of ``source`` in name, or have other shapes than
            its config makes; or ranks were given different arguments, or models of different dtypes; copies differ, or
            elements are held by no rank.
        NotImplementedError: on every rank: ``layers`` whose tensors are not stored under their numbers.
    """
    writer = ModelWriter(model, source, layers=layers, group=group)
    files = {file.path.name: writer.stored_in(file) for file in source.weight_files}
    files = {name: stored for name, stored in files.items() if stored}  # of others all layers were removed
    with together(writer.comm, target=str(target)):
        if writer.comm.rank == 0:
            check_room(target, sum(map(writer.num_bytes, files.values())))
    num_done, num_total = 0, sum(map(writer.num_bytes_here, files.values()))
    for name, stored in files.items():
        tell = None if progress is None else partial(_tell, progress, num_done, num_total)
        writer.write(target / name, stored, tell)
        num_done += writer.num_bytes_here(stored)
    writer.finish(target, files)


def _tell(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


class ModelWriter:
    """Writes a model's tensors into safetensors files, some at a time, in the form in which ``source`` holds them.

    Noun: a *stored* name is that of a tensor of ``source``; it is written under its new name where layers were removed.

    Every rank of ``group`` must make one: two rounds of 64 bytes, up to four more if ranks hold different tensors, and
    that of ``check_parts``; raises as :func:`save_model`.
    """

    def __init__(
        self, model: nn.Module, source: HfDirectory, *, layers: Sequence[int] | None = None, group: Group = None
    ) -> None:
        self.comm, self._source = communicator(group), source
        with together(self.comm):
            state = model.state_dict(keep_vars=True)
            shards = {name: local_shard(name, tensor) for name, tensor in state.items()}
            tensors, self._config = _tensors_left(model, source, layers)
            # What the model calls the first region of each stored tensor.
            self._names = {stored: regions[0].name for stored, (_, regions) in tensors.items()}
            names = dict.fromkeys(region.name for _, regions in tensors.values() for region in regions)
            held = [shards[name] for name in names if is_held(state[name])]
            members = [Member(shard.name, shard.shape, str(shard.local.dtype), shard.layout) for shard in held]
            dtypes = [str(shards[name].local.dtype) for name in self._names.values()]
            facts = {"source": source.fingerprint(), "dtypes": dtypes, "layers": layers}
        roster = agreed_roster(self.comm, facts, members)
        # This rank's parts of each stored tensor, one in each of its regions.
        self._parts: dict[str, list[LocalShard]] = {}

        def settled() -> list[LocalShard]:
            if absent := [*names.keys() - roster.index().keys()]:
                raise ValueError(f"no rank holds {sorted(absent)[:5]}: pass a group of all ranks that hold a part")
            owned = with_owners(self.comm, roster, held)
            shards.update({shard.name: shard for shard in owned})
            self._parts = {stored: _parts_of(shape, regions, shards) for stored, (shape, regions) in tensors.items()}
            return owned

        check_parts(self.comm, roster, settled)

    def stored_in(self, file: WeightFile) -> list[str]:
        """Return the stored names of what is left of a ``file`` of the source. Local."""
        return [entry.name for entry in file.tensors if entry.name in self._parts]

    def by_module(self, modules: Sequence[str]) -> dict[str, list[str]]:
        """Return the stored names inside each of the ``modules``, and under ``""`` those inside of none. Local."""
        by_module: dict[str, list[str]] = {name: [] for name in ("", *modules)}
        for stored, name in self._names.items():
            inside = {*itertools.accumulate(name.split("."), "{}.{}".format)}
            by_module[next((module for module in modules if module in inside), "")].append(stored)
        return by_module

    def _planned(self, path: Path, stored: Sequence[str]) -> WeightFile:
        parts = (self._parts[name][0] for name in stored)
        return planned(path, [(part.name, part.local.dtype, part.geometry.global_shape) for part in parts])

    def num_bytes(self, stored: Sequence[str]) -> int:
        """Return how many bytes these tensors take, of all ranks together. Local."""
        return sum(entry.stop - entry.start for entry in self._planned(Path(), stored).tensors)

    def num_bytes_here(self, stored: Sequence[str]) -> int:
        """Return how many bytes this rank writes of these tensors. Local."""
        return sum(part.local.nbytes for name in stored for part in self._owned(name))

    def _owned(self, stored: str) -> list[LocalShard]:
        """Return the parts of a tensor that this rank writes: of copies the first rank's."""
        return [part for part in self._parts[stored] if part.owned and part.local.numel()]

    def write(self, path: Path, stored: Sequence[str], progress: Progress = None) -> None:
        """Write these tensors into the file ``path``, whole or not at all; every rank writes its own elements.

        Every rank must call it: three rounds of 64 bytes, and the wait for the disk as :func:`work_together`.

        Raises:
            OSError: on every rank: the disk is full or not writable.
        """
        with together(self.comm, file=str(path)):
            file = self._planned(partial_of(path), stored)
            if self.comm.rank == 0:
                begin_file(file)
        with together(self.comm):
            entries = zip(stored, file.tensors, strict=True)
            parts = [(part, entry) for name, entry in entries for part in self._owned(name)]
            write_shards(file.path, parts, progress)
        work_together(self.comm, lambda: sync_file(file.path))
        with together(self.comm):
            if self.comm.rank == 0:
                file.path.replace(path)

    def written(self, path: Path, stored: Sequence[str]) -> list[Stored]:
        """Return this rank's part of these tensors, to be read back into the model, and where it lies. Local.

        Raises:
            ValueError, OSError: ``path`` is no file that :meth:`write` has written of them.
        """
        return stored_in(read_weight_file(path), [part for name in stored for part in self._parts[name]])

    def finish(self, target: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Copy the source's small files beside the written ``files``, names to stored names, which the index lists.

        Every rank must call it: one round of 64 bytes.
        """
        with together(self.comm):
            if self.comm.rank == 0:
                written = [self._planned(target / name, stored) for name, stored in files.items()]
                write_small_files(self._source, written, target, self._config)


def write_small_files(
    source: HfDirectory, files: Sequence[WeightFile], target: Path, config: dict[str, Any] | None = None
) -> None:
    """Write into ``target`` all but its weight ``files``: what ``source`` has beside its weights, and an index.

    The config says the dtype, and the index the sizes, that are written; a single file needs none. ``config``: of a
    model of other sizes than the source's; ``None``: the source's own. Local; for one rank.

    Raises:
        OSError: the disk is full or not writable.
    """
    # A directory that only its owner may enter has such a copy.
    target.chmod(target.stat().st_mode & source.path.stat().st_mode | stat.S_IRWXU)
    for path in source.small_files:
        there = target / path.relative_to(source.path)
        there.parent.mkdir(parents=True, exist_ok=True)
        write_whole(there, path.read_bytes(), sync=False)
    written = [(entry, file.path.name) for file in files for entry in file.tensors]
    before = read_json(source.path / CONFIG_NAME)
    now = {**(before if config is None else config)}
    dtypes = {str(entry.dtype) for entry, _ in written if entry.dtype.is_floating_point}
    if len(dtypes) == 1:
        dtype = dtypes.pop().removeprefix("torch.")
        now.update({key: dtype for key in ("dtype", "torch_dtype") if key in now})
    if now != before:
        write_whole(target / CONFIG_NAME, f"{json.dumps(now, indent=2)}\n".encode(), sync=False)
    if [file.path.name for file in files] != [SINGLE_NAME]:
        metadata = {**source.index_metadata, "total_size": sum(entry.stop - entry.start for entry, _ in written)}
        if config is not None and "total_parameters" in metadata:
            metadata["total_parameters"] = sum(math.prod(entry.shape) for entry, _ in written)
        index = {"metadata": metadata, "weight_map": {entry.name: name for entry, name in written}}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_whole(target / INDEX_NAME, text.encode(), sync=False)


def _parts_of(shape: Shape, regions: Sequence[Region], shards: Mapping[str, LocalShard]) -> list[LocalShard]:
    """Return this rank's parts of a tensor that is written, one in each of its regions; ``shards``: of the model's.

    Raises:
        ValueError: the model holds them in several dtypes.
    """
    dtypes = {region.name: shards[region.name].local.dtype for region in regions}
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"tensor {regions[0].stored!r} is stored as one, and the model has several dtypes for it: {dtypes}"
        )
    return [region.part_of(shards[region.name], shape) for region in regions]


def _tensors_left(
    model: Any, source: HfDirectory, layers: Sequence[int] | None
) -> tuple[dict[str, tuple[Shape, list[Region]]], dict[str, Any] | None]:
    """Return by their names in ``source`` the shapes of the tensors to write, and where they are in ``model``. Local.

    Regions have the names under which tensors are written. Also the config of a model of other sizes than the source's.

    Raises:
        ValueError: the model lacks a tensor that ``source`` holds, or has another one, or its config makes others.
        NotImplementedError: tensors are not stored under the numbers of their layers, or the form in which they are
            stored does not go with the model's sizes.
    """
    state = model.state_dict(keep_vars=True)
    # Of the config's own model: transformers does not know the classes of a sharded one.
    regions = build_on_meta(source, torch.float32)[1]  # of whatever dtype
    blocks = "" if layers is None else re.escape(decoder_blocks(model)[0][0].rpartition(".")[0])
    numbers = {str(old): str(new) for new, old in enumerate(layers or ())}  # of layers, before and now
    new_names: dict[str, str] = {}  # of the model's tensors that are left
    stored_names: dict[str, str] = {}  # of the stored ones
    for stored, parts in regions.items():
        layer = re.match(rf"{blocks}\.(\d+)\.", parts[0].name) if blocks else None
        if layer is None or layer[1] in numbers:
            old, new = ("", "") if layer is None else (layer[1], numbers[layer[1]])
            stored_names[stored] = _renumbered(stored, old, new)
            new_names |= {region.name: _renumbered(region.name, old, new) for region in parts}
    absent = [name for name in new_names.values() if name not in state]
    if absent:
        way = "; if layers were removed, say layers=, as Shrunk.layers does" if layers is None else ""
        raise ValueError(f"the model has no {absent[:5]} ({len(absent)} in all), which {source.path} holds{way}")
    check_complete(state, source.path, new_names.values())
    shapes = {old: tuple(state[name].shape) for old, name in new_names.items()}
    if shapes == {name: extents(parts) for name, parts in regions_by_name(regions.values()).items()}:
        return {stored: (source.tensors[stored][1].shape, parts) for stored, parts in regions.items()}, None
    smaller = build_like(model, copy.deepcopy(model.config))
    stored_shapes = {stored: shape for stored, shape in fitted(regions, shapes).items() if stored in stored_names}
    now = model_regions(smaller, {stored_names[old]: shape for old, shape in stored_shapes.items()}, source.path)
    check_tensors(smaller.state_dict(keep_vars=True), f"this {type(model).__name__}", now)
    tensors = {stored: (shape, now[stored_names[stored]]) for stored, shape in stored_shapes.items()}
    return tensors, json.loads(model.config.to_json_string())


def _renumbered(name: str, old: str, new: str) -> str:
    """Return the name of a tensor of layer ``old`` that is layer ``new`` now.

    Raises:
        NotImplementedError: the first number in ``name`` is not that of the layer.
    """
    if old == new:
        return name
    first = re.search(r"(?<![^.])\d+(?![^.])", name)
    if first is None or first[0] != old:
        raise NotImplementedError(f"tensor {name!r} of layer {old} is not named after it: layers cannot be removed")
    return f"{name[: first.start()]}{new}{name[first.end() :]}"
