from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.accelerator import BACKEND, register
from tests.device.build import build, missing
from tests.worlds import ProcessPool, process_pool


@pytest.fixture(scope="session")
def devices() -> Iterator[ProcessPool]:
    """Two processes that have the simulated device, ``simulated:0`` and ``simulated:1``."""
    if reason := missing():
        pytest.skip(reason)
    build()
    with process_pool(2, register, BACKEND) as workers:
        yield workers
