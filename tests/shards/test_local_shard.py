"""Chunks of tensors that are not contiguous: the same elements, and no more of them are read than a few times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distprune.shards import device
from distprune.shards.local_shard import flat_chunks


class Copying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``num_copied``: how many elements were copied."""

    num_copied = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.cat.default):
            self.num_copied += result.numel()
        return result


NOT_CONTIGUOUS = {
    "rows": torch.arange(96.0).view(12, 8).t(),
    "one large entry": torch.arange(96.0).view(1, 12, 8).transpose(1, 2),
    "large entries": torch.arange(210.0).view(3, 10, 7).transpose(1, 2),
    "large entries within": torch.arange(240.0).view(2, 2, 10, 6).transpose(2, 3),
    "every second": torch.arange(64.0)[::2],
    "a column": torch.arange(64.0).view(32, 2)[:, 1:],
    "broadcast": torch.arange(30.0).expand(4, 30),
    "8-bit floats": torch.arange(96.0).to(torch.float8_e5m2).view(1, 12, 8).transpose(1, 2),
}


@pytest.mark.parametrize("tensor", NOT_CONTIGUOUS.values(), ids=NOT_CONTIGUOUS.keys())
def test_chunks(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_HOST_CHUNK", 16)
    assert not tensor.is_contiguous()
    with Copying() as mode:  # type: ignore[no-untyped-call]
        chunks = list(flat_chunks(tensor))
    assert [start for start, _ in chunks] == list(range(0, tensor.numel(), 16))
    assert torch.equal(torch.cat([chunk for _, chunk in chunks]).float(), tensor.flatten().float())
    assert mode.num_copied <= 4 * tensor.numel()
