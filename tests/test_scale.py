"""A thousand ranks on one: rounds and bytes of what every rank does, on a fake process group. Ceilings, not times."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Shard

from distprune.patterns import cut_units
from tests.fake_ranks import CALLS, fake_group, sharded_model
from tests.sampling import only_whole

MOST_ROUNDS = 14
MOST_BYTES, MOST_BYTES_A_PARAMETER = 1 << 20, 16


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("num_parameters", [100, only_whole(1000), only_whole(5000)])
def test_messages_stay_small(call: str, num_parameters: int) -> None:
    used = {}
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            model = sharded_model(num_parameters, size)
            CALLS[call](model, comm)
            used[size] = comm.traffic
    for traffic in used.values():
        assert traffic.num_rounds <= MOST_ROUNDS
        assert traffic.num_bytes <= MOST_BYTES + MOST_BYTES_A_PARAMETER * num_parameters
    # With more ranks there are more elements, so that fewer counts share a word; or they are worth a sample.
    assert used[1024].num_bytes <= 1.5 * used[64].num_bytes + (128 << 10)


def test_cut_rows_take_as_many_rounds_on_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_units, "_BATCH", 1 << 12)
    num_rounds = set()
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            CALLS["rows"](sharded_model(1, size, (2048, 1), Shard(1)), comm)
            num_rounds.add(comm.traffic.num_rounds)
            # To each rank a word, and a rectangle; each has an equal part of the keys.
            assert comm.largest <= (1 << 12) + (8 + 64) * size + 4 * size
    assert num_rounds == {3 + 1 + 3 * 2}
