"""Models by name: a directory, or an id of the Hugging Face hub, fetched once a machine.

Of a hub's model only safetensors, configs, tokenizers and cards are fetched: no pickles, no code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from distprune.checkpoint.optional_packages import import_extra
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.slow import work_together
from distprune.formatting import cut

_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_NEEDED = ["*.safetensors", "config.json"]
_FETCHED = [*_NEEDED, "*.json", "*.jinja", "*.model", "*.txt", "README.md", "LICENSE*", "NOTICE*"]
# Other sub-folders than additional_chat_templates and 1_Pooling; Mistral's second copy of the weights.
_NOT_FETCHED = ["[!0-9a]*/*", "a[!d]*/*", "*/*.safetensors", "consolidated*"]
_MAX_MESSAGE = 500  # characters

Log: TypeAlias = Callable[[str], None] | None


def resolve_model(name: str, group: Group = None, *, log: Log = None) -> Path:
    """Return the directory of ``name``: a directory as it is, or that of ``org/name[@revision]``.

    A directory that exists wins. Every rank of ``group`` must call it. A hub's model is fetched into the hub's cache,
    once on each machine by the hub's own locks, however long it takes: as :func:`work_together`, and a round of 64
    bytes. With ``HF_HUB_OFFLINE=1`` the hub is not asked and what its cache holds is taken, as it is where the hub does
    not answer.

    Raises:
        ValueError: on every rank: ranks find different things under that name.
        FileNotFoundError: on every rank: no directory, and not in the hub's cache while offline.
        OSError: on every rank: the hub refuses it, or fetching it failed.
        ImportError: on every rank: the extra ``hf`` is not installed.
    """
    comm = communicator(group)
    path, hub = Path(os.path.expanduser(name)), _HUB_ID.fullmatch(name)
    exists = os.path.exists(path)  # does not raise: a folder may be closed to us
    with together(comm, model=name, exists=exists):
        if hub is None and not path.exists():
            raise FileNotFoundError(
                f"there is no model directory {name!r}; a model of the hub is called org/name or org/name@revision"
            )
    if hub is None or exists:
        return path
    snapshots: list[Path] = []
    log = log if comm.rank == 0 else None
    work_together(comm, lambda: snapshots.append(_snapshot(hub["id"], hub["revision"], log)))
    return snapshots[0]


def name_of_model(path: Path) -> str:
    """Return what the model in directory ``path`` is called: its id on the hub, if it is in the hub's cache. Local."""
    return hub_id_of(path) or os.path.basename(os.path.abspath(path))


def hub_id_of(path: Path) -> str:
    """Return the id on the hub of the model in directory ``path``, if it is in the hub's cache. Local."""
    repository = path.parent.parent.name  # models--ORG--NAME/snapshots/COMMIT
    is_cached = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_cached else ""


def _snapshot(hub_id: str, revision: str | None, log: Log) -> Path:
    """Return the directory of the hub's model in the hub's cache; what is missing there is fetched. Local."""
    hub, constants = (import_extra(f"huggingface_hub{part}", "hf") for part in ("", ".constants"))
    offline = constants.HF_HUB_OFFLINE
    if log is not None and not offline:
        log(f"fetching {hub_id} from the hub, or what its cache does not hold")
    wanted = _NEEDED if offline else _FETCHED
    try:
        return Path(
            hub.snapshot_download(hub_id, revision=revision, allow_patterns=wanted, ignore_patterns=_NOT_FETCHED)
        )
    except Exception as error:
        if offline:
            named = hub_id if revision is None else f"{hub_id} --revision {revision}"
            raise FileNotFoundError(
                f"there is no directory {hub_id!r}, and the hub's cache {constants.HF_HUB_CACHE} does not hold all "
                f"of such a model: unset HF_HUB_OFFLINE, or fetch it where there is a network: hf download {named}"
            ) from error
        said = cut(f"{type(error).__name__}: {error}", _MAX_MESSAGE)
        raise OSError(f"there is no directory {hub_id!r}, and the hub's model cannot be fetched: {said}") from error
