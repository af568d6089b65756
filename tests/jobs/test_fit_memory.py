"""A walk that does not fit is refused on every rank before anything is done; one that nearly does is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distprune.calibration import available
from distprune.collectives.communicator import communicator
from distprune.jobs import OneShotJob, fit_memory, run_one_shot_job
from distprune.jobs.run import Run
from distprune.oneshot.memory_plan import fitted, plan_walk
from distprune.oneshot.walk_costs import BlockShape, InputShape, ModelShape, WalkRequest
from tests.worlds import run_threads

WIDTH, NUM_EXPERTS = 64, 8
FOUR_AT_A_TIME = 4 * 16 * WIDTH**2  # bytes of sums with their shift


class StandIn:
    """What is asked of a :class:`Run`."""

    def __init__(self, device: str) -> None:
        self.comm, self.device, self.reporter = communicator(), torch.device(device), self
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def walk(**changes: Any) -> tuple[ModelShape, WalkRequest]:
    """A walk that takes the most memory for waves of experts."""
    experts = InputShape(WIDTH, 8, num_experts=NUM_EXPERTS, share=1 / NUM_EXPERTS)
    model = ModelShape((BlockShape((experts,), 0),), 0, WIDTH, 4)
    options: dict[str, Any] = {"pairs": True, "by_row": True, "by_layer": True, "has_targets": True}
    return model, WalkRequest(2, 2, 1, "admm", **options, expert_memory=FOUR_AT_A_TIME, **changes)


def on_ranks(patch: pytest.MonkeyPatch, free: Mapping[str, float], device: str = "cpu", **changes: Any) -> list[Any]:
    """Return what each of 2 ranks is told; ``free``: the bytes that the second has, by device; the first has more."""

    def of_rank(where: torch.device) -> int | None:
        return int(free[where.type]) << 20 * (communicator().rank == 0) if where.type in free else None

    def on_rank(_: int) -> tuple[int, list[str]]:
        run: Any = StandIn(device)
        return fit_memory.fit_memory(run, *walk(**changes)), run.said

    patch.setattr(fit_memory, "available_bytes", of_rank)
    return run_threads(2, on_rank, catch=True)


def needed(**changes: Any) -> tuple[float, float]:
    """Return the bytes beside the weights, of the walk as it is asked for, and with one expert at a time."""
    model, request = walk(**changes)
    least = dataclasses.replace(request, expert_memory=1)
    return plan_walk(model, request).beyond_weights, plan_walk(model, least).beyond_weights


def test_what_fits_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    most, _ = needed()
    for free in ({}, {"cpu": 2 * (most + 1)}):  # nobody knows; ranks of a machine share what it has
        assert on_ranks(monkeypatch, free) == [(FOUR_AT_A_TIME, [])] * 2


def test_waves_get_smaller_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    most, least = needed()
    assert least < 0.9 * most
    for device in ("cpu", "cuda"):
        (memory, said), other = on_ranks(monkeypatch, {device: (2 if device == "cpu" else 1) * (most - 1)}, device)
        assert (memory, said) == other
        assert 0 < memory < FOUR_AT_A_TIME
        assert said[0].startswith("experts are pruned in more waves, to fit in memory: ")


def test_what_is_merely_tight_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, least = needed()
    for share, is_refused in ((0.8, False), (0.7, True)):
        for found in on_ranks(monkeypatch, {"cuda": share * least}, "cuda"):
            assert isinstance(found, ValueError) is is_refused


def test_what_does_not_fit_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, where, ways in (
        ({"cuda": 1 << 10, "cpu": 1 << 40}, "device", "offload=True (--offload), targets='own' (--targets own)"),
        ({"cpu": 1 << 10}, "host", "more ranks, targets='own' (--targets own)"),
    ):
        found = on_ranks(monkeypatch, free, "cuda" if "cuda" in free else "cpu")
        for error in found:
            assert isinstance(error, ValueError)
            assert f"that are free on the {where}, for each rank and beside its weights: " in str(error)
            assert "sums of a wave of experts" in str(error)
            assert "fewer samples (--samples), more ranks" in str(error)
            assert ways in str(error)
    model, request = walk(offload=True)
    plan = fitted(model, request, lambda _: False)[1]
    assert plan.most.host > 0
    for error in on_ranks(monkeypatch, {"cuda": 1 << 40, "cpu": plan.most.host}, "cuda", offload=True):
        assert "free on the host" in str(error)  # they share it
        assert "--offload" not in str(error)


def test_a_job_that_does_not_fit_leaves_nothing(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_memory, "available_bytes", lambda _: 1 << 10)
    monkeypatch.setattr(Run, "evaluate", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(ValueError, match=r"the walk takes .* of 9.54e-07 GiB that are free on the host"):
        run_one_shot_job(job)
    assert not any((tmp_path / "outputs").iterdir())


def test_what_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of what the system has and of what each control group leaves; pages of files give way."""
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   64 kB\n")
    (tmp_path / "cgroup").write_text("4:memory:/b/own\n9:name=systemd:/\n0::/a/own\n")
    monkeypatch.setattr(available, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(available, "_OWN_GROUPS", tmp_path / "cgroup")
    versions: dict[str, tuple[Any, ...]] = {
        name: (tmp_path / str(number), *files) for number, (name, (_, *files)) in enumerate(available._VERSIONS.items())
    }
    monkeypatch.setattr(available, "_VERSIONS", versions)
    host = torch.device("cpu")
    assert available.available_bytes(host) == 64 << 10
    for number, (_, limit, used, word) in enumerate(versions.values()):
        group = tmp_path / str(number) / "ab"[number]
        (group / "own").mkdir(parents=True)
        (group / limit).write_text(f"{60_000 - number}\n")
        (group / used).write_text("50000\n")
        (group / "memory.stat").write_text(f"anon 7\n{word} 20000\n")
        assert available.available_bytes(host) == 30_000 - number
    (tmp_path / "0" / "a" / "memory.max").write_text("max\n")
    assert available.available_bytes(host) == 29_999
    monkeypatch.setattr(available, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(available, "_OWN_GROUPS", tmp_path / "none")
    assert available.available_bytes(host) is None
    assert available.available_bytes(torch.device("meta")) is None
