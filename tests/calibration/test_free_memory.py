"""Freed memory is given back when a process grows from block to block, and kept otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from distprune.calibration import free_memory
from distprune.calibration.free_memory import FreeMemory

MIB = 1 << 20


class Process:
    """Stands in for the process and its C library: so much is resident, and so often it was trimmed."""

    def __init__(self) -> None:
        self.resident = 0
        self.num_trims = 0

    def trim(self, _: int) -> int:
        self.num_trims += 1
        return 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(free_memory, "_resident_bytes", lambda: process.resident)
    monkeypatch.setattr(free_memory, "_malloc_trim", lambda: process.trim)
    return process


def after_blocks(process: Process, *resident: int) -> list[int]:
    memory, found = FreeMemory(), []
    for size in resident:
        process.resident = size * MIB
        memory.give_back()
        found.append(process.num_trims)
    return found


def test_what_a_block_has_needed_stays_for_the_next_one(process: Process) -> None:
    assert after_blocks(process, 1000, 1000, 1032, 990, 1032) == [0, 0, 0, 0, 0]


def test_growth_is_given_back_and_measured_anew(process: Process) -> None:
    # After the third block it is trimmed; the fourth needs what it needs, and is what the next are held against.
    assert after_blocks(process, 1000, 1020, 1033, 1010, 1042, 1043) == [0, 0, 1, 1, 1, 2]


def test_elsewhere_nothing_is_done(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_malloc_trim", lambda: None)
    assert after_blocks(process, 1000, 2000, 3000) == [0, 0, 0]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_this_process_is_measured() -> None:
    before = free_memory._resident_bytes()
    taken = bytearray(b"1") * (64 * MIB)
    assert free_memory._resident_bytes() - before > 32 * MIB
    del taken
