"""Windows begin as a tokenizer begins texts."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from distprune import calibration_windows
from distprune.calibration import text
from distprune.calibration.data import Batches
from distprune.calibration.text import tokenize_file
from tests.calibration.test_data import Letters


class Begun(Letters):
    """A tokenizer of letters that begins texts with 26."""

    bos_token_id = 26
    eos_token_id = None

    @override
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = super().__call__(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [self.bos_token_id] * add_special_tokens + ids}


@pytest.mark.parametrize("whole", [1 << 23, 10])
def test_windows_begin_as_the_tokenizers_texts_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    """Nothing else changes: behind the first token stands what other tokenizers have in shorter windows."""
    path, plain = tmp_path / "text.txt", Letters()
    path.write_text(" ".join([string.ascii_lowercase] * 40))
    monkeypatch.setattr(text, "_WHOLE", whole)
    for source in (path, path.read_text()):
        windows = calibration_windows(source, Begun(), 5, 4, seed=3)
        assert windows[:, 0].tolist() == [26] * 5
        assert torch.equal(windows[:, 1:], calibration_windows(source, plain, 5, 3, seed=3))
    batches, shorter = (Batches(t, path, batch_size=3, length=n, seed=7) for t, n in ((Begun(), 6), (plain, 5)))
    assert batches[2][:, 0].tolist() == [26] * 3
    assert torch.equal(batches[2][:, 1:], shorter[2])
    line = tokenize_file(Begun(), path, max_tokens=14, sequence_length=4)
    assert line.tolist() == [26, 0, 1, 2, 26, 3, 4, 5, 26, 6, 7, 8, 26, 9, 10, 11]
    assert calibration_windows(path, Begun(), 2, 1, seed=3).max() < 26  # no room
