from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.worlds import ProcessPool, process_pool

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4) as workers:
        yield workers
