from __future__ import annotations

import itertools
import math
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_GOLDEN = (math.sqrt(5) - 1) / 2

if not any(Path(gpu).exists() for gpu in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on CPU tensors; read where Triton is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run what is marked whole, too: every product, every launch")


def pytest_configure(config: pytest.Config) -> None:
    """Import what takes seconds, but not where xdist only hands out the tests."""
    if hasattr(config, "workerinput") or not config.getoption("tx", None):
        config.pluginmanager.import_plugin("tests.session")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests that share what takes long on one worker. (pytest 9.2 does not see the marks of xdist 3.8.)"""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # where there is xdist

    together = ["tests/device/"]  # one pool of device processes
    together += [] if config.getoption("--whole") else ["tests/test_faults.py"]  # what was tried
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: next((path for path in together if nodeid.startswith(path)), nodeid)
    return scheduler


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    by_default = [item for item in items if not item.get_closest_marker("whole")]
    rows_of = defaultdict(list)
    for item in by_default:
        if item.get_closest_marker("sampled"):
            rows_of[item.nodeid.partition("[")[0]].append(item)
    left_out = set(items).difference(by_default)
    for rows in rows_of.values():
        marker = rows[0].get_closest_marker("sampled")
        assert marker is not None
        taken: set[pytest.Item] = set()
        for i in itertools.count():  # spread over the table, and in step with no axis of it
            if len(taken) == min(marker.args[0], len(rows)):
                break
            taken.add(rows[int(len(rows) * (i * _GOLDEN % 1))])
        left_out.update(set(rows) - taken)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    """The command ignores SIGTERM once it ends, and runs within this process in some tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
