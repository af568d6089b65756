"""Models of the hub: found in its cache, fetched once a machine, or an error on every rank; never a pickle or code."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from typing_extensions import override

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hub import name_of_model, resolve_model
from tests.hf_models import make_model
from tests.worlds import all_raise, run_threads

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tmp_path)) == resolve_model(f"~/{tmp_path.name}") == tmp_path
    assert name_of_model(Path(".")) == name_of_model(tmp_path) == tmp_path.name
    with pytest.raises(FileNotFoundError, match=r"is called org/name or org/name@revision"):
        resolve_model("smollm3")


def test_ranks_given_different_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    all_raise(2, lambda rank: resolve_model(str(tmp_path / "ab"[rank])), kind=ValueError, match="different arguments")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which is offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_found_in_the_cache_while_offline(cache: Path) -> None:
    snapshot = cache / "models--org--na.me" / "snapshots" / COMMIT
    make_model(snapshot)
    for ref in ("main", "v1"):
        path = cache / "models--org--na.me" / "refs" / ref
        path.parent.mkdir(exist_ok=True)
        path.write_text(COMMIT)
    for name in ("org/na.me", "org/na.me@v1", f"org/na.me@{COMMIT}"):
        assert run_threads(3, lambda _, name=name: resolve_model(name)) == [snapshot] * 3
    assert name_of_model(snapshot) == "org/na.me"
    assert name_of_model(cache / "org" / "me") == "me"


@pytest.mark.parametrize("name", ["org/name", "org/name@v1"])
def test_not_in_the_cache_while_offline(cache: Path, name: str) -> None:
    said = f"there is no directory 'org/name', and the hub's cache {cache} does not hold all .*: unset HF_HUB_OFFLINE"
    way_out = f"or fetch it where there is a network: hf download {name.replace('@', ' --revision ')}"
    all_raise(2, lambda _: resolve_model(name), kind=FileNotFoundError, match=f"{said}, {way_out}$")


def test_a_directory_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(cache / "models--org--name" / "snapshots" / COMMIT)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")


def test_a_directory_that_one_rank_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    exists = os.path.exists

    def one_sees(path: Path) -> bool:
        return torch.distributed.get_rank() == 1 if str(path) == "org/name" else exists(path)

    monkeypatch.setattr(os.path, "exists", one_sees)
    match = "exists: false on rank 0; true on rank 1$"
    all_raise(2, lambda _: resolve_model("org/name"), kind=ValueError, match=match)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as serves the files of one folder as ``org/name``."""

    folder: Path
    served: list[str]

    @override
    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        where = self.path.partition("?")[0]
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = {str(path.relative_to(self.folder)): path for path in files}
        if where == "/api/models/org/name/revision/main":
            siblings = [{"rfilename": name} for name in names]
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif where == f"/api/models/org/name/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": f"{len(name):040x}"}
                for name, path in names.items()
            ]
            self._answer(json.dumps(entries).encode())
        elif (name := where.removeprefix(f"/org/name/resolve/{COMMIT}/")) in names:
            if self.command == "GET":
                self.served.append(name)
            self._answer(names[name].read_bytes(), f'"{len(name):040x}"')
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _answer(self, body: bytes, etag: str | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        if etag is not None:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    assert not cache.exists()
    folder = make_model(tmp_path / "served")
    for name in ("tokenizer.json", "README.md"):
        (folder / name).write_text("{}")
    for name in ("additional_chat_templates/rag.jinja", "1_Pooling/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    (folder / "onnx").mkdir()
    for name in ("pytorch_model.bin", "modeling_llama.py", "consolidated.safetensors", "onnx/config.json"):
        (folder / name).write_text("not to be fetched")
    monkeypatch.setattr(Hub, "folder", folder, raising=False)
    monkeypatch.setattr(Hub, "served", [], raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_port}"
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetched_once_without_pickles_and_code(hub: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    assert run_threads(3, lambda _: resolve_model("org/name")) == [snapshot] * 3
    wanted = ["1_Pooling/config.json", "README.md", "additional_chat_templates/rag.jinja", "config.json"]
    wanted += ["generation_config.json", "model.safetensors", "tokenizer.json"]
    fetched = sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file())
    assert sorted(hub.served) == fetched == wanted
    assert open_directory(snapshot).tensors
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/name") == snapshot
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="does not hold all of"):
        resolve_model("org/name")


@pytest.mark.usefixtures("hub")
def test_a_log_that_fails_is_said_on_every_rank() -> None:
    def log(_: str) -> None:
        raise ValueError("nobody listens")

    all_raise(2, lambda _: resolve_model("org/name", log=log), kind=ValueError, match="nobody listens$")


def test_what_the_hub_refuses_is_said_on_every_rank(hub: type[Hub]) -> None:
    match = "there is no directory 'org/nothing', and the hub's model cannot be fetched: RepositoryNotFound"
    all_raise(2, lambda _: resolve_model("org/nothing"), kind=OSError, match=match)
    assert hub.served == []
