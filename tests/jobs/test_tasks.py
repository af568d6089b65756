"""Tasks of a harness, which is stood in for here: what it raises on one rank, all raise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distprune.collectives.communicator import communicator
from distprune.jobs import tasks
from tests.architectures import tiny_model
from tests.worlds import all_raise, run_threads

REQUESTS = [(None, [1, 2], [3]), (None, [4], [5, 6])]


class Answering:
    max_length = 16

    def __init__(self, pretrained: Any, **_: Any) -> None:
        self.rank = pretrained.rank


def evaluate(answering: Any, failing: int | None, **_: Any) -> Any:
    """Ask twice; one rank may fail between."""
    first = answering._loglikelihood_tokens(REQUESTS)
    if answering.rank == failing:
        raise OSError("no data")
    assert answering._loglikelihood_tokens(REQUESTS) == first
    return {"results": {"task": {"loss,none": first[0][0], "alias": "task"}}}


def test_a_harness_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "import_extra", lambda *_: SimpleNamespace(HFLM=Answering, evaluate=evaluate))

    def on_rank(rank: int, failing: int | None) -> dict[str, dict[str, float]]:
        model: Any = tiny_model("llama")
        model.rank = rank
        return tasks.run_tasks(failing, model, None, communicator())

    (alone,) = run_threads(1, on_rank, None)
    assert alone["task"]["loss"] < 0
    for found in run_threads(2, on_rank, None):
        assert found["task"]["loss"] == pytest.approx(alone["task"]["loss"], rel=1e-6)
    all_raise(2, on_rank, 0, kind=OSError, match="no data")
